"""A transformers model in this process: the embedded backend, and the oracle for the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from agentkv.anchor import ANCHOR
from agentkv.backends.base import (
    Capabilities,
    Completion,
    Delta,
    Event,
    FinishReason,
    RefusedSplice,
    Request,
    Usage,
)
from agentkv.errors import CapabilityError, ConfigurationError, MissingDependencyError
from agentkv.kv.refusals import Refusal

try:
    import torch

    from agentkv.backends.detokenize import AnswerText
    from agentkv.backends.kvcache import ModelKV
    from agentkv.backends.kvstore import Entry
    from agentkv.backends.model_traits import generation_eos, weights_folder
    from agentkv.backends.runner import Meter, ModelRunner, Progress
    from agentkv.backends.sampling import Sampler, check_options
except ImportError as error:
    raise MissingDependencyError(
        f"TransformersBackend needs torch and transformers ({error}): "
        "pip install 'agentkv-middleware[transformers]', or '.[transformers]' in a checkout"
    ) from error

if TYPE_CHECKING:
    from agentkv.backends.splices import ModelArtifacts
    from agentkv.kv.store import ArtifactStore
    from agentkv.tokenizer import ChatTokenizer

DEFAULT_MEMORY_LIMIT: Final = 4 * 1024**3
DEFAULT_ARTIFACT_MEMORY: Final = 1024**3
DEFAULT_SEAM: Final = 16


class TransformersBackend:
    """Runs a causal language model of transformers, and keeps the KV of each conversation.

    A request goes on from the longest prefix that its conversation, or any other conversation of the same
    salt, has KV for: the former in place, the latter by copying that part. The last prompt token is always
    computed. Models whose state cannot be cut (recurrent layers) reuse it only if the prompt continues all
    of it. Reuse is exact up to kernel numerics.

    With a store of artifacts it is a `Splicer`: what `Request.splices` names is loaded where the cache lacks
    it, in approximate namespaces only. What cannot be loaded is computed; `Completion.refused` says why.

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
    artifacts
        Where compiled chunks are: a store, or the path of its folder. None splices nothing.
    anchor
        What chunks are compiled behind: text of a system message, or an empty one for nothing.
    seam
        Leading tokens of a chunk that are computed for real where it is spliced.
    artifact_memory_bytes
        Most bytes of loaded artifacts to keep in main memory, apart from the KV of conversations.
    folder
        Holds the files of exactly this model and tokenizer, so that artifacts are shared with whoever runs
        them. None takes digests of what is in memory instead.

    Raises
    ------
    ConfigurationError
        A number is out of range, or the configuration does not tell the context window.
    CapabilityError
        The model takes no cache; or there is a store, and the KV of this model cannot be moved.
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
        artifacts: ArtifactStore | str | Path | None = None,
        anchor: str = ANCHOR,
        seam: int = DEFAULT_SEAM,
        artifact_memory_bytes: int = DEFAULT_ARTIFACT_MEMORY,
        folder: str | Path | None = None,
    ) -> None:
        for name, number in (("seam", seam), ("artifact_memory_bytes", artifact_memory_bytes)):
            if number < 0:
                raise ConfigurationError(f"{name}={number} has to be 0 or above")
        self._model = model.eval() if device is None else model.eval().to(device)
        self._tokenizer = tokenizer
        self._runner = ModelRunner(
            self._model,
            memory_limit_bytes=memory_limit_bytes,
            prefill_chunk=prefill_chunk,
            progress=progress,
            context_window=context_window,
        )
        self._eos = tokenizer.eos_ids | generation_eos(model)
        self._seam = seam
        self._artifacts: ModelArtifacts | None = None
        if artifacts is not None:
            from agentkv.backends.splices import model_artifacts

            self._artifacts = model_artifacts(
                self._runner, tokenizer, artifacts, anchor, folder, limit_bytes=artifact_memory_bytes
            )
        self._capabilities = Capabilities(
            name="transformers",
            context_window=self._runner.window,
            block_size=1,
            splices=self._artifacts is not None,
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
        artifacts: ArtifactStore | str | Path | None = None,
        anchor: str = ANCHOR,
        seam: int = DEFAULT_SEAM,
        artifact_memory_bytes: int = DEFAULT_ARTIFACT_MEMORY,
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
            There is no such device; or there is a store of artifacts, and the model's KV cannot be moved.
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
            artifacts=artifacts,
            anchor=anchor,
            seam=seam,
            artifact_memory_bytes=artifact_memory_bytes,
            folder=None if artifacts is None else weights_folder(name, model_options),
        )

    @property
    def capabilities(self) -> Capabilities:
        """Any prefix is reused to the token, salts are kept apart, and with a store chunks are spliced."""
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
        return self._runner.stored_bytes

    @property
    def stored_conversations(self) -> tuple[str, ...]:
        """Conversations with KV, the least recently used first."""
        return self._runner.stored_conversations

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
        self._runner.check_prompt(request.ids, room=request.options.max_tokens)
        return self._generate(request)

    def prefill(self, request: Request) -> Usage:
        """Compute the KV of a prompt and no token, so that a later request finds it.

        Options of the request are not used. Raises as `stream`.
        """
        self._runner.check_prompt(request.ids, room=0)
        with self._runner.opened(request, room=0) as entry:
            _, meter = self._prefill(entry, request)
        return meter.usage

    def edit(self, request: Request, *, start: int, stop: int, ids: Sequence[int]) -> Usage:
        """Replace tokens of a prompt whose KV is kept, and keep the KV of what stands behind them.

        The new tokens are computed, and the KV behind them is moved by the change in length. It was computed
        while the old tokens stood there, so it is approximate. A later `stream` of the edited prompt goes on
        from it. While a stream of the conversation is open, its KV is not edited.

        Parameters
        ----------
        request
            The prompt as it stood before, its conversation and its salt.
        start, stop, ids
            Prompt tokens ``[start, stop)`` are replaced by `ids`, which may be more or fewer.

        Returns
        -------
        Usage
            Of the edited prompt: what stood before the edit is cached, what stands behind it spliced, and the
            rest computed, at least the last token.

        Raises
        ------
        CapabilityError
            The request's namespace is exact, or the KV of this model cannot be moved.
        ConfigurationError, ContextWindowError
            There are no such prompt tokens, or the edited prompt is one that `stream` refuses.
        BackendError
            There is no KV that covers the edit, or the model failed, as in `stream`.
        """
        from agentkv.backends.editing import edit

        return edit(self._runner, request, start=start, stop=stop, ids=ids)

    @property
    def seam(self) -> int:
        """Leading tokens of a chunk that are computed for real where it is spliced."""
        return self._seam

    def find_artifact(self, tenant: str, ids: Sequence[int]) -> str | None:
        """Return the name of the artifact of exactly these tokens; None if there is none."""
        return None if self._artifacts is None else self._artifacts.find(tenant, ids)

    def compile_chunk(self, tenant: str, ids: Sequence[int]) -> str:
        """Make the artifact of these tokens, unless there is a sound one, and return its name.

        Raises
        ------
        CapabilityError
            The backend has no store of artifacts.
        ConfigurationError
            There are no tokens, or one is not in the vocabulary.
        ContextWindowError
            Anchor and chunk exceed the context window.
        BackendError
            The model failed.
        ArtifactError
            It could not be stored, or the one that is there carries another signature.
        """
        if self._artifacts is None:
            raise CapabilityError("this backend keeps no artifacts: make it with artifacts=FOLDER")
        from agentkv.backends.compiling import compile_chunk

        return compile_chunk(self._runner, self._artifacts, tenant, ids)

    def release(self, conversation: str) -> None:
        """Forget the KV of a conversation under every salt; unknown ids are ignored."""
        self._runner.release(conversation)

    def reset(self) -> None:
        """Forget the KV of all conversations."""
        self._runner.reset()

    def close(self) -> None:
        """Forget all KV; a later call computes it anew."""
        self.reset()

    def _generate(self, request: Request) -> Iterator[Event]:
        started = perf_counter()
        prompt, options = request.ids, request.options
        sampler = Sampler(options, prompt, self._runner.device)
        answer = AnswerText(self._tokenizer, options.stop)
        generated: list[int] = []
        with self._runner.opened(request, room=options.max_tokens) as entry:
            logits, meter = self._prefill(entry, request)
            usage = meter.usage
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
                    logits = self._runner.forward(entry, [token], meter)
        yield Completion(
            text=answer.text,
            ids=tuple(generated),
            finish_reason=finish,
            usage=replace(usage, generated_tokens=len(generated)),
            ttft_s=ttft,
            duration_s=duration,
            refused=tuple(meter.refused),
        )

    def _prefill(self, entry: Entry[ModelKV], request: Request) -> tuple[torch.Tensor, Meter]:
        """Load and compute what the entry lacks of the prompt; returns logits ``[vocabulary]`` of its end."""
        meter = Meter(len(request.ids), cached=entry.state.observed_length())
        if self._artifacts is None:
            lacking = (splice for splice in request.splices if splice.stop > meter.cached)
            meter.refused += [RefusedSplice(splice, Refusal.DISABLED) for splice in lacking]
        elif request.splices:
            from agentkv.backends.splices import splice_in

            splice_in(self._runner, self._artifacts, entry, request, meter)
        return self._runner.finish(entry, request.ids, meter), meter

    def _sample(self, entry: Entry[ModelKV], sampler: Sampler, logits: torch.Tensor) -> int:
        try:
            return sampler.sample(logits)
        except Exception as error:
            self._runner.drop(entry)
            raise self._runner.failure("no token could be sampled", entry, error) from error
