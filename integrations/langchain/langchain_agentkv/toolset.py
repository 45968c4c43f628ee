"""The tools of a request: what is compared, what is bound, and calls that cannot be made."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agentkv.tools import ToolSpec, parse_calls, without_calls
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.messages.tool import ToolCall
from langchain_core.utils.function_calling import convert_to_openai_tool

from langchain_agentkv.canonical import digest_of, text_of

UPDATES: Final = "agentkv_updates"
"""Where a tool's metadata says which fields it changes."""


@dataclass(frozen=True, slots=True)
class Toolset:
    """The tools of a request."""

    specs: tuple[ToolSpec, ...] = ()
    """As the core compares them."""
    schemas: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Tool name to the schema in OpenAI's form, as LangChain makes it: without injected arguments."""
    originals: Mapping[str, Any] = field(default_factory=dict)
    """Tool name to the tool as it was given."""
    native: tuple[dict[str, Any], ...] = ()
    """The provider's own tools, which are no functions."""
    given: tuple[Any, ...] = ()
    """All tools as they were given."""

    @classmethod
    def of(cls, tools: Iterable[Any]) -> Toolset:
        """Read tools as LangChain binds them.

        Raises
        ------
        SegmentError
            A tool's name is none that models can call.
        """
        schemas: dict[str, dict[str, Any]] = {}
        originals: dict[str, Any] = {}
        native = []
        given = tuple(tools)
        for tool in given:
            if _is_native(tool):
                native.append(dict(tool))
                continue
            schema = convert_to_openai_tool(tool)
            name = schema["function"]["name"]
            schemas[name], originals[name] = schema, tool
        specs = tuple(ToolSpec.of(schema) for schema in schemas.values())
        return cls(specs, schemas, originals, tuple(native), given)

    @property
    def names(self) -> frozenset[str]:
        """Names of the functions that may be called."""
        return frozenset(self.schemas)

    def bound(self, frozen: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return what to bind: the tools of the frozen prefix in its order, whatever is there now.

        A tool that is gone or has another schema is bound as it was.
        """
        made: list[Any] = []
        for schema in frozen:
            name = schema["function"]["name"]
            same = digest_of(self.schemas.get(name)) == digest_of(schema)
            made.append(self.originals[name] if same else dict(schema))
        return [*made, *self.native]

    @property
    def native_digest(self) -> str:
        """Digest of the provider's own tools."""
        return digest_of(self.native) if self.native else ""


def updates_of(tool: object) -> tuple[str, ...]:
    """Return the keys of the fields that a tool was declared to change."""
    metadata = getattr(tool, "metadata", None)
    if isinstance(metadata, Mapping) and UPDATES in metadata:
        return tuple(metadata[UPDATES])
    for name in ("func", "coroutine"):
        declared = getattr(getattr(tool, name, None), UPDATES, None)
        if declared is not None:
            return tuple(declared)
    return tuple(getattr(tool, UPDATES, ()))


def with_text_calls(message: AIMessage, names: Collection[str], turn: int) -> AIMessage:
    """Return an answer with the calls that stand in its text, of tools that were told in the text.

    Parameters
    ----------
    names
        Of the tools that are not bound.
    turn
        Number of the call, of which ids are made.
    """
    if message.tool_calls or not names:
        return message
    text = text_of(message)
    calls = [call for call in parse_calls(text) if call.valid and call.name in names]
    if not calls or len(calls) != len(parse_calls(text)):
        return message
    made = [
        # Nine letters and digits: some templates refuse ids of any other form.
        ToolCall(
            name=call.name, args=json.loads(call.arguments), id=f"call{turn:03x}{i:02x}", type="tool_call"
        )
        for i, call in enumerate(calls, start=1)
    ]
    return message.model_copy(update={"content": without_calls(text), "tool_calls": made})


def refused(message: AIMessage, told: Collection[str], available: Collection[str]) -> list[ToolMessage]:
    """Return results for the calls of tools that were told and are there no more."""
    return [
        ToolMessage(
            content=f"The tool {call['name']!r} is not available. It was not called.",
            tool_call_id=call["id"],
            name=call["name"],
            status="error",
        )
        for call in message.tool_calls
        if call["id"] and call["name"] in told and call["name"] not in available
    ]


def _is_native(tool: object) -> bool:
    if not isinstance(tool, Mapping):
        return False
    if tool.get("type") == "function" or "function" in tool:
        return False
    return "type" in tool or not {"name", "title"} & tool.keys()
