"""A transformers model in this process: the embedded backend, and the oracle for the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from agentkv.backends.base import Capabilities, Completion, Delta, Event, FinishReason, Request, Usage
from agentkv.errors import (
    BackendError,
    ConfigurationError,
    ContextWindowError,
    MissingDependencyError,
)
from agentkv.tokens import TokenIds

try:
    import torch

    from agentkv.backends.detokenize import AnswerText
    from agentkv.backends.kvcache import ModelKV
    from agentkv.backends.kvstore import Entry, KVStore
    from agentkv.backends.model_traits import (
        context_window_of,
        forward_arguments,
        generation_eos,
        stable_length,
    )
    from agentkv.backends.sampling import Sampler, check_options
except ImportError as error:
    raise MissingDependencyError(
        f"TransformersBackend needs torch and transformers ({error}): "
        "pip install 'agentkv-middleware[transformers]', or '.[transformers]' in a checkout"
    ) from error

if TYPE_CHECKING:
    from agentkv.tokenizer import ChatTokenizer

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the tokens prefilled so far and those to prefill, after each chunk."""

DEFAULT_MEMORY_LIMIT: Final = 4 * 1024**3
_ROOM_AHEAD: Final = 256


@dataclass(slots=True)
class _Meter:
    """Tokens of one call, counted where they enter the model."""

    cached: int = 0
    computed: int = 0


