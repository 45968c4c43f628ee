"""The seam between agentkv and whatever runs the model.

A backend turns one `Request` (token ids in) into a stream of `Delta` that ends with one
`Completion`. It plans nothing and remembers nothing that matters: its KV cache is only a hint.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from agentkv.errors import BackendError, ConfigurationError
from agentkv.kv.refusals import Refusal
from agentkv.miss import Miss
from agentkv.tokenizer import WireMessage
from agentkv.tokens import TokenIds

if TYPE_CHECKING:
    from agentkv.tokenizer import ChatTokenizer


class PromptForm(StrEnum):
    """In which form a backend takes prompts."""

    IDS = "token ids"
    """Token ids: exactly what was sent and generated before, and the new messages behind it."""
    MESSAGES = "chat messages"
    """Chat messages, which the server renders and tokenises anew in every turn."""


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """The model ended its turn, or a stop string was met."""
    LENGTH = "length"
    """`SamplingOptions.max_tokens` was reached."""
    TOOL_CALLS = "tool_calls"
    """The model ended its turn with tool calls that the server parsed."""
    STOPPED = "stopped"
    """The caller stopped the stream."""


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How an answer is sampled. The default is greedy.

    Raises
    ------
    ConfigurationError
        An option has the wrong type or is out of range; the message names it and its value.
    """

    max_tokens: int = 256
    """Most tokens to generate, at least 1; also the room that the pre-flight check keeps free."""
    temperature: float = 0.0
    """0 is greedy; otherwise logits are divided by it."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches this, in (0, 1]."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 for all."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens seen in prompt or answer less likely."""
    seed: int | None = None
    """Makes sampling repeatable."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these strings; the string itself is not returned."""
    tool_choice: str | None = None
    """``"auto"`` (as None), ``"none"``, ``"required"`` or the name of the tool to call."""
    response_format: Mapping[str, Any] | None = None
    """What the answer has to look like, in OpenAI's form: a JSON schema, for example."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further sampling parameters of the server, by its own names, such as ``{"min_p": 0.1}``."""

    def __post_init__(self) -> None:
        stop: object = self.stop
        if isinstance(stop, list):
            object.__setattr__(self, "stop", tuple(stop))
        checks: tuple[tuple[str, bool, str], ...] = (
            ("max_tokens", _is_whole(self.max_tokens) and self.max_tokens >= 1, "a whole number, at least 1"),
            (
                "temperature",
                _is_number(self.temperature) and self.temperature >= 0,
                "0 (greedy) or a finite number above",
            ),
            ("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            ("top_k", _is_whole(self.top_k) and self.top_k >= 0, "0 (all tokens) or a whole number above"),
            (
                "repetition_penalty",
                _is_number(self.repetition_penalty) and self.repetition_penalty > 0,
                "a finite number above 0",
            ),
            ("seed", self.seed is None or _is_whole(self.seed), "None or a whole number"),
            (
                "stop",
                isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop),
                "a tuple of strings that are not empty",
            ),
            (
                "tool_choice",
                self.tool_choice is None or (isinstance(self.tool_choice, str) and bool(self.tool_choice)),
                'None, "auto", "none", "required" or the name of a tool',
            ),
            (
                "response_format",
                self.response_format is None or isinstance(self.response_format, Mapping),
                'None or a mapping, such as {"type": "json_schema", "json_schema": {...}}',
            ),
            (
                "extra",
                isinstance(self.extra, Mapping) and all(isinstance(name, str) for name in self.extra),
                "a mapping of the server's parameter names to values",
            ),
        )
        for name, good, wanted in checks:
            if not good:
                value = getattr(self, name)
                raise ConfigurationError(f"option {name}={value!r} is out of range: it has to be {wanted}")


def _is_whole(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral)


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class SpliceSpec:
    """Prompt tokens whose KV is loaded from an artifact.

    Prompt ids ``[start, stop)`` are the artifact's ids from `offset` on.
    """

    artifact: str
    """Name of the artifact: 64 hex digits."""
    start: int
    stop: int
    offset: int
    """Index of the artifact's token that stands at `start`."""

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class RefusedSplice:
    """Tokens that were computed although they were to be loaded."""

    splice: SpliceSpec
    reason: Refusal


@dataclass(frozen=True, slots=True)
class Request:
    """One model call."""

    ids: TokenIds
    """The whole prompt, the opening of the answer included."""
    conversation: str
    """Stable id of the conversation: where its KV is kept."""
    salt: str
    """Partition of the prefix cache; requests of different salts never share KV."""
    options: SamplingOptions = field(default_factory=SamplingOptions)
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of all tools that may be called, for backends that constrain or parse calls."""
    rendered_tools: Sequence[Mapping[str, Any]] = ()
    """Those that the chat template writes; empty where they are part of the system text."""
    messages: Sequence[WireMessage] = ()
    """The same prompt as chat messages; empty unless the backend takes `PromptForm.MESSAGES`."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template is given beside messages and tools."""
    expected_cached_tokens: int = 0
    """What a prefix cache should hold of it; where it held less, the backend may look for the cause."""
    routing_key: str = ""
    """The same for a conversation and its forks: what keeps them on one replica. Empty: `conversation`."""
    priority: int = 0
    """Scheduling priority, lower is sooner; servers without priority scheduling ignore it."""
    tenant: str = "default"
    """Whose conversation it is: artifacts of another tenant are never loaded."""
    splices: tuple[SpliceSpec, ...] = ()
    """What to load where the cache does not hold it, by start and without overlaps."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer: `text` may be empty while a character is incomplete."""

    text: str
    ids: tuple[int, ...]
    """Token ids generated since the last delta; empty where the server does not say."""
    reasoning: str = ""
    """What the model thinks before it answers; not part of `text`."""


