"""The append-only record of exactly what the model was told.

A `Ledger` is an immutable value. Ledgers of one conversation share one list of entries, so appending
costs what is appended; what has been told is kept up to date entry by entry, never recounted.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, TypeVar, assert_never

from pydantic import TypeAdapter, ValidationError

from agentkv.entries import (
    Erratum,
    Frozen,
    Generated,
    LedgerEntry,
    Message,
    SegmentAdded,
    ToolCallRecord,
)
from agentkv.errors import LedgerFormatError, LedgerMismatchError
from agentkv.redaction import erased, redacted
from agentkv.tokens import TokenIds

FORMAT: Final = "agentkv-ledger"
VERSION: Final = 1

_ENTRIES: Final = TypeAdapter(tuple[LedgerEntry, ...])
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Told:
    """What the model was last told about a field."""

    text: str | None
    """Canonical text; None after a tombstone."""
    label: str
    standing: bool = False
    """Whether an erratum said it, not the frozen prefix."""
    revision: int = 0
    """The erratum that said it last; 0 for the prefix."""
    superseded: int = 0
    """How many earlier values of it stand in this epoch's context."""


@dataclass(frozen=True, slots=True)
class LedgerState:
    """What follows from the entries; never stored."""

    frozen: Frozen | None = None
    frozen_at: int = -1
    """Index of the epoch's `Frozen`."""
    fields: Mapping[str, Told] = field(default_factory=dict)
    segments: Mapping[str, str | None] = field(default_factory=dict)
    """Segment key to digest of the text told; None after a tombstone."""
    tools: Mapping[str, str | None] = field(default_factory=dict)
    """Tool name to canonical JSON; None after a tombstone."""
    revision: int = 0
    errata: int = 0
    """Errata of this epoch."""
    since_snapshot: int = 0
    """Errata since the last snapshot or the prefix."""
    errata_tokens: int = 0
    """Tokens that this epoch's errata take in the context."""
    turns: int = 0
    """Answers of the whole conversation."""
    open_calls: tuple[ToolCallRecord, ...] = ()
    """Calls of the last answer whose results are awaited."""
    generated: Generated | None = None
    """The last answer."""


class _Log:
    __slots__ = ("entries", "lock")

    def __init__(self, entries: list[LedgerEntry]) -> None:
        self.entries = entries
        self.lock = threading.Lock()


