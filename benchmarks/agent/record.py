"""Every model call as it was made: when, with which tokens, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, LLMResult


@dataclass(slots=True)
class Call:
    """One model call; filled in while it runs. Times are by `time.perf_counter`."""

    begun: float
    """When the agent began it, before any middleware did its work."""
    forced: bool
    """Whether a tool had to be called."""
    first: float | None = None
    """When the first token came."""
    done: float | None = None
    answer: str = ""
    tools: tuple[str, ...] = ()
    """Names of the tools that were called."""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """None if the server does not say."""
    generated_tokens: int = 0
    prompt_ids: tuple[int, ...] = field(default=(), repr=False)
    """The prompt as the server read it; empty if it does not say."""
    answer_ids: tuple[int, ...] = field(default=(), repr=False)
    report: dict[str, Any] = field(default_factory=dict)
    """agentkv's own report; empty in other arms."""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token; to the whole answer where none was streamed."""
        end = self.first or self.done
        return 0.0 if end is None else end - self.begun

    @property
    def duration_s(self) -> float:
        """Seconds to the whole answer."""
        return 0.0 if self.done is None else self.done - self.begun


class CallRecorder(BaseCallbackHandler):
    """Notes the model calls of one agent."""

    raise_error = True

    def __init__(self) -> None:
        self._calls: list[Call] = []

    def begin(self, now: float, *, forced: bool) -> None:
        """Note that a call begins."""
        self._calls.append(Call(now, forced))

    def take(self) -> list[Call]:
        """Return the calls since the last time."""
        taken, self._calls = self._calls, []
        return taken

    def on_chat_model_start(self, *_: Any, **__: Any) -> None:
        """Leave the prompt alone: what the server says of it is what counts."""

    def on_llm_new_token(self, token: str, *, run_id: UUID, **kwargs: Any) -> None:
        """Note the first token."""
        call = self._calls[-1]
        call.first = call.first or perf_counter()

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Note the answer and its tokens."""
        call, generation = self._calls[-1], response.generations[0][0]
        call.done = perf_counter()
        if isinstance(generation, ChatGeneration) and isinstance(generation.message, AIMessage):
            _fill(call, generation.message)

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Note agentkv's report."""
        if name == "agentkv":
            self._calls[-1].report = dict(data)


def _fill(call: Call, message: AIMessage) -> None:
    usage = message.usage_metadata
    call.answer = str(message.text)
    call.tools = tuple(one["name"] for one in message.tool_calls)
    if usage is not None:
        call.prompt_tokens, call.generated_tokens = usage["input_tokens"], usage["output_tokens"]
        call.cached_tokens = usage.get("input_token_details", {}).get("cache_read")
    call.prompt_ids = tuple(message.response_metadata.get("prompt_token_ids") or ())
    call.answer_ids = tuple(message.response_metadata.get("token_ids") or ())
