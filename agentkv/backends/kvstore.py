"""The KV of many conversations, kept within a memory bound.

The store decides *which* KV a request goes on from, and never what the tensors are: it works on anything that
can be cut, copied and measured. It is not thread-safe; its owner holds a lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from agentkv.tokens import TokenIds


class KVState(Protocol):
    """KV of one sequence of tokens."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        ...

    def reusable(self, common: int) -> int:
        """Count the tokens that a sequence sharing the first `common` ones can take over."""
        ...

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, in place."""
        ...


State = TypeVar("State", bound=KVState)


@dataclass(slots=True, eq=False)
class Entry(Generic[State]):
    """What is kept for one conversation under one salt."""

    salt: str
    conversation: str
    ids: TokenIds
    """The tokens whose KV `state` holds, no more and no less."""
    state: State
    nbytes: int = 0
    """Bytes of `state` when it was last measured."""
    in_use: bool = False

    def reusable(self, ids: TokenIds, most: int) -> int:
        """Count the leading tokens of `ids` that can be taken over, at most `most`."""
        common = self.ids.common_prefix(ids.prefix(most))
        return self.state.reusable(common) if common else 0


class KVStore(Generic[State]):
    """Entries by salt and conversation, the least recently used first to go.

    Parameters
    ----------
    limit_bytes
        Most bytes that entries not in use may hold together.
    new
        Makes an empty state.
    copy
        Copies the first tokens of a state: ``copy(state, length)``.
    """

    def __init__(
        self, limit_bytes: int, *, new: Callable[[], State], copy: Callable[[State, int], State]
    ) -> None:
        self._limit = limit_bytes
        self._new = new
        self._copy = copy
        self._entries: OrderedDict[tuple[str, str], Entry[State]] = OrderedDict()

    @property
    def stored_bytes(self) -> int:
        """Bytes of all entries, those in use as they were last measured."""
        return sum(entry.nbytes for entry in list(self._entries.values()))

    @property
    def conversations(self) -> tuple[str, ...]:
        """Conversations with KV, the least recently used first."""
        return tuple(dict.fromkeys(conversation for _, conversation in list(self._entries)))

    def open(self, salt: str, conversation: str, ids: TokenIds) -> Entry[State]:
        """Take the entry that a prompt goes on from; `close` or `drop` gives it back.

        The conversation's own entry is cut in place where the prompt leaves it. If another entry of the
        same salt shares more, that part of it is copied. At least the last token of `ids` is left to compute.
        While a conversation's entry is in use, a second call gets one of its own that is not kept.
        """
        most = len(ids) - 1
        own = self._entries.get((salt, conversation))
        kept = own is None or not own.in_use
        best, common = None, 0
        for entry in list(self._entries.values()):
            found = entry.reusable(ids, most) if entry.salt == salt else 0
            if found > common or (found == common > 0 and entry is own):
                best, common = entry, found
        if best is not None and best is own and kept:
            best.state.truncate(common)
            entry = best
        else:
            state = self._new() if best is None else self._copy(best.state, common)
            entry = Entry(salt, conversation, ids.prefix(0), state)
        entry.ids = ids.prefix(common)
        entry.in_use = True
        if kept:
            self._entries[salt, conversation] = entry
            self._entries.move_to_end((salt, conversation))
        self.measure(entry)
        return entry

    def detached(self, salt: str, conversation: str) -> Entry[State]:
        """Make an empty entry that nobody else sees and that is not kept."""
        return Entry(salt, conversation, TokenIds(), self._new(), in_use=True)

    def measure(self, entry: Entry[State]) -> None:
        """Count the bytes of an entry that has grown, and evict others if the bound asks for it."""
        entry.nbytes = entry.state.nbytes
        self._evict()

    def close(self, entry: Entry[State]) -> None:
        """Give an entry back. One that exceeds the bound alone is dropped, and no other for its sake."""
        entry.in_use = False
        if self._holds(entry):
            entry.nbytes = entry.state.nbytes
            if entry.nbytes > self._limit:
                self.drop(entry)
            else:
                self._entries.move_to_end((entry.salt, entry.conversation))
        self._evict()

    def drop(self, entry: Entry[State]) -> None:
        """Forget an entry whose state can no longer be trusted."""
        if self._holds(entry):
            del self._entries[entry.salt, entry.conversation]

    def release(self, conversation: str) -> None:
        """Forget a conversation under every salt; a call in progress ends normally and is not kept."""
        for key in [key for key in list(self._entries) if key[1] == conversation]:
            del self._entries[key]

    def reset(self) -> None:
        """Forget everything; calls in progress end normally and are not kept."""
        self._entries.clear()

    def _holds(self, entry: Entry[State]) -> bool:
        return self._entries.get((entry.salt, entry.conversation)) is entry

    def _evict(self) -> None:
        total = self.stored_bytes
        for key, entry in list(self._entries.items()):
            if total <= self._limit:
                return
            if not entry.in_use:
                del self._entries[key]
                total -= entry.nbytes