class Ledger:
    """The record of one conversation. Create an empty one with ``Ledger()``."""

    __slots__ = ("_length", "_log", "check", "computed", "ids", "state")

    def __init__(self) -> None:
        self._log = _Log([])
        self._length = 0
        self.state: LedgerState = LedgerState()
        self.ids: TokenIds | None = TokenIds()
        """Ids of the last prompt and its answer; None until encoded again after loading."""
        self.computed: int = 0
        """How many of `ids` the backend has KV for, if nothing was evicted."""
        self.check: tuple[int, str] | None = None
        """After loading: how many ids there were, and their SHA-256."""

    def append(self, entries: Iterable[LedgerEntry], *, ids: TokenIds | None, computed: int) -> Ledger:
        """Return a ledger with `entries` appended; `ids` and `computed` as the attributes."""
        new = list(entries)
        state = self.state
        for index, entry in enumerate(new, start=self._length):
            state = _after(state, entry, index)
        made = Ledger.__new__(Ledger)
        made._log = self._extended(new)
        made._length = self._length + len(new)
        made.state, made.ids, made.computed, made.check = state, ids, computed, None
        return made

    def _extended(self, new: list[LedgerEntry]) -> _Log:
        log = self._log
        with log.lock:
            if len(log.entries) == self._length:
                log.entries.extend(new)
                return log
        return _Log([*log.entries[: self._length], *new])

    def encoded(self, ids: TokenIds) -> Ledger:
        """Return this ledger with its ids, encoded again after loading.

        Raises
        ------
        LedgerMismatchError
            They are not the ids that were stored: another tokenizer or template.
        """
        if self.check is not None and self.check != (len(ids), _sha256(ids)):
            raise LedgerMismatchError(
                f"the ledger renders {len(ids)} token ids that differ from the {self.check[0]} it was saved "
                "with: it needs the tokenizer and chat template of the model it was made with"
            )
        made = Ledger.__new__(Ledger)
        made._log, made._length, made.state = self._log, self._length, self.state
        made.ids, made.computed, made.check = ids, self.computed, None
        return made

    def __len__(self) -> int:
        return self._length

    def __reduce__(self) -> tuple[Callable[[str], Ledger], tuple[str]]:
        return Ledger.from_json, (self.to_json(),)

    def __iter__(self) -> Iterator[LedgerEntry]:
        return iter(self._log.entries[: self._length])

    def since(self, index: int) -> Sequence[LedgerEntry]:
        """Return the entries from `index` on: what to store after each step."""
        return self._log.entries[max(0, index) : self._length]

    def epoch_entries(self) -> Iterator[LedgerEntry]:
        """Yield what this epoch's prompt is made of, its `Frozen` first."""
        frozen, at = self.state.frozen, self.state.frozen_at
        if frozen is None:
            return
        yield frozen
        for entry in self._log.entries[frozen.since : at]:
            if isinstance(entry, Message | Generated):
                yield entry
        yield from self._log.entries[at + 1 : self._length]

    def to_json(self) -> str:
        """Return the whole record as JSON, to be read by `from_json`."""
        check = None
        if self.ids is not None:
            check = {"tokens": len(self.ids), "sha256": _sha256(self.ids)}
        elif self.check is not None:
            check = {"tokens": self.check[0], "sha256": self.check[1]}
        record = {
            "format": FORMAT,
            "version": VERSION,
            "computed": self.computed,
            "check": check,
            "entries": [entry.model_dump(mode="json", exclude_defaults=False) for entry in self],
        }
        return json.dumps(record, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Ledger:
        """Read a stored ledger.

        Raises
        ------
        LedgerFormatError
            It is not a ledger, is damaged, or has another version.
        """
        try:
            record = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise LedgerFormatError(f"not a ledger: it is not JSON ({error})") from error
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise LedgerFormatError(f'not a ledger: its "format" must be {FORMAT!r}')
        if record.get("version") != VERSION:
            raise LedgerFormatError(
                f"ledger version {record.get('version')!r}; this release reads version {VERSION}"
            )
        try:
            entries = _ENTRIES.validate_python(record["entries"])
            check = record["check"]
            loaded = cls().append(entries, ids=None, computed=int(record["computed"]))
            loaded.check = None if check is None else (int(check["tokens"]), str(check["sha256"]))
            _check_order(entries)
            loaded._check_counts()
        except ValidationError as error:
            # What was read may hold values, which no message repeats.
            wrong = error.errors(include_input=False, include_url=False, include_context=False)[0]
            place = ".".join(map(str, wrong["loc"]))
            raise LedgerFormatError(
                f"damaged ledger: entry {place or 'list'}: {wrong['type']}; restore it from a copy"
            ) from None
        except KeyError as error:
            raise LedgerFormatError(f"damaged ledger: {error} is missing; restore it from a copy") from error
        except (TypeError, ValueError) as error:
            raise LedgerFormatError(f"damaged ledger: {error}; restore it from a copy") from error
        return loaded

    def _check_counts(self) -> None:
        tokens = 0 if self.check is None else self.check[0]
        if not 0 <= self.computed <= tokens or (tokens and not self._length):
            raise ValueError(f"{self.computed} tokens of {tokens} in {self._length} entries have KV")

    def redact(self, *secrets: str) -> Ledger:
        """Return a copy in which each of `secrets` reads ``[redacted]``.

        Answers that held one lose their ids. The copy's own ids are unknown: the next turn opens a new
        epoch.
        """
        return Ledger().append(redacted(self, secrets), ids=None, computed=0)

    def erase(self, *keys: str) -> Ledger:
        """Return a copy without any value or text that was ever told of these fields, segments and tools."""
        return Ledger().append(erased(self, keys), ids=None, computed=0)

    def requoted(self, quote: Callable[[str], str]) -> Ledger:
        """Return a copy with `quote` applied to what users and tools said; the ids stay those sent."""
        entries = [
            entry.model_copy(update={"content": quote(entry.content)})
            if isinstance(entry, Message)
            else entry
            for entry in self
        ]
        return Ledger().append(entries, ids=self.ids, computed=self.computed)

    def without_ids(self) -> Ledger:
        """Return a copy whose answers are known by text only, for another tokenizer."""
        entries = [e.model_copy(update={"ids": None}) if isinstance(e, Generated) else e for e in self]
        return Ledger().append(entries, ids=None, computed=0)


def _check_order(entries: Sequence[LedgerEntry]) -> None:
    """Raise ValueError unless epochs follow one another and each result belongs to an open call."""
    epoch, open_ids = 0, frozenset[str]()
    for index, entry in enumerate(entries):
        if isinstance(entry, Frozen):
            if entry.epoch != epoch + 1 or not 0 <= entry.since <= index:
                raise ValueError(f"entry {index} opens epoch {entry.epoch} after epoch {epoch}")
            epoch = entry.epoch
        elif not epoch:
            raise ValueError(f"entry {index} stands before the first prefix")
        elif isinstance(entry, Generated):
            open_ids = frozenset(call.id for call in entry.tool_calls)
        elif isinstance(entry, Message) and entry.role == "tool" and entry.call_id not in open_ids:
            raise ValueError(f"entry {index} is the result of call {entry.call_id!r}, which is not open")


def _sha256(ids: TokenIds) -> str:
    return hashlib.sha256(ids.tobytes()).hexdigest()


def _updated(mapping: Mapping[str, _Value], new: Mapping[str, _Value]) -> Mapping[str, _Value]:
    return MappingProxyType({**mapping, **new})


def _after(state: LedgerState, entry: LedgerEntry, index: int) -> LedgerState:
    match entry:
        case Frozen():
            return replace(
                state,
                frozen=entry,
                frozen_at=index,
                fields=MappingProxyType(
                    {key: Told(text, entry.labels[key]) for key, text in entry.fields.items()}
                ),
                segments=MappingProxyType(dict(entry.segments)),
                tools=MappingProxyType(dict(entry.tool_texts)),
                errata=0,
                since_snapshot=0,
                errata_tokens=0,
            )
        case Message():
            left = tuple(call for call in state.open_calls if call.id != entry.call_id)
            return state if left == state.open_calls else replace(state, open_calls=left)
        case SegmentAdded():
            return replace(
                state,
                segments=_updated(state.segments, entry.segments),
                tools=_updated(state.tools, entry.tools),
            )
        case Erratum():
            return _after_erratum(state, entry)
        case Generated():
            calls = tuple(entry.tool_calls)
            return replace(state, generated=entry, open_calls=calls, turns=state.turns + 1)
        case _:
            assert_never(entry)


def _after_erratum(state: LedgerState, entry: Erratum) -> LedgerState:
    fields: dict[str, Told] = {}
    segments: dict[str, str | None] = {}
    tools: dict[str, str | None] = {}
    for statement in entry.statements:
        key, now = statement.key, statement.now
        if now is None and key.startswith("tool:"):
            tools[key.removeprefix("tool:")] = None
        elif now is None and key in state.segments:
            segments[key] = None
        else:
            before = state.fields.get(key)
            superseded = 0 if before is None else before.superseded + (before.text != now)
            fields[key] = Told(
                now, statement.label, standing=True, revision=entry.revision, superseded=superseded
            )
    return replace(
        state,
        fields=_updated(state.fields, fields),
        segments=_updated(state.segments, segments) if segments else state.segments,
        tools=_updated(state.tools, tools) if tools else state.tools,
        revision=entry.revision,
        errata=state.errata + 1,
        since_snapshot=0 if entry.snapshot else state.since_snapshot + 1,
        errata_tokens=state.errata_tokens + entry.tokens,
    )
