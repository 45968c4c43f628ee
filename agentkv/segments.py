"""The typed parts of an agent's prompt, and the prompt as their ordered whole.

A `Prompt` is a declaration of what is true now. It holds no conversation and changes by copy.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import InitVar, dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, TypeAlias

from agentkv.errors import FieldError, SegmentError
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

    def __post_init__(self) -> None:
        _check_name("Skill", self.name)
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

    def __post_init__(self) -> None:
        _check_name("Document", self.name)
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
        specs = [ToolSpec.of(tool) for tool in tools]
        names = [spec.name for spec in specs]
        for name in names:
            if names.count(name) > 1:
                raise SegmentError(f"tool {name!r} is given twice; tools need different names")
        object.__setattr__(self, "specs", tuple(sorted(specs, key=lambda spec: spec.name)))


TextSegment: TypeAlias = Policy | Skill | Document
"""A segment that is text."""


@dataclass(frozen=True, slots=True)
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
        if not self.label.isprintable() or self.label != self.label.strip():
            raise FieldError(f"field {self.key!r}: label {self.label!r} must be one line of printable text")
        object.__setattr__(self, "text", with_unit(canonical(value, granularity=self.granularity), self.unit))

    def told(self, text: str) -> Field:
        """Return a copy whose canonical text is `text`, unit included."""
        made = replace(self, value="")
        object.__setattr__(made, "text", text)
        return made


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


class Lint(StrEnum):
    """What a `Finding` is about."""

    VOLATILE_BEFORE_STATIC = "volatile before static"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in a prompt's layout that costs cache hits."""

    lint: Lint
    segment: str
    """Key of the segment that is to blame."""
    before: str
    """Key of the shared segment that it stands before."""
    message: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ordered whole of what is true now."""

    segments: tuple[TextSegment, ...] = ()
    """Text segments in the order they are written."""
    tools: tuple[ToolSpec, ...] = ()
    """Sorted by name."""
    fields: Mapping[str, Field] = field(default_factory=dict)
    """Key to field, in the order of declaration."""
    deletions: Mapping[str, Deletion] = field(default_factory=dict)
    """How segments, tools and fields that are gone were deleted, where it was said."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as ``enable_thinking``; a change opens a new epoch."""

    @classmethod
    def of(cls, parts: Iterable[Segment], template_arguments: Mapping[str, Any] | None = None) -> Prompt:
        """Build a prompt from segments in order.

        Raises
        ------
        SegmentError
            A part is not a segment, a key is used twice, or an inline field is not declared.
        """
        prompt = cls(template_arguments=_plain(template_arguments or {}))
        texts: list[TextSegment] = []
        tools: list[ToolSpec] = []
        fields: dict[str, Field] = {}
        labels: dict[str, str] = {}
        for part in parts:
            match part:
                case Policy() | Skill() | Document():
                    texts.append(part)
                case Tools():
                    tools.extend(part.specs)
                case Field():
                    if part.key in fields:
                        raise FieldError(
                            f"field {part.key!r} is declared twice; give one of them another key"
                        )
                    if part.label in labels:
                        raise FieldError(
                            f"fields {labels[part.label]!r} and {part.key!r} are both labelled "
                            f"{part.label!r}: the model could not tell them apart; give one another label"
                        )
                    fields[part.key] = part
                    labels[part.label] = part.key
                case _:
                    raise SegmentError(
                        f"{part!r} is not a segment; give Policy, Tools, Skill, Document, Field "
                        "or an instance of a @mutable_fields class"
                    )
        seen: set[str] = set()
        for name in (*(text.key for text in texts), *(f"tool:{tool.name}" for tool in tools)):
            if name in seen:
                raise SegmentError(f"segment {name!r} is declared twice; give one of them another name")
            seen.add(name)
        return replace(
            prompt,
            segments=tuple(texts),
            tools=tuple(sorted(tools, key=lambda spec: spec.name)),
            fields=MappingProxyType(fields),
        )

    def with_template_arguments(self, arguments: Mapping[str, Any]) -> Prompt:
        """Return a copy with some arguments of the chat template set.

        Raises
        ------
        SegmentError
            One is not a JSON value, so that no ledger could hold it.
        """
        return replace(self, template_arguments=_plain({**self.template_arguments, **arguments}))

    def check(self) -> None:
        """Raise `SegmentError` if a segment shows a field that is not declared."""
        for segment in self.segments:
            if isinstance(segment.text, Inline):
                for key in segment.text.keys:
                    if key not in self.fields:
                        raise SegmentError(
                            f"{segment.key} shows field {key!r}, which is not declared; "
                            f"declared are: {', '.join(self.fields) or 'none'}"
                        )

    def with_texts(self, texts: Mapping[str, str]) -> Prompt:
        """Return a copy with new canonical texts of declared fields; itself if nothing changed."""
        changed = {key: text for key, text in texts.items() if self.fields[key].text != text}
        if not changed:
            return self
        fields = dict(self.fields)
        for key, text in changed.items():
            fields[key] = fields[key].told(text)
        return replace(self, fields=MappingProxyType(fields))

    def with_part(self, part: Segment) -> Prompt:
        """Return a copy in which `part` is added, or replaces the one of the same key."""
        match part:
            case Field():
                for key, other in self.fields.items():
                    if other.label == part.label and key != part.key:
                        raise FieldError(
                            f"fields {key!r} and {part.key!r} are both labelled {part.label!r}: "
                            "the model could not tell them apart; give one another label"
                        )
                fields = {**self.fields, part.key: part}
                return replace(self, fields=MappingProxyType(fields), deletions=self._undeleted(part.key))
            case Tools():
                names = {spec.name for spec in part.specs}
                kept = (spec for spec in self.tools if spec.name not in names)
                tools = tuple(sorted((*kept, *part.specs), key=lambda spec: spec.name))
                return replace(
                    self, tools=tools, deletions=self._undeleted(*(f"tool:{name}" for name in names))
                )
            case Policy() | Skill() | Document():
                keys = [segment.key for segment in self.segments]
                segments = list(self.segments)
                if part.key in keys:
                    segments[keys.index(part.key)] = part
                else:
                    segments.append(part)
                return replace(self, segments=tuple(segments), deletions=self._undeleted(part.key))
        raise SegmentError(f"{part!r} is not a segment; give Policy, Tools, Skill, Document or Field")

    def without(self, key: str, deletion: Deletion | None = None) -> Prompt:
        """Return a copy without the segment, tool (``tool:NAME``) or field called `key`.

        Raises
        ------
        SegmentError
            Nothing is called so.
        """
        known = [*(s.key for s in self.segments), *(f"tool:{t.name}" for t in self.tools), *self.fields]
        if key not in known:
            raise SegmentError(
                f"nothing to remove is called {key!r}; there are: {', '.join(known) or 'none'}"
            )
        deletions = dict(self.deletions)
        deletions.pop(key, None)
        if deletion is not None:
            deletions[key] = deletion
        return replace(
            self,
            segments=tuple(segment for segment in self.segments if segment.key != key),
            tools=tuple(tool for tool in self.tools if f"tool:{tool.name}" != key),
            fields=MappingProxyType({k: f for k, f in self.fields.items() if k != key}),
            deletions=MappingProxyType(deletions),
        )

    def _undeleted(self, *keys: str) -> Mapping[str, Deletion]:
        if not any(key in self.deletions for key in keys):
            return self.deletions
        return MappingProxyType({k: how for k, how in self.deletions.items() if k not in keys})

    @property
    def inline_keys(self) -> frozenset[str]:
        """Keys of fields that stand in a segment's text."""
        return frozenset(
            key for segment in self.segments if isinstance(segment.text, Inline) for key in segment.text.keys
        )

    def arranged(self) -> Prompt:
        """Return a copy with shared, literal segments first, so that other sessions share their KV."""
        return replace(self, segments=tuple(sorted(self.segments, key=_is_volatile)))

    def lint(self) -> tuple[Finding, ...]:
        """Find what stands so early that it breaks the prefix for what comes after it."""
        return tuple(self._findings())

    def _findings(self) -> Iterator[Finding]:
        for index, segment in enumerate(self.segments):
            static = next((s for s in self.segments[index + 1 :] if not _is_volatile(s)), None)
            if _is_volatile(segment) and static is not None:
                why = "shows fields" if isinstance(segment.text, Inline) else "belongs to one session"
                yield Finding(
                    Lint.VOLATILE_BEFORE_STATIC,
                    segment.key,
                    static.key,
                    f"{segment.key} {why} and stands before {static.key}: sessions cannot share what "
                    "follows it; put it last, or use Prompt.arranged()",
                )


def _plain(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return template arguments as they come back from a ledger."""
    try:
        return MappingProxyType({key: json.loads(json.dumps(value)) for key, value in arguments.items()})
    except (TypeError, ValueError) as error:
        raise SegmentError(
            f"template arguments {', '.join(arguments)}: {error}; give JSON values, since a ledger holds them"
        ) from error


def _is_volatile(segment: TextSegment) -> bool:
    return segment.scope is Scope.SESSION or isinstance(segment.text, Inline)
