"""What differs between what is true now and what the model was last told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agentkv.ledger import Ledger, LedgerState
from agentkv.prompt import Prompt
from agentkv.segments import Deletion, Field, Policy, TextSegment
from agentkv.tools import ToolSpec


@dataclass(frozen=True, slots=True)
class Change:
    """A field whose told value is wrong, or that was never told."""

    key: str
    field: Field
    """The field as declared now."""
    told: str | None
    """Canonical text that the model was last told; None if nothing holds for it."""


@dataclass(frozen=True, slots=True)
class Gone:
    """A segment, tool or field that was told and is no longer declared."""

    key: str
    """Segment key, ``tool:NAME`` or field key."""
    deletion: Deletion
    label: str
    """What an erratum calls it."""


@dataclass(frozen=True, slots=True)
class Difference:
    """All that the model does not know yet."""

    changes: tuple[Change, ...] = ()
    segments: tuple[TextSegment, ...] = ()
    """New segments, and those whose text is another than the one told."""
    tools: tuple[ToolSpec, ...] = ()
    """New tools, and those whose schema is another than the one told."""
    gone: tuple[Gone, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.changes or self.segments or self.tools or self.gone)


def compare(prompt: Prompt, ledger: Ledger) -> Difference:
    """Compare a prompt with what was *told*, never with the frozen prefix.

    A field that returns to its frozen value after another was told is a change; one that changed and
    came back before anything was told is none. Order never matters.
    """
    state = ledger.state
    if state.frozen is None:
        return Difference()
    told = state.fields
    changes = []
    for key, field in prompt.fields.items():
        last = told.get(key)
        if last is None:
            changes.append(Change(key, field, None))
        elif last.text != field.text:
            changes.append(Change(key, field, last.text))
    segments = tuple(
        segment for segment in prompt.segments if state.segments.get(segment.key) != segment.digest
    )
    tools = tuple(tool for tool in prompt.tools if state.tools.get(tool.name) != tool.text)
    return Difference(tuple(changes), segments, tools, tuple(_gone(prompt, state)))


def _gone(prompt: Prompt, state: LedgerState) -> Iterator[Gone]:
    if state.segments:
        declared = {segment.key for segment in prompt.segments}
        for key, digest in state.segments.items():
            if key not in declared and digest is not None:
                deletion = prompt.deletions.get(key, _default_deletion(key))
                yield Gone(key, deletion, label_of(key))
    if state.tools:
        names = {tool.name for tool in prompt.tools}
        for name, digest in state.tools.items():
            if name not in names and digest is not None:
                deletion = prompt.deletions.get(f"tool:{name}", Deletion.SOFT)
                yield Gone(f"tool:{name}", deletion, label_of(f"tool:{name}"))
    if len(state.fields) == len(prompt.fields) and state.fields.keys() == prompt.fields.keys():
        return
    for key, told in state.fields.items():
        if key not in prompt.fields and told.text is not None:
            yield Gone(key, prompt.deletions.get(key, Deletion.SOFT), told.label)


def label_of(key: str) -> str:
    """Return what an erratum calls a segment or tool: ``skill 'returns'``."""
    kind, _, name = key.partition(":")
    return f"{kind} {name!r}"


def _default_deletion(key: str) -> Deletion:
    if key.startswith("document:"):
        return Deletion.DORMANT
    if key.startswith("policy:"):
        return Deletion.WITHDRAWN
    return Deletion.SOFT


def changes_policy(difference: Difference) -> bool:
    """Whether a policy is new or has another text."""
    return any(isinstance(segment, Policy) for segment in difference.segments)
