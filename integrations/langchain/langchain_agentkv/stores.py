"""Where a wrapped model keeps the ledger of each thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final, Protocol, runtime_checkable

from langchain_agentkv.recording import FROZEN_KEY, LOG_KEY
from langchain_agentkv.records import joined

_HEAD: Final = "head"
_FROZEN: Final = "frozen"


@runtime_checkable
class LedgerStore(Protocol):
    """Keeps the record of each thread; safe to share between threads of the program."""

    def read(self, thread: str) -> Mapping[str, Any]:
        """Return what was written of a thread; empty if nothing was."""
        ...

    def write(self, thread: str, update: Mapping[str, Any]) -> None:
        """Add what a call has to be recorded."""
        ...

    async def aread(self, thread: str) -> Mapping[str, Any]:
        """As `read`."""
        ...

    async def awrite(self, thread: str, update: Mapping[str, Any]) -> None:
        """As `write`."""
        ...


class MemoryLedgerStore:
    """Keeps ledgers as long as the program runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, dict[str, Any]] = {}

    def read(self, thread: str) -> Mapping[str, Any]:
        """Return what was written of a thread; empty if nothing was."""
        with self._lock:
            return dict(self._kept.get(thread, {}))

    def write(self, thread: str, update: Mapping[str, Any]) -> None:
        """Add what a call has to be recorded."""
        with self._lock:
            before = self._kept.get(thread, {})
            log = joined(before.get(LOG_KEY), [update.get(LOG_KEY, [])])
            frozen = update.get(FROZEN_KEY, before.get(FROZEN_KEY))
            self._kept[thread] = {FROZEN_KEY: frozen, LOG_KEY: log}

    async def aread(self, thread: str) -> Mapping[str, Any]:
        """As `read`."""
        return self.read(thread)

    async def awrite(self, thread: str, update: Mapping[str, Any]) -> None:
        """As `write`."""
        self.write(thread, update)


class GraphLedgerStore:
    """Keeps ledgers in a LangGraph store, each record as an item of its own.

    Parameters
    ----------
    store
        An instance of LangGraph's ``BaseStore``: in memory, on SQLite or on Postgres.
    namespace
        What its namespaces begin with.
    """

    def __init__(self, store: Any, namespace: tuple[str, ...] = ("agentkv",)) -> None:
        self._store = store
        self._namespace = namespace

    def read(self, thread: str) -> Mapping[str, Any]:
        """Return what was written of a thread; empty if nothing was."""
        space = self._space(thread)
        head = self._store.get(space, _HEAD)
        if head is None:
            return {}
        frozen = self._store.get(space, _FROZEN)
        records = [self._store.get(space, name) for name in _names(head.value)]
        return _joined(frozen, records)

    def write(self, thread: str, update: Mapping[str, Any]) -> None:
        """Add what a call has to be recorded."""
        space = self._space(thread)
        head = self._store.get(space, _HEAD)
        last = None if head is None else self._store.get(space, _names(head.value)[-1])
        for name, value in _items(head, last, update):
            if value is None:
                self._store.delete(space, name)
            else:
                self._store.put(space, name, value, index=False)

    async def aread(self, thread: str) -> Mapping[str, Any]:
        """As `read`."""
        space = self._space(thread)
        head = await self._store.aget(space, _HEAD)
        if head is None:
            return {}
        frozen = await self._store.aget(space, _FROZEN)
        records = [await self._store.aget(space, name) for name in _names(head.value)]
        return _joined(frozen, records)

    async def awrite(self, thread: str, update: Mapping[str, Any]) -> None:
        """As `write`."""
        space = self._space(thread)
        head = await self._store.aget(space, _HEAD)
        last = None if head is None else await self._store.aget(space, _names(head.value)[-1])
        for name, value in _items(head, last, update):
            if value is None:
                await self._store.adelete(space, name)
            else:
                await self._store.aput(space, name, value, index=False)

    def _space(self, thread: str) -> tuple[str, ...]:
        # A namespace's labels hold no dots.
        return (*self._namespace, thread.replace(".", "·"))


def _names(head: Mapping[str, Any]) -> list[str]:
    return [f"record-{index:06d}" for index in range(head["first"], head["next"])]


def _joined(frozen: Any, records: list[Any]) -> Mapping[str, Any]:
    log = joined([], [record.value["record"] for record in records if record is not None])
    return {FROZEN_KEY: None if frozen is None else frozen.value, LOG_KEY: log}


def _items(head: Any, last: Any, update: Mapping[str, Any]) -> list[tuple[str, dict[str, Any] | None]]:
    """Return the items to write, the head last; None deletes one."""
    first, end = (0, 0) if head is None else (head.value["first"], head.value["next"])
    before = [] if last is None else [last.value["record"]]
    log = joined(before, [update.get(LOG_KEY, [])])
    items: list[tuple[str, dict[str, Any] | None]] = []
    if FROZEN_KEY in update:
        items.append((_FROZEN, dict(update[FROZEN_KEY])))
    gone: list[tuple[str, dict[str, Any] | None]] = []
    if log and log[0].get("kind") == "opening" and before and log[0] != before[0]:
        gone = [(f"record-{index:06d}", None) for index in range(first, end)]
        first = at = end
    else:
        at = max(first, end - len(before))
    items += [(f"record-{at + index:06d}", {"record": dict(record)}) for index, record in enumerate(log)]
    items.append((_HEAD, {"first": first, "next": at + len(log)}))
    return [*items, *gone]
