"""A backend that notes when the first token of a call came, and what was asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Protocol

from agentkv.backends.base import Backend, Capabilities, Completion, Delta, Event, Request, Splicer
from agentkv.tokenizer import ChatTokenizer


class SplicingBackend(Backend, Splicer, Protocol):
    """What is measured."""


class Watched:
    """A backend under a stopwatch; one call at a time."""

    def __init__(self, backend: SplicingBackend) -> None:
        self._backend = backend
        self.request: Request | None = None
        """The last call."""
        self.completion: Completion | None = None
        """Its answer."""
        self.first: float | None = None
        """When its first token came, by `time.perf_counter`."""

    @property
    def capabilities(self) -> Capabilities:
        """Those of the backend."""
        return self._backend.capabilities

    @property
    def tokenizer(self) -> ChatTokenizer:
        """That of the backend."""
        return self._backend.tokenizer

    @property
    def seam(self) -> int:
        """That of the backend."""
        return self._backend.seam

    def find_artifact(self, tenant: str, ids: Sequence[int]) -> str | None:
        """Return the name of the artifact of these tokens, if there is one."""
        return self._backend.find_artifact(tenant, ids)

    def compile_chunk(self, tenant: str, ids: Sequence[int]) -> str:
        """Make the artifact of these tokens."""
        return self._backend.compile_chunk(tenant, ids)

    def release(self, conversation: str) -> None:
        """Forget what is kept for a conversation."""
        self._backend.release(conversation)

    def stream(self, request: Request) -> Iterator[Event]:
        """Run one call."""
        self.request, self.first, self.completion = request, None, None
        for event in self._backend.stream(request):
            token = isinstance(event, Completion) or bool(event.ids or event.text)
            if token and self.first is None:
                self.first = perf_counter()
            if not isinstance(event, Delta):
                self.completion = event
            yield event
