"""The prompt as the ordered whole of its segments.

A `Prompt` is a declaration of what is true now. It holds no conversation and changes by copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from agentkv.errors import FieldError, SegmentError
from agentkv.segments import (
    Deletion,
    Document,
    Field,
    Inline,
    Policy,
    Scope,
    Segment,
    Skill,
    TextSegment,
    Tools,
    member,
)
from agentkv.tools import ToolSpec


class Lint(StrEnum):
    """What a `Finding` is about."""

    VOLATILE_BEFORE_STATIC = "volatile before static"
    LITERAL_PLACEHOLDER = "literal placeholder"
    """A declared field's key stands in braces in a text that is not `Inline`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in a prompt that costs cache hits, or is hardly meant."""

    lint: Lint
    segment: str
    """Key of the segment that is to blame."""
    before: str | None
    """Key of the shared segment that it stands before; None where that is not the matter."""
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
            deletions[key] = member(Deletion, deletion, f"removing {key!r}")
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
        """Find what breaks the prefix for what comes after it, and placeholders that will not be filled."""
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
            if isinstance(segment.text, str):
                yield from self._unfilled(segment.key, segment.text)

    def _unfilled(self, name: str, text: str) -> Iterator[Finding]:
        for key in self.fields if "{" in text else ():
            if f"{{{key}}}" in text:
                yield Finding(
                    Lint.LITERAL_PLACEHOLDER,
                    name,
                    None,
                    f"{name} holds {{{key}}} as it stands, and {key} is a field: write Inline(...) around "
                    "its text to show the value",
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


def checked_change(before: Prompt, after: Prompt) -> Prompt:
    """Return `after`, unless a segment of it shows a field that is missing there and was not before."""
    if not after.inline_keys - after.fields.keys() <= before.inline_keys - before.fields.keys():
        after.check()
    return after