class TransformersBackend:
    """Runs a causal language model of transformers, and keeps the KV of each conversation.

    A request goes on from the longest prefix that its conversation, or any other conversation of the same
    salt, has KV for: the former in place, the latter by copying that part. The last prompt token is always
    computed. Models whose state cannot be cut (recurrent layers) reuse it only if the prompt continues all
    of it. Reuse is exact up to kernel numerics.

    Safe to share between threads: one lock is held for each pass through the model, and never while a stream
    waits for its consumer, so that calls queue and open streams take turns.

    Parameters
    ----------
    model
        A loaded model; it is put into evaluation mode, and moved if `device` is given.
    tokenizer
        Its tokenizer and chat template.
    memory_limit_bytes
        Most bytes of KV to keep between calls; the least recently used conversations are forgotten first. A
        conversation in use is never forgotten, so a single one may exceed the limit while it runs.
    prefill_chunk
        Tokens of a prompt that pass the model at once, at least 1.
    progress
        Called as the prompt is prefilled. It may raise to stop the call; what was computed is kept.
    device
        For example ``"cuda"``; None leaves the model where it is.
    context_window
        Most tokens of prompt and answer together; None takes it from the model's configuration.

    Raises
    ------
    ConfigurationError
        A number is out of range, or the configuration does not tell the context window.
    CapabilityError
        The model takes no cache.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: ChatTokenizer,
        *,
        memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT,
        prefill_chunk: int = 512,
        progress: Progress | None = None,
        device: str | None = None,
        context_window: int | None = None,
    ) -> None:
        if prefill_chunk < 1:
            raise ConfigurationError(f"prefill_chunk={prefill_chunk} has to be at least 1")
        if memory_limit_bytes < 0:
            raise ConfigurationError(f"memory_limit_bytes={memory_limit_bytes} has to be 0 or above")
        self._model = model.eval() if device is None else model.eval().to(device)
        self._tokenizer = tokenizer
        self._chunk = prefill_chunk
        self._progress = progress
        self._capabilities = Capabilities(
            name="transformers",
            context_window=context_window or context_window_of(model.config),
            block_size=1,
        )
        embeddings = model.get_input_embeddings()
        self._vocabulary = int(embeddings.weight.shape[0])
        self._device: torch.device = embeddings.weight.device
        self._eos = tokenizer.eos_ids | generation_eos(model)
        self._cache_argument, self._fixed_arguments = forward_arguments(model)
        self._stable_length = stable_length(model.config)
        # Reentrant: the garbage collector may close an abandoned stream while this thread holds it.
        self._lock = threading.RLock()
        self._store: KVStore[ModelKV] = KVStore(
            memory_limit_bytes, new=lambda: ModelKV(model.config), copy=ModelKV.copy
        )

    @classmethod
    def from_pretrained(
        cls,
        folder_or_hub_id: str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        device: str | None = None,
        memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT,
        prefill_chunk: int = 512,
        progress: Progress | None = None,
        context_window: int | None = None,
        **model_options: Any,
    ) -> TransformersBackend:
        """Load a model and its tokenizer from a folder or the hub.

        Parameters
        ----------
        folder_or_hub_id
            A folder that ``save_pretrained`` wrote, an id on the hub such as
            ``"HuggingFaceTB/SmolLM2-135M-Instruct"``, or the name of a model that ``agentkv model pull``
            fetched.
        dtype
            Of the weights and the KV. None takes the checkpoint's on a GPU; on a CPU, bfloat16 if it has
            instructions for it and float32 otherwise.
        device
            None takes a CUDA device if there is one, and the CPU otherwise.
        **model_options
            Passed to ``AutoModelForCausalLM.from_pretrained``, such as ``attn_implementation``.

        Other parameters are those of the class.

        Raises
        ------
        ModelNotFoundError
            There is no such model, or it cannot be loaded.
        CapabilityError
            There is no such device.
        ConfigurationError
            The model does not take an option.
        """
        from agentkv.backends.loading import load_model
        from agentkv.huggingface import HuggingFaceTokenizer

        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        name, model = load_model(str(folder_or_hub_id), place, dtype, model_options)
        return cls(
            model,
            HuggingFaceTokenizer.from_pretrained(name),
            memory_limit_bytes=memory_limit_bytes,
            prefill_chunk=prefill_chunk,
            progress=progress,
            device=place,
            context_window=context_window,
        )

    @property
    def capabilities(self) -> Capabilities:
        """Any prefix is reused to the token, and salts are kept apart."""
        return self._capabilities

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer and chat template given."""
        return self._tokenizer

    @property
    def model(self) -> Any:
        """The model itself."""
        return self._model

    @property
    def stored_bytes(self) -> int:
        """Bytes of KV kept, unused room included."""
        return self._store.stored_bytes

    @property
    def stored_conversations(self) -> tuple[str, ...]:
        """Conversations with KV, the least recently used first."""
        return self._store.conversations

    def stream(self, request: Request) -> Iterator[Event]:
        """Run one call; closing the iterator early stops the model and keeps the KV computed so far.

        There is one delta for each token, then the completion. ``Completion.ids`` are all generated ids: the
        end-of-turn token and the tokens that formed a stop string are among them, though not in the text.
        Times count from when the iterator is first advanced. They include the wait for other calls' passes
        through the model, but not the time that the consumer takes between two deltas. `Request.tools` are
        not used: the tools are in the prompt, and no calls are parsed.

        Raises
        ------
        ConfigurationError
            The prompt is empty, an id is not in the vocabulary or an option is out of range; raised at once.
        ContextWindowError
            Prompt and ``max_tokens`` exceed the context window; raised at once.
        BackendError
            The model failed, its error is the cause. The conversation's KV is dropped; the call can be made
            again.
        """
        check_options(request.options)
        self._check_prompt(request.ids, room=request.options.max_tokens)
        return self._generate(request)

    def prefill(self, request: Request) -> Usage:
        """Compute the KV of a prompt and no token, so that a later request finds it.

        Options of the request are not used. Raises as `stream`.
        """
        self._check_prompt(request.ids, room=0)
        entry = self._open(request, room=0)
        try:
            _, meter = self._prefill(entry, request.ids)
        finally:
            self._close(entry)
        return Usage(len(request.ids), meter.cached, meter.computed)

    def release(self, conversation: str) -> None:
        """Forget the KV of a conversation under every salt; unknown ids are ignored."""
        with self._lock:
            self._store.release(conversation)

    def reset(self) -> None:
        """Forget the KV of all conversations."""
        with self._lock:
            self._store.reset()

    def close(self) -> None:
        """Forget all KV; a later call computes it anew."""
        self.reset()

    def _generate(self, request: Request) -> Iterator[Event]:
        started = perf_counter()
        prompt, options = request.ids, request.options
        sampler = Sampler(options, prompt, self._device)
        answer = AnswerText(self._tokenizer, options.stop)
        generated: list[int] = []
        entry = self._open(request, room=options.max_tokens)
        try:
            logits, meter = self._prefill(entry, prompt)
            usage = Usage(len(prompt), meter.cached, meter.computed)
            ttft = duration = consumer = 0.0
            finish: FinishReason | None = None
            while finish is None:
                token = self._sample(entry, sampler, logits)
                duration = perf_counter() - started - consumer
                ttft = ttft if generated else duration
                generated.append(token)
                text = "" if token in self._eos else answer.push(token)
                if token in self._eos or answer.stopped:
                    finish = FinishReason.STOP
                elif len(generated) == options.max_tokens:
                    finish = FinishReason.LENGTH
                if finish is not None:
                    text += answer.flush()
                    # What was held back may complete a stop string.
                    finish = FinishReason.STOP if answer.stopped else finish
                handed = perf_counter()
                yield Delta(text, (token,))
                consumer += perf_counter() - handed
                if finish is None:
                    logits = self._forward(entry, [token], meter)
        finally:
            self._close(entry)
        yield Completion(
            text=answer.text,
            ids=tuple(generated),
            finish_reason=finish,
            usage=replace(usage, generated_tokens=len(generated)),
            ttft_s=ttft,
            duration_s=duration,
        )

    def _prefill(self, entry: Entry[ModelKV], prompt: TokenIds) -> tuple[torch.Tensor, _Meter]:
        """Compute what the entry lacks of the prompt; returns logits ``[vocabulary]`` of its last token."""
        meter = _Meter(cached=entry.state.observed_length())
        start, total = len(entry.ids), len(prompt)
        chunk = self._chunk if self._reusable(total) else total
        logits = None
        for at in range(start, total, chunk):
            logits = self._forward(entry, prompt.tolist(at, at + chunk), meter)
            if self._progress is not None:
                self._progress(len(entry.ids) - start, total - start)
        if logits is None or meter.cached + meter.computed != total:
            self._drop(entry)
            raise BackendError(
                f"{meter.cached} cached and {meter.computed} computed tokens do not make the "
                f"prompt's {total}: the KV of the conversation was dropped, make the call again"
            )
        with self._lock:
            self._store.measure(entry)
        return logits, meter

    @torch.inference_mode()
    def _forward(self, entry: Entry[ModelKV], tokens: list[int], meter: _Meter) -> torch.Tensor:
        """Pass tokens through the model (here and nowhere else); returns the last one's logits."""
        input_ids = torch.tensor([tokens], device=self._device)
        with self._lock:
            try:
                output = self._model(
                    input_ids=input_ids, **{self._cache_argument: entry.state.cache}, **self._fixed_arguments
                )
            except BaseException as error:
                self._drop(entry)
                if isinstance(error, Exception):
                    raise self._failure("the model failed", entry, error) from error
                raise
            count = input_ids.shape[1]
            meter.computed += count
            entry.state.length += count
            entry.ids = entry.ids.extend(tokens)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def _sample(self, entry: Entry[ModelKV], sampler: Sampler, logits: torch.Tensor) -> int:
        try:
            return sampler.sample(logits)
        except Exception as error:
            self._drop(entry)
            raise self._failure("no token could be sampled", entry, error) from error

    def _failure(self, what: str, entry: Entry[ModelKV], error: Exception) -> BackendError:
        return BackendError(
            f"{what} after {len(entry.ids)} tokens of conversation {entry.conversation!r} "
            f"({type(error).__name__}: {error}); its KV was dropped, and the call can be made again"
        )

    def _open(self, request: Request, *, room: int) -> Entry[ModelKV]:
        with self._lock:
            if not self._reusable(len(request.ids) + room):
                return self._store.detached(request.salt, request.conversation)
            entry = self._store.open(request.salt, request.conversation, request.ids)
            with torch.inference_mode():
                entry.state.reserve(len(request.ids) + min(room, _ROOM_AHEAD))
            return entry

    def _close(self, entry: Entry[ModelKV]) -> None:
        with self._lock:
            self._store.close(entry)

    def _drop(self, entry: Entry[ModelKV]) -> None:
        with self._lock:
            self._store.drop(entry)

    def _reusable(self, length: int) -> bool:
        """Whether the KV of a token is the same in every sequence up to this length."""
        return self._stable_length is None or length <= self._stable_length

    def _check_prompt(self, ids: TokenIds, *, room: int) -> None:
        if not ids:
            raise ConfigurationError("the prompt is empty: a request needs at least one token id")
        window = self._capabilities.context_window
        if len(ids) + room > window:
            raise ContextWindowError(
                f"{len(ids)} prompt tokens and max_tokens={room} make {len(ids) + room}, but the model's "
                f"context window is {window}: shorten the prompt by {len(ids) + room - window} tokens "
                "or lower max_tokens"
            )
        highest = ids.highest()
        if highest >= self._vocabulary:
            raise ConfigurationError(
                f"token id {highest} is not in the model's vocabulary of {self._vocabulary}: "
                "was the prompt encoded with another model's tokenizer?"
            )
