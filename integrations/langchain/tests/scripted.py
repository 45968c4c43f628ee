"""A chat model that answers from a list and keeps what it was sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.tool import ToolCall
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field, PrivateAttr

from langchain_agentkv.canonical import canonical, digest


@dataclass
class Call:
    """One call that the model got."""

    messages: list[BaseMessage]
    tools: list[dict[str, Any]] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def system(self) -> str:
        return str(self.messages[0].text) if self.messages and self.messages[0].type == "system" else ""

    @property
    def texts(self) -> list[str]:
        return [str(message.text) for message in self.messages]

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]


class Scripted(BaseChatModel):
    """Answers from `answers`, one a call; an exception among them is raised."""

    answers: list[Any] = Field(default_factory=list)
    model_name: str = "scripted"
    usage: bool = True
    _calls: list[Call] = PrivateAttr(default_factory=list)
    _lock: Any = PrivateAttr(default_factory=threading.Lock)
    _at: int = PrivateAttr(default=0)

    @property
    def calls(self) -> list[Call]:
        return self._calls

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[Any, AIMessage]:
        given = {key: value for key, value in kwargs.items() if value is not None}
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **given)

    def _next(self, messages: list[BaseMessage], kwargs: dict[str, Any]) -> AIMessage:
        with self._lock:
            tools = kwargs.pop("tools", [])
            self._calls.append(Call(list(messages), tools, kwargs))
            answer = self.answers[self._at % len(self.answers)] if self.answers else "Fine."
            self._at += 1
        if isinstance(answer, Exception):
            raise answer
        message = AIMessage(answer) if isinstance(answer, str) else answer.model_copy(deep=True)
        message.id = None
        if self.usage:
            size = sum(len(str(m.text)) for m in messages)
            message.usage_metadata = {
                "input_tokens": size,
                "output_tokens": 2,
                "total_tokens": size + 2,
                "input_token_details": {"cache_read": size // 2},
            }
        return message

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self._next(messages, kwargs))])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        message = self._next(messages, kwargs)
        for word in str(message.text).split(" "):
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=word + " "))
            if run_manager:
                run_manager.on_llm_new_token(word, chunk=chunk)
            yield chunk
        last = AIMessageChunk(content="", usage_metadata=message.usage_metadata)
        for index, call in enumerate(message.tool_calls):
            last.tool_call_chunks.append(
                {
                    "type": "tool_call_chunk",
                    "name": call["name"],
                    "args": json.dumps(call["args"]),
                    "id": call["id"],
                    "index": index,
                }
            )
        yield ChatGenerationChunk(message=AIMessageChunk(**last.model_dump()))


def calling(*calls: tuple[str, dict[str, Any]], text: str = "", start: int = 1) -> AIMessage:
    """Return an answer with tool calls."""
    made = [
        ToolCall(name=name, args=args, id=f"c{start + index}", type="tool_call")
        for index, (name, args) in enumerate(calls)
    ]
    return AIMessage(content=text, tool_calls=made)


def wire(message: BaseMessage) -> tuple[str, str]:
    """Return what of a message is sent, to be compared."""
    return digest(message), str(canonical(message).content)


def extends(before: Call, after: Call, answer: BaseMessage | None = None) -> bool:
    """Tell whether a call's messages begin with those of an earlier one and its answer, tools included."""
    sent = [wire(message) for message in before.messages]
    if answer is not None:
        sent.append(wire(answer))
    return [wire(message) for message in after.messages][: len(sent)] == sent and before.tools == after.tools


def append_only(calls: Sequence[Call]) -> list[bool]:
    """Tell of each call but the first whether it extends the one before."""
    return [extends(a, b) for a, b in pairwise(calls)]


def updates_in(call: Call) -> list[str]:
    """Return the lines of a call that are errata."""
    lines = [line for text in call.texts[1:] for line in text.splitlines()]
    return [line for line in lines if line.startswith("Update ")]