@dataclass(frozen=True, slots=True)
class RawToolCall:
    """A tool call as the model wrote it."""

    id: str
    name: str
    arguments: str
    """The argument text byte for byte; not necessarily valid JSON."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one call; ``cached + spliced + computed == prompt``."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was reused from an exact prefix."""
    computed_tokens: int
    """Prompt tokens that were prefilled."""
    spliced_tokens: int = 0
    """Prompt tokens whose KV was loaded from artifacts."""
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. A call that fails or is stopped produces none."""

    text: str
    """The answer without stop strings and without special tokens."""
    ids: tuple[int, ...] | None
    """Every generated id, the end-of-turn token included; None where the server does not say."""
    finish_reason: FinishReason
    usage: Usage
    ttft_s: float
    """Seconds from the call to the first token."""
    duration_s: float
    """Seconds from the call to the last token."""
    tool_calls: tuple[RawToolCall, ...] | None = None
    """Calls that the server parsed; None if the client is to parse `text`."""
    reasoning: str = ""
    prompt_ids: TokenIds | None = None
    """The prompt that the server read, if it says; where it renders messages these are the true ids."""
    lost: Miss | None = None
    """Why less was cached than `Request.expected_cached_tokens`, if the backend found out."""
    counted: bool = True
    """Whether `Usage.cached_tokens` was observed in this call."""
    refused: tuple[RefusedSplice, ...] = ()
    """Splices that were asked for and computed instead."""


Event: TypeAlias = Delta | Completion
"""What a backend streams: deltas, then exactly one completion."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do; checked when a context is entered."""

    name: str
    """For messages, such as ``"transformers"``."""
    context_window: int
    """Most tokens of prompt and answer together."""
    block_size: int
    """Prefix-cache granularity in tokens; 1 where any prefix can be reused."""
    cached_counts: bool = True
    """Whether it reports cached tokens at all."""
    salts: bool = True
    """Whether requests of different salts are kept apart."""
    splices: bool = False
    """Whether it can load artifacts."""
    prompts: PromptForm = PromptForm.IDS
    """The form in which it takes prompts."""
    known_ids: bool = True
    """Whether its tokenizer is the served model's; otherwise ids and their numbers are estimates."""


@runtime_checkable
class Backend(Protocol):
    """Runs the model. Implementations are safe to share between contexts."""

    @property
    def capabilities(self) -> Capabilities:
        """What this backend can do."""
        ...

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer and chat template of the served model."""
        ...

    def stream(self, request: Request) -> Iterator[Event]:
        """Run one call; closing the iterator early stops the model.

        Raises
        ------
        BackendError
            The call failed; nothing was delivered after the failure.
        """
        ...

    def release(self, conversation: str) -> None:
        """Forget what is kept for a conversation; unknown ids are ignored."""
        ...


@runtime_checkable
class Prefiller(Protocol):
    """A backend that can put a prompt into its cache ahead of the calls that share it."""

    def prefill(self, request: Request) -> Usage:
        """Compute a prompt's KV, so that a later request finds it; raises as `Backend.stream`."""
        ...


@runtime_checkable
class Splicer(Protocol):
    """A backend with `Capabilities.splices`: it loads compiled chunks instead of prefilling them."""

    @property
    def seam(self) -> int:
        """Leading tokens of a chunk that are computed for real."""
        ...

    def find_artifact(self, tenant: str, ids: Sequence[int]) -> str | None:
        """Return the name of the artifact of exactly these tokens; None if there is none.

        Raises
        ------
        BackendError
            The server could not be asked.
        """
        ...

    def compile_chunk(self, tenant: str, ids: Sequence[int]) -> str:
        """Make the artifact of these tokens, unless there is one, and return its name.

        Raises
        ------
        BackendError, ArtifactError
            It could not be computed or stored.
        """
        ...


@runtime_checkable
class AsyncBackend(Backend, Protocol):
    """A backend with a native asynchronous stream; others are run in a thread."""

    def astream(self, request: Request) -> AsyncIterator[Event]:
        """As `stream`, for ``async for``; cancelling stops the model."""
        ...


def complete(backend: Backend, request: Request) -> Completion:
    """Run one call to its end and return the completion.

    Raises
    ------
    BackendError
        The call failed, or the backend ended without a completion.
    """
    for event in backend.stream(request):
        if isinstance(event, Completion):
            return event
    raise BackendError(f"backend {backend.capabilities.name!r} ended a call without a completion")
