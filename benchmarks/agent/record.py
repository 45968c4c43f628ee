"""Every model call of an agent: what it asked for, when it began, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, LLMResult

from agentkv.backends.base import Usage
from benchmarks.serving.record import Call as BackendCall


@dataclass(slots=True)
class Note:
    """What the agent knows of a call."""

    begun: float
    """When it began, before any middleware did its work; by `time.perf_counter`."""
    answer: str = ""
    tools: tuple[str, ...] = ()
    """Names of the tools that were called."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """agentkv's own report; empty in other arms."""


@dataclass(frozen=True, slots=True)
class AgentCall:
    """A call, as the agent and the backend saw it."""

    note: Note
    sent: BackendCall

    @property
    def usage(self) -> Usage:
        """Tokens of the call."""
        if self.sent.usage is None:
            raise RuntimeError("a call of the agent has no usage: it failed")
        return self.sent.usage

    @property
    def ttft_s(self) -> float:
        """Seconds from the agent's beginning to the first token."""
        return (self.sent.first or self.note.begun) - self.note.begun

    @property
    def duration_s(self) -> float:
        """Seconds to the whole answer."""
        return (self.sent.done or self.note.begun) - self.note.begun


class NoteTaker(BaseCallbackHandler):
    """Notes the model calls of one agent."""

    raise_error = True

    def __init__(self) -> None:
        self._notes: list[Note] = []

    def begin(self, now: float) -> None:
        """Note that a call begins."""
        self._notes.append(Note(now))

    def take(self) -> list[Note]:
        """Return the notes since the last time."""
        taken, self._notes = self._notes, []
        return taken

    def on_chat_model_start(self, *_: Any, **__: Any) -> None:
        """Leave the prompt alone: what the backend says of it is what counts."""

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Note the answer."""
        generation = response.generations[0][0]
        if isinstance(generation, ChatGeneration) and isinstance(generation.message, AIMessage):
            self._notes[-1].answer = str(generation.message.text)
            self._notes[-1].tools = tuple(call["name"] for call in generation.message.tool_calls)

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Note agentkv's report."""
        if name == "agentkv":
            self._notes[-1].report = dict(data)
