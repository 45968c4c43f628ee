"""Passes through a transformers model, over the KV of conversations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from agentkv.backends.base import RefusedSplice, Request, Usage
from agentkv.backends.kvcache import ModelKV
from agentkv.backends.kvstore import Entry, KVStore
from agentkv.backends.model_traits import context_window_of, forward_arguments, stable_length
from agentkv.errors import BackendError, ConfigurationError, ContextWindowError
from agentkv.tokens import TokenIds

if TYPE_CHECKING:
    from agentkv.backends.model_identity import MovableKV
    from agentkv.kv.spans import KVSpan

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the tokens prefilled so far and those to prefill, after each chunk."""

_ROOM_AHEAD: Final = 256


@dataclass(slots=True)
class Meter:
    """Tokens of one call, counted where they enter the cache."""

    prompt: int
    cached: int = 0
    computed: int = 0
    spliced: int = 0
    refused: list[RefusedSplice] = field(default_factory=list)

    @property
    def usage(self) -> Usage:
        """The counts, before anything is generated."""
        return Usage(self.prompt, self.cached, self.computed, self.spliced)


class ModelRunner:
    """Brings the KV of a conversation up to a prompt, in passes through the model.

    One lock is held for each pass, and never between two of them. Parameters are those of
    `TransformersBackend`.
    """

    def __init__(
        self,
        model: Any,
        *,
        memory_limit_bytes: int,
        prefill_chunk: int,
        progress: Progress | None,
        context_window: int | None,
    ) -> None:
        if prefill_chunk < 1:
            raise ConfigurationError(f"prefill_chunk={prefill_chunk} has to be at least 1")
        if memory_limit_bytes < 0:
            raise ConfigurationError(f"memory_limit_bytes={memory_limit_bytes} has to be 0 or above")
        self.model: Final = model
        self.window: Final = context_window or context_window_of(model.config)
        embeddings = model.get_input_embeddings()
        self.device: Final[torch.device] = embeddings.weight.device
        self._vocabulary = int(embeddings.weight.shape[0])
        self._chunk = prefill_chunk
        self._progress = progress
        self._cache_argument, self._fixed_arguments = forward_arguments(model)
        self._stable_length = stable_length(model.config)
        # Reentrant: the garbage collector may close an abandoned stream while this thread holds it.
        self._lock = threading.RLock()
        self._store: KVStore[ModelKV] = KVStore(
            memory_limit_bytes, new=lambda: ModelKV(model.config), copy=ModelKV.copy
        )

    @cached_property
    def movable(self) -> MovableKV:
        """How the model's KV is moved; raises `CapabilityError` if it cannot be."""
        from agentkv.backends.model_identity import movable_kv

        with self._lock:
            return movable_kv(self.model)

    @property
    def stored_bytes(self) -> int:
        """Bytes of KV kept, unused room included."""
        return self._store.stored_bytes

    @property
    def stored_conversations(self) -> tuple[str, ...]:
        """Conversations with KV, the least recently used first."""
        return self._store.conversations

    def release(self, conversation: str) -> None:
        """Forget the KV of a conversation under every salt."""
        with self._lock:
            self._store.release(conversation)

    def reset(self) -> None:
        """Forget the KV of all conversations."""
        with self._lock:
            self._store.reset()

    @contextmanager
    def opened(self, request: Request, *, room: int) -> Iterator[Entry[ModelKV]]:
        """Take the KV that a prompt goes on from, with `room` for an answer, and give it back."""
        entry = self._open(request, room=room)
        try:
            yield entry
        finally:
            with self._lock:
                self._store.close(entry)

    def detached(self, salt: str) -> Entry[ModelKV]:
        """Make empty KV that no conversation sees and that is not kept."""
        return self._store.detached(salt, "")

    def finish(self, entry: Entry[ModelKV], prompt: TokenIds, meter: Meter) -> torch.Tensor:
        """Compute what is left of a prompt; returns logits ``[vocabulary]`` of its last token."""
        logits = self.compute(entry, prompt, len(prompt), meter)
        if logits is None or meter.cached + meter.spliced + meter.computed != len(prompt):
            self.drop(entry)
            raise BackendError(
                f"{meter.cached} cached, {meter.spliced} spliced and {meter.computed} computed tokens do not "
                f"make the prompt's {len(prompt)}: the conversation's KV was dropped, make the call again"
            )
        with self._lock:
            self._store.measure(entry)
        return logits

    def compute(
        self, entry: Entry[ModelKV], prompt: TokenIds, stop: int, meter: Meter
    ) -> torch.Tensor | None:
        """Compute the prompt's tokens up to `stop`; returns the last one's logits, None without any."""
        logits = None
        chunk = self._chunk if self._reusable(len(prompt)) else len(prompt)
        for at in range(len(entry.ids), stop, chunk):
            logits = self.forward(entry, prompt.tolist(at, min(at + chunk, stop)), meter)
            self._show(meter)
        return logits

    @torch.inference_mode()
    def forward(self, entry: Entry[ModelKV], tokens: list[int], meter: Meter) -> torch.Tensor:
        """Pass tokens through the model (here and nowhere else); returns the last one's logits."""
        input_ids = torch.tensor([tokens], device=self.device)
        with self._lock:
            try:
                output = self.model(
                    input_ids=input_ids, **{self._cache_argument: entry.state.cache}, **self._fixed_arguments
                )
            except BaseException as error:
                self.drop(entry)
                if isinstance(error, Exception):
                    raise self.failure("the model failed", entry, error) from error
                raise
            count = input_ids.shape[1]
            meter.computed += count
            entry.state.length += count
            entry.ids = entry.ids.extend(tokens)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    @torch.inference_mode()
    def append(self, entry: Entry[ModelKV], span: KVSpan, prompt: TokenIds, meter: Meter) -> None:
        """Move KV to where an entry ends and add it, all or nothing, as that of the prompt's next tokens."""
        start = len(entry.ids)
        moved = span.to(device=self.device).moved(start, self.movable.rope)
        with self._lock:
            entry.state.append(moved)
            entry.ids = entry.ids.extend(prompt.tolist(start, start + len(span)))
            meter.spliced += len(span)

    def cut(self, entry: Entry[ModelKV], length: int) -> None:
        """Keep the KV of the first `length` tokens."""
        with self._lock:
            entry.state.truncate(length)
            entry.ids = entry.ids.prefix(length)

    def drop(self, entry: Entry[ModelKV]) -> None:
        """Forget KV that can no longer be trusted."""
        with self._lock:
            self._store.drop(entry)

    def failure(self, what: str, entry: Entry[ModelKV], error: Exception) -> BackendError:
        """Make the error of a call whose KV was dropped."""
        return BackendError(
            f"{what} after {len(entry.ids)} tokens of conversation {entry.conversation!r} "
            f"({type(error).__name__}: {error}); its KV was dropped, and the call can be made again"
        )

    def check_prompt(self, ids: TokenIds, *, room: int) -> None:
        """Raise `ConfigurationError` or `ContextWindowError` for a prompt that the model cannot read."""
        if not ids:
            raise ConfigurationError("the prompt is empty: a request needs at least one token id")
        if len(ids) + room > self.window:
            raise ContextWindowError(
                f"{len(ids)} prompt tokens and max_tokens={room} make {len(ids) + room}, but the model's "
                f"context window is {self.window}: shorten the prompt by {len(ids) + room - self.window} "
                "tokens or lower max_tokens"
            )
        highest = ids.highest()
        if highest >= self._vocabulary:
            raise ConfigurationError(
                f"token id {highest} is not in the model's vocabulary of {self._vocabulary}: "
                "was the prompt encoded with another model's tokenizer?"
            )

    def _open(self, request: Request, *, room: int) -> Entry[ModelKV]:
        with self._lock:
            if not self._reusable(len(request.ids) + room):
                return self._store.detached(request.salt, request.conversation)
            entry = self._store.open(request.salt, request.conversation, request.ids)
            with torch.inference_mode():
                entry.state.reserve(len(request.ids) + min(room, _ROOM_AHEAD))
            return entry

    def _show(self, meter: Meter) -> None:
        if self._progress is not None:
            self._progress(meter.computed + meter.spliced, meter.prompt - meter.cached)

    def _reusable(self, length: int) -> bool:
        """Whether the KV of a token is the same in every sequence up to this length."""
        return self._stable_length is None or length <= self._stable_length
