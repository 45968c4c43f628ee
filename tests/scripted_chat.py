"""A chat model for tests of what is built on LangChain: it answers from a script, over a prefix cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.tool import ToolCall
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field, PrivateAttr

BLOCK = 32
"""Letters of a block of the cache."""


@dataclass
class Sent:
    """One call, as the model got it."""

    messages: list[BaseMessage]
    tools: list[str] = field(default_factory=list)
    """Names of the tools that were bound."""
    forced: str = ""
    """Name of the tool that had to be called."""

    @property
    def last(self) -> str:
        return str(self.messages[-1].text)

    @property
    def prompt(self) -> str:
        """The prompt as one text, the opening of the answer included."""
        return json.dumps(self.tools) + "".join(_rendered(one) for one in self.messages) + "\nai: "


Answer = str | AIMessage
Script = Callable[[Sent], Answer]


class ScriptedChat(BaseChatModel):
    """Answers from a list, again and again, or by a function; caches whole blocks of letters."""

    answers: list[Any] | Script = Field(default_factory=lambda: ["Fine."])
    model_name: str = "scripted"
    _sent: list[Sent] = PrivateAttr(default_factory=list)
    _cached: list[str] = PrivateAttr(default_factory=list)

    @property
    def sent(self) -> list[Sent]:
        """All calls so far."""
        return self._sent

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: Any = None, **kwargs: Any
    ) -> Runnable[Any, AIMessage]:
        return self.bind(
            tools=[convert_to_openai_tool(one) for one in tools], tool_choice=tool_choice, **kwargs
        )

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        tools = [one["function"]["name"] for one in kwargs.get("tools") or ()]
        call = Sent(list(messages), tools, _name(kwargs.get("tool_choice")))
        self._sent.append(call)
        made = self._answer(call)
        prompt, written = call.prompt, _written(made)
        cached = max((_shared(prompt, known) for known in self._cached), default=0)
        cached = min(cached, len(prompt) - 1) // BLOCK * BLOCK
        self._cached.append(prompt + written)
        made.usage_metadata = {
            "input_tokens": len(prompt),
            "output_tokens": len(written),
            "total_tokens": len(prompt) + len(written),
            "input_token_details": {"cache_read": cached},
        }
        made.response_metadata = {
            "prompt_token_ids": list(map(ord, prompt)),
            "token_ids": list(map(ord, written)),
        }
        return ChatResult(generations=[ChatGeneration(message=made)])

    def _answer(self, call: Sent) -> AIMessage:
        answer = (
            self.answers(call)
            if callable(self.answers)
            else self.answers[(len(self._sent) - 1) % len(self.answers)]
        )
        if isinstance(answer, AIMessage):
            made = answer.model_copy(deep=True)
            made.id = None
            return made
        return AIMessage(str(answer))


def calling(name: str, call_id: str = "call00001", **arguments: Any) -> AIMessage:
    """Return an answer that calls a tool."""
    return AIMessage("", tool_calls=[ToolCall(name=name, args=arguments, id=call_id, type="tool_call")])


def updates(call: Sent) -> list[str]:
    """Return the lines of a call's messages that are errata."""
    lines = [line for one in call.messages[1:] for line in str(one.text).splitlines()]
    return [line for line in lines if line.startswith("Update ")]


def append_only(calls: Sequence[Sent]) -> list[bool]:
    """Tell of each call but the first whether its prompt begins with the one before."""
    return [after.prompt.startswith(before.prompt) for before, after in pairwise(calls)]


def _shared(one: str, other: str) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _rendered(message: BaseMessage) -> str:
    return f"\n{message.type}: {_written(message)}"


def _written(message: BaseMessage) -> str:
    calls = [[call["name"], call["args"]] for call in getattr(message, "tool_calls", ())]
    return f"{message.text}{json.dumps(calls) if calls else ''}\x03"


def _name(choice: Any) -> str:
    if isinstance(choice, dict):
        return str(choice.get("function", choice).get("name", ""))
    return choice if isinstance(choice, str) else ""
