"""What ``agentkv inspect`` shows of a stored ledger, as plain rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from agentkv.entries import Erratum, Frozen, Generated, LedgerEntry, Message, SegmentAdded
from agentkv.ledger import Ledger, Told

HIDDEN: Final = "…"
"""Stands for a value that is not shown."""
_GONE: Final = "(no longer applies)"


@dataclass(frozen=True, slots=True)
class EpochRow:
    """The opening of one epoch."""

    epoch: int
    entry: int
    """Index of its record in the ledger."""
    reason: str
    namespace: str
    generation: int
    segments: tuple[str, ...]
    tools: tuple[str, ...]
    fields: tuple[str, ...]
    summarised: bool
    """Whether a summary stands for earlier turns."""


@dataclass(frozen=True, slots=True)
class ErratumRow:
    """One erratum."""

    entry: int
    epoch: int
    revision: int
    carrier: str
    snapshot: bool
    tokens: int
    statements: dict[str, str]
    """Key of each field, segment or tool to what was said of it."""


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One answer and what came before it."""

    turn: int
    entry: int
    """Index of the answer's record in the ledger."""
    epoch: int
    said: tuple[str, ...]
    """Roles of the messages, revisions of errata and keys of segments that the turn brought."""
    prompt_tokens: int
    answer_tokens: int | None
    """None where the answer is known by its text only."""
    calls: tuple[str, ...]
    stopped: bool


@dataclass(frozen=True, slots=True)
class FieldRow:
    """What the model was last told about a field."""

    key: str
    value: str
    told_by: str
    superseded: int
    """Earlier values of it in the epoch's context."""


@dataclass(frozen=True, slots=True)
class Listing:
    """All that ``agentkv inspect`` shows."""

    file: str
    entries: int
    tokens: int | None
    """Prompt and answer of the last turn; None where the ids are unknown, as after a redaction."""
    sha256: str | None
    """Digest of those ids."""
    turns: int
    revision: int
    errata_tokens: int
    """Tokens of the epoch's errata in the context."""
    open_calls: tuple[str, ...]
    epochs: tuple[EpochRow, ...]
    fields: tuple[FieldRow, ...]
    errata: tuple[ErratumRow, ...]
    history: tuple[TurnRow, ...]


def listed(ledger: Ledger, name: str, *, last: int | None = None, values: bool = False) -> Listing:
    """Return what is to be shown of a ledger.

    Parameters
    ----------
    name
        What the ledger is called.
    last
        Turns and errata are listed of so many of the last entries; None lists all.
    values
        Whether values are shown; otherwise `HIDDEN` stands for them.
    """
    first = 0 if last is None else max(0, len(ledger) - last)
    epochs: list[EpochRow] = []
    errata: list[ErratumRow] = []
    turns: list[TurnRow] = []
    said: list[str] = []
    epoch = turn = 0
    for index, entry in enumerate(ledger):
        match entry:
            case Frozen():
                epoch = entry.epoch
                epochs.append(_epoch(entry, index))
            case Erratum() if index >= first:
                errata.append(_erratum(entry, index, epoch, values=values))
            case Generated():
                turn += 1
                if index >= first:
                    turns.append(_turn(entry, index, turn, epoch, said))
                said = []
            case _:
                pass
        said += _said(entry)
    check = ledger.check
    state = ledger.state
    return Listing(
        file=name,
        entries=len(ledger),
        tokens=None if check is None else check[0],
        sha256=None if check is None else check[1],
        turns=state.turns,
        revision=state.revision,
        errata_tokens=state.errata_tokens,
        open_calls=tuple(call.name for call in state.open_calls),
        epochs=tuple(epochs),
        fields=tuple(_field(key, told, values=values) for key, told in state.fields.items()),
        errata=tuple(errata),
        history=tuple(turns),
    )


def _epoch(entry: Frozen, index: int) -> EpochRow:
    return EpochRow(
        epoch=entry.epoch,
        entry=index,
        reason=entry.reason.value,
        namespace=entry.namespace.value,
        generation=entry.generation,
        segments=tuple(entry.segments),
        tools=tuple(entry.tool_texts),
        fields=tuple(entry.fields),
        summarised=entry.summary is not None,
    )


def _erratum(entry: Erratum, index: int, epoch: int, *, values: bool) -> ErratumRow:
    return ErratumRow(
        entry=index,
        epoch=epoch,
        revision=entry.revision,
        carrier=entry.carrier.value,
        snapshot=entry.snapshot,
        tokens=entry.tokens,
        statements={s.key: _value(s.now, values=values) for s in entry.statements},
    )


def _turn(entry: Generated, index: int, turn: int, epoch: int, said: Iterable[str]) -> TurnRow:
    return TurnRow(
        turn=turn,
        entry=index,
        epoch=epoch,
        said=tuple(said),
        prompt_tokens=entry.prompt_tokens,
        answer_tokens=None if entry.ids is None else len(entry.ids),
        calls=tuple(call.name for call in entry.tool_calls),
        stopped=entry.stopped,
    )


def _said(entry: LedgerEntry) -> list[str]:
    match entry:
        case Message():
            return [entry.role]
        case Erratum():
            return [f"erratum {entry.revision}"]
        case SegmentAdded():
            return [*entry.segments, *(f"tool:{name}" for name in entry.tools)]
        case Frozen():
            return [f"epoch {entry.epoch}"]
        case Generated():
            return []


def _field(key: str, told: Told, *, values: bool) -> FieldRow:
    by = f"erratum {told.revision}" if told.standing else "the prefix"
    return FieldRow(key, _value(told.text, values=values), by, told.superseded)


def _value(text: str | None, *, values: bool) -> str:
    if text is None:
        return _GONE
    return text if values else HIDDEN
