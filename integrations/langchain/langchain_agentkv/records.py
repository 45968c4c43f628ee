"""What is checkpointed: the frozen part, written once an epoch, and a log that grows by what is said.

Both are plain JSON. The log holds no message, only digests: messages are the graph's own, and one that is
removed from its state is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

from agentkv.entries import Erratum, Frozen, SegmentAdded
from agentkv.errors import LedgerFormatError
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

VERSION: Final = 1


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FrozenPart(_Record):
    """The beginning of an epoch, as it is sent with every call of it."""

    version: Literal[1] = 1
    entry: Frozen
    """The core's record; its own `tools` are left out."""
    tools: tuple[dict[str, Any], ...] = ()
    """Schemas of the tools that are bound, in the order in which they are sent."""
    system: str = ""
    """Digest of the agent's own system message, in front of ours."""
    model: str = ""
    """Which model it is."""
    form: str = ""
    """Digest of the response format and of the provider's own tools."""
    mode: str = "on"


class Said(_Record):
    """An erratum or a segment, and the message that carries it."""

    at: int
    """Index of the message in the conversation."""
    entry: Annotated[Erratum | SegmentAdded, Field(discriminator="kind")]


class Opening(_Record):
    """The first record of an epoch."""

    kind: Literal["opening"] = "opening"
    version: Literal[1] = 1
    epoch: int
    reason: str
    revision: int = 0
    """Of the last erratum before it."""
    turns: int = 0
    """Calls before it."""
    count: int = 0
    """Messages that it takes along."""
    chain: str = ""
    """Their digest."""


class Step(_Record):
    """One call, and those behind it in which nothing was said."""

    kind: Literal["step"] = "step"
    calls: int = 1
    said: tuple[Said, ...] = ()
    """What was said in the first of them."""
    count: int
    """Messages in front of the last one's answer, from the beginning of the conversation."""
    chain: str
    """Their digest."""
    answer: str
    """Digest of that answer."""


LogRecord: TypeAlias = Annotated[Opening | Step, Field(discriminator="kind")]

_RECORDS: Final = TypeAdapter(list[LogRecord])


@dataclass(frozen=True, slots=True)
class Told:
    """The record of one epoch, read."""

    frozen: FrozenPart
    opening: Opening
    steps: tuple[Step, ...]
    """At least one."""

    @property
    def last(self) -> Step:
        """The last call."""
        return self.steps[-1]

    @property
    def said(self) -> tuple[Said, ...]:
        """What was said in this epoch, in order."""
        return tuple(said for step in self.steps for said in step.said)

    @property
    def fields(self) -> dict[str, str | None]:
        """Field key to the text that was told last; None after a tombstone."""
        known: dict[str, str | None] = dict(self.frozen.entry.fields)
        for item in self.said:
            if isinstance(item.entry, Erratum):
                known.update((statement.key, statement.now) for statement in item.entry.statements)
        return known

    @property
    def turns(self) -> int:
        """Calls so far."""
        return self.opening.turns + sum(step.calls for step in self.steps)


def read_told(frozen: object, log: object) -> Told | None:
    """Read what a checkpoint holds; None if nothing was told yet.

    Raises
    ------
    LedgerFormatError
        It is damaged, or of another version.
    """
    if not frozen or not log:
        return None
    try:
        part = FrozenPart.model_validate(frozen)
        opening, *steps = _RECORDS.validate_python(list(_as_list(log)))
    except ValidationError as error:
        # What was read may hold values, which no message repeats.
        wrong = error.errors(include_input=False, include_url=False, include_context=False)[0]
        place = ".".join(map(str, wrong["loc"]))
        raise LedgerFormatError(
            f"damaged ledger in the graph's state: {place or 'record'}: {wrong['type']}; "
            "go on in a new thread"
        ) from None
    known = tuple(step for step in steps if isinstance(step, Step))
    if not isinstance(opening, Opening) or not known or len(known) < len(steps):
        raise LedgerFormatError("damaged ledger in the graph's state: it is no opening with steps behind it")
    return Told(part, opening, known)


def dumped(record: FrozenPart | Opening | Step) -> dict[str, Any]:
    """Return a record as plain JSON values, without what is left at its default."""
    made = record.model_dump(mode="json", exclude_defaults=True)
    if isinstance(record, FrozenPart):
        made["entry"] = {"kind": "frozen", **made["entry"]}
    else:
        made["kind"] = record.kind
    if isinstance(record, Step) and record.said:
        made["said"] = [_said(said) for said in record.said]
    if not isinstance(record, Step):
        made["version"] = record.version
    return made


def joined(log: Sequence[Mapping[str, Any]] | None, writes: Iterable[object]) -> list[Mapping[str, Any]]:
    """Return a log with further records; it grows by what was said, not by calls.

    What stands before the last opening is left out, and a step that says nothing becomes part of the one
    before it. Joining twice is the same as joining all at once, as a reducer has to.
    """
    records = list(log or ())
    for write in writes:
        for record in _as_list(write):
            if record.get("kind") == "opening":
                records = [record]
            elif records and records[-1].get("kind") == "step" and not record.get("said"):
                before = records[-1]
                calls = before.get("calls", 1) + record.get("calls", 1)
                records[-1] = {**before, **record, "calls": calls}
            else:
                records.append(record)
    return records


def latest(current: object, writes: Sequence[object]) -> object:
    """Return the last value that was written; the reducer of what is written once an epoch."""
    return writes[-1] if writes else current


def _said(said: Said) -> dict[str, Any]:
    entry = said.entry.model_dump(mode="json", exclude_defaults=True)
    return {"at": said.at, "entry": {"kind": said.entry.kind, **entry}}


def _as_list(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
