"""The typed parts of an agent's prompt."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

from agentkv.errors import FieldError, SegmentError, ValueRenderError
from agentkv.tools import ToolSpec
from agentkv.values import Granularity, canonical, is_unicode, with_unit


class Scope(StrEnum):
    """Who shares a segment's text."""

    SHARED = "shared"
    """The same for every conversation: its KV can be shared between them."""
    SESSION = "session"
    """Belongs to one user or session; placed early it keeps others from sharing a prefix."""


class Deletion(StrEnum):
    """What becomes of a segment or field that is no longer declared."""

    DORMANT = "dormant"
    """Say nothing: it stays readable and unused. The default for documents."""
    SOFT = "soft"
    """A tombstone erratum says it no longer holds. The default for skills, tools and fields."""
    WITHDRAWN = "withdrawn"
    """The prompt is rewritten at once. The default for policies."""
    HARD = "hard"
    """Rewritten under a new salt, and redacted from the ledger."""


class Splicing(StrEnum):
    """Whether a text's compiled KV is loaded instead of prefilling it."""

    AUTO = "auto"
    """Where there is an artifact of it and loading costs less than computing."""
    NEVER = "never"
    """It is always computed."""
    ALWAYS = "always"
    """Wherever that is possible; it is compiled when it is first needed."""


@dataclass(frozen=True, slots=True)
class Inline:
    """Text in which fields stand, such as ``Inline("You serve {customer.name}.")``.

    Parameters
    ----------
    template
        Text with field keys in braces; a literal brace is doubled.

    Raises
    ------
    SegmentError
        A brace is not closed, or a placeholder is empty, converted or formatted.
    """

    template: str
    parts: tuple[tuple[str, str | None], ...] = field(init=False, repr=False)
    """Literal text and the key that follows it, in order."""

    def __post_init__(self) -> None:
        if not isinstance(self.template, str):
            raise SegmentError(f"inline text is a {type(self.template).__name__}; give a str")
        try:
            parsed = list(string.Formatter().parse(self.template))
        except ValueError as error:
            raise SegmentError(f"inline text: {error}; double a brace that is meant literally") from error
        parts: list[tuple[str, str | None]] = []
        for literal, name, form, conversion in parsed:
            # What Python's formatting takes for a format may be the rest of a key, as in {order:7.status}.
            key = f"{name}:{form}" if form else name
            if key is not None and (not name or conversion or not _KEY_CHARACTERS.issuperset(key)):
                raise SegmentError(
                    f"inline text: placeholder {{{key}}} must be a field's key alone; "
                    "double a brace that is meant literally"
                )
            parts.append((literal, key))
        object.__setattr__(self, "parts", tuple(parts))

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the fields that stand in the text, in order."""
        return tuple(key for _, key in self.parts if key is not None)


Text: TypeAlias = str | Inline
"""A segment's text: literal, or with fields in it."""


def _digest(text: Text) -> str:
    source = text.template if isinstance(text, Inline) else text
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def _check_text(kind: str, name: str, text: object) -> None:
    if not isinstance(text, str | Inline):
        raise SegmentError(f"{kind} {name!r}: text is a {type(text).__name__}; give a str or Inline(...)")
    plain = text.template if isinstance(text, Inline) else text
    if not plain.strip():
        raise SegmentError(f"{kind} {name!r} is empty; leave it out instead")
    if not is_unicode(plain):
        raise SegmentError(f"{kind} {name!r}: its text holds a lone surrogate, which has no UTF-8; remove it")


_Member = TypeVar("_Member", bound=StrEnum)


def member(kind: type[_Member], value: _Member | str, what: str) -> _Member:
    """Return a member of an enumeration, given as such or by its value.

    Raises
    ------
    SegmentError
        There is no such member.
    """
    try:
        return kind(value)
    except ValueError:
        raise SegmentError(f"{what}: {value!r} is none of {', '.join(kind)}") from None


