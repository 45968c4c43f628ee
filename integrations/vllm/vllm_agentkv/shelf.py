"""What is known of the artifacts in a store, found out beside the engine's loop."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from agentkv.errors import ArtifactError
from agentkv.kv import ArtifactHeader, ArtifactStore, Refusal, refusal_of
from vllm_agentkv.work import FileStamp

_KEPT: Final = 4096
_QUEUED: Final = 64


@dataclass(frozen=True, slots=True)
class Sound:
    """An artifact whose content was verified."""

    header: ArtifactHeader
    stamp: FileStamp


class Shelf:
    """Verifies artifacts in a thread of its own and remembers the result while a file stays the same.

    A damaged file so becomes a refusal before a request is scheduled, and no step of the engine waits for a
    digest over hundreds of megabytes.
    """

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, FileStamp], Sound | Refusal] = OrderedDict()
        self._running: set[tuple[str, FileStamp]] = set()
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agentkv-verify")

    def look(self, name: str) -> Sound | Refusal | None:
        """Return what is known of an artifact; None if it is being found out, so ask again.

        Parameters
        ----------
        name
            64 hex digits.
        """
        stamp = FileStamp.of(self._store.path(name))
        if stamp is None:
            return Refusal.MISSING
        key = (name, stamp)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
            if key in self._running or len(self._running) >= _QUEUED:
                return None
            self._running.add(key)
        self._threads.submit(self._verify, name, stamp)
        return None

    def close(self) -> None:
        """End the thread; what waits for it is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _verify(self, name: str, stamp: FileStamp) -> None:
        found: Sound | Refusal
        try:
            found = Sound(self._store.verify(name), stamp)
        except ArtifactError as error:
            found = refusal_of(error)
        except OSError:
            found = Refusal.LOAD
        same = FileStamp.of(self._store.path(name)) == stamp
        with self._lock:
            self._running.discard((name, stamp))
            if same:
                self._known[name, stamp] = found
                while len(self._known) > _KEPT:
                    self._known.popitem(last=False)