def _check_name(kind: str, name: object) -> None:
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise SegmentError(f"{kind}: name {name!r} must be one line of printable text")


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules of the highest authority. Changing or withdrawing one rewrites the prompt at once."""

    text: Text
    name: str = "policy"
    scope: Scope = Scope.SHARED

    def __post_init__(self) -> None:
        _check_name("Policy", self.name)
        object.__setattr__(self, "scope", member(Scope, self.scope, f"Policy {self.name!r}: scope"))
        _check_text("Policy", self.name, self.text)

    @property
    def key(self) -> str:
        """Stable key: ``policy:NAME``."""
        return f"policy:{self.name}"

    @property
    def digest(self) -> str:
        """Digest of the text as declared, without field values."""
        return _digest(self.text)


@dataclass(frozen=True, slots=True)
class Skill:
    """Instructions for one kind of task, added when they are needed."""

    name: str
    text: Text
    scope: Scope = Scope.SHARED
    splice: Splicing = Splicing.AUTO
    """Whether its compiled KV is used, by a backend that can."""

    def __post_init__(self) -> None:
        _check_name("Skill", self.name)
        object.__setattr__(self, "splice", member(Splicing, self.splice, f"Skill {self.name!r}: splice"))
        object.__setattr__(self, "scope", member(Scope, self.scope, f"Skill {self.name!r}: scope"))
        _check_text("Skill", self.name, self.text)

    @property
    def key(self) -> str:
        """Stable key: ``skill:NAME``."""
        return f"skill:{self.name}"

    @property
    def digest(self) -> str:
        """Digest of the text as declared, without field values."""
        return _digest(self.text)


@dataclass(frozen=True, slots=True)
class Document:
    """Reference text without authority: retrieved, and perhaps hostile."""

    name: str
    text: Text
    scope: Scope = Scope.SHARED
    splice: Splicing = Splicing.AUTO
    """Whether its compiled KV is used, by a backend that can."""

    def __post_init__(self) -> None:
        _check_name("Document", self.name)
        object.__setattr__(self, "splice", member(Splicing, self.splice, f"Document {self.name!r}: splice"))
        object.__setattr__(self, "scope", member(Scope, self.scope, f"Document {self.name!r}: scope"))
        _check_text("Document", self.name, self.text)

    @property
    def key(self) -> str:
        """Stable key: ``document:NAME``."""
        return f"document:{self.name}"

    @property
    def digest(self) -> str:
        """Digest of the text as declared, without field values."""
        return _digest(self.text)


@dataclass(frozen=True, slots=True, init=False)
class Tools:
    """Tools the model may call: functions, JSON schemas or LangChain-style tools.

    Raises
    ------
    SegmentError
        An item cannot be read as a tool, or two tools share a name.
    """

    specs: tuple[ToolSpec, ...]
    """Sorted by name, so that the order of discovery changes nothing."""

    def __init__(self, tools: Iterable[Any]) -> None:
        if not isinstance(tools, Iterable):
            raise SegmentError(
                f"Tools takes a list of tools; give Tools([{getattr(tools, '__name__', 'tool')}])"
            )
        specs = [ToolSpec.of(tool) for tool in tools]
        names = [spec.name for spec in specs]
        for name in names:
            if names.count(name) > 1:
                raise SegmentError(f"tool {name!r} is given twice; tools need different names")
        object.__setattr__(self, "specs", tuple(sorted(specs, key=lambda spec: spec.name)))


TextSegment: TypeAlias = Policy | Skill | Document
"""A segment that is text."""


@dataclass(frozen=True, slots=True, repr=False)
class Field:
    """A mutable value that the prompt shows.

    Parameters
    ----------
    key
        Stable name, such as ``order.status``; letters, digits and ``_ . : -``.
    value
        The current value, kept as canonical text (see `agentkv.values`).
    label
        What the model reads; by default made from the key.

    Raises
    ------
    FieldError
        The key or label is malformed.
    ValueRenderError
        The value has no canonical text.
    """

    key: str
    value: InitVar[object]
    label: str = ""
    unit: str | None = None
    """Unit that is part of the value, such as ``EUR``."""
    granularity: Granularity | None = None
    """Where dates, times and durations are cut."""
    sensitive: bool = False
    """Errata never repeat its old value."""
    critical: bool = False
    """Rewrite the prompt instead of appending where the model heeds errata too rarely."""
    depends_on: tuple[str, ...] = ()
    """Keys of fields whose change voids what was concluded about this one."""
    text: str = field(init=False, default="")
    """Canonical text of the value, unit included."""

    def __post_init__(self, value: object) -> None:
        check_key(self.key)
        if not self.label:
            object.__setattr__(self, "label", self.key.replace("_", " ").replace(".", " ").capitalize())
        for name, text in (("label", self.label), ("unit", self.unit)):
            if text is not None and not _is_line(text):
                raise FieldError(f"field {self.key!r}: {name} {text!r} must be one line of printable text")
        if not isinstance(self.depends_on, tuple | list) or not all(
            isinstance(k, str) for k in self.depends_on
        ):
            raise FieldError(
                f"field {self.key!r}: depends_on {self.depends_on!r} must be a tuple of field keys"
            )
        if self.granularity is not None:
            granularity = member(Granularity, self.granularity, f"field {self.key!r}: granularity")
            object.__setattr__(self, "granularity", granularity)
        object.__setattr__(self, "text", self.text_of(value))

    def text_of(self, value: object) -> str:
        """Return a value's canonical text, cut and with the unit as this field declares.

        Raises
        ------
        ValueRenderError
            The value has no canonical text; the message names the field.
        """
        try:
            return with_unit(canonical(value, granularity=self.granularity), self.unit)
        except ValueRenderError as error:
            raise ValueRenderError(f"field {self.key!r}: {error}") from error

    def __repr__(self) -> str:
        shown = "…" if self.sensitive else repr(self.text)
        return f"Field({self.key!r}, {shown}, label={self.label!r})"

    def told(self, text: str) -> Field:
        """Return a copy whose canonical text is `text`, unit included."""
        made = replace(self, value="")
        object.__setattr__(made, "text", text)
        return made


def _is_line(text: object) -> bool:
    return isinstance(text, str) and text.isprintable() and text == text.strip() and bool(text)


_KEY_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_.:-")
_RESERVED = ("policy:", "skill:", "document:", "tool:")


def check_key(key: object) -> None:
    """Raise `FieldError` unless `key` may name a field."""
    if not isinstance(key, str) or not key or not _KEY_CHARACTERS.issuperset(key):
        raise FieldError(f"field key {key!r}: use letters, digits and the characters _ . : -")
    if key.startswith(_RESERVED):
        raise FieldError(f"field key {key!r}: {', '.join(_RESERVED)} name segments; choose another prefix")


Segment: TypeAlias = Policy | Tools | Skill | Document | Field
"""Anything a prompt is made of."""
