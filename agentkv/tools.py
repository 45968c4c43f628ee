"""Tools as JSON schemas, as prompt text, and the calls a model writes.

Where a chat template knows tools, it writes them itself. Where it does not, `as_text` puts them into
the system text in the widespread form of one JSON object between ``<tool_call>`` tags, and
`parse_calls` reads that form (and a bare JSON object) back.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from agentkv.errors import SegmentError


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One tool: its name, what it does and the JSON schema of its arguments."""

    name: str
    description: str
    parameters_json: str
    """JSON schema as canonical JSON text."""

    @classmethod
    def of(cls, tool: Any) -> ToolSpec:
        """Read a function, a JSON schema (OpenAI's form, wrapped or not) or a LangChain-style tool.

        Raises
        ------
        SegmentError
            It is none of these, or has no name.
        """
        if isinstance(tool, ToolSpec):
            return tool
        if isinstance(tool, Mapping):
            body = tool.get("function", tool)
            if not isinstance(body, Mapping) or not isinstance(body.get("name"), str):
                raise SegmentError(f"tool {tool!r} has no name; give an OpenAI function schema")
            return cls._made(body["name"], body.get("description", ""), body.get("parameters"))
        if isinstance(getattr(tool, "name", None), str) and hasattr(tool, "args_schema"):
            return cls._made(tool.name, getattr(tool, "description", ""), _langchain_schema(tool))
        if callable(tool) and hasattr(tool, "__name__"):
            return cls._made(tool.__name__, inspect.getdoc(tool) or "", _signature_schema(tool))
        raise SegmentError(f"{tool!r} is not a tool; give a function, a JSON schema or a LangChain tool")

    @classmethod
    def _made(cls, name: str, description: object, parameters: object) -> ToolSpec:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", name):
            raise SegmentError(f"tool name {name!r}: use letters, digits and _ . -")
        schema = parameters if parameters is not None else {"type": "object", "properties": {}}
        try:
            text = json.dumps(schema, sort_keys=True, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise SegmentError(f"tool {name!r}: its parameters are not a JSON schema ({error})") from error
        return cls(name, str(description or "").strip(), text)

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's form, as chat templates expect it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": json.loads(self.parameters_json),
            },
        }

    @property
    def digest(self) -> str:
        """Canonical JSON of the whole tool; equal for equal tools."""
        return json.dumps([self.name, self.description, self.parameters_json], ensure_ascii=False)


def _langchain_schema(tool: Any) -> object:
    schema = tool.args_schema
    if isinstance(schema, Mapping):
        return schema
    if schema is not None and hasattr(schema, "model_json_schema"):
        return schema.model_json_schema()
    return None


def _signature_schema(function: Any) -> object:
    from pydantic import PydanticSchemaGenerationError, create_model

    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise SegmentError(f"tool {function.__name__!r}: a type of its signature is unknown: {error}") from error
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise SegmentError(
                f"tool {function.__name__!r}: parameter {name!r} cannot be passed by name; "
                "use ordinary or keyword-only parameters"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        arguments[name] = (hints.get(name, Any), default)
    try:
        schema: dict[str, Any] = create_model(function.__name__, **arguments).model_json_schema()
    except PydanticSchemaGenerationError as error:
        raise SegmentError(
            f"tool {function.__name__!r}: its signature has no JSON schema ({error}); give a schema instead"
        ) from error
    schema.pop("title", None)
    return schema


def as_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Write tool schemas for a template that knows no tools."""
    lines = [json.dumps(tool["function"], sort_keys=True, ensure_ascii=False) for tool in tools]
    return (
        "## Tools\n"
        "These functions can be called:\n" + "\n".join(lines) + "\n"
        'To call one, answer with <tool_call>{"name": "...", "arguments": {...}}</tool_call> and nothing after it.'
    )


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call found in an answer's text."""

    name: str
    arguments: str
    """The argument text byte for byte."""
    valid: bool
    """Whether `arguments` is a JSON object."""


_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')


def parse_calls(text: str) -> tuple[ParsedCall, ...]:
    """Find the calls in an answer: ``<tool_call>`` blocks, else one bare JSON object with name and arguments."""
    blocks = _TAGGED.findall(text)
    if not blocks:
        bare = text.strip()
        if not (bare.startswith("{") and bare.endswith("}") and _ARGUMENTS.search(bare)):
            return ()
        blocks = [bare]
    return tuple(_parsed(blocks))


def _parsed(blocks: Sequence[str]) -> Iterator[ParsedCall]:
    decoder = json.JSONDecoder()
    for block in blocks:
        name = _NAME.search(block)
        if name is None:
            continue
        start = _ARGUMENTS.search(block)
        if start is None:
            yield ParsedCall(name.group(1), "{}", _loads(block) is not None)
            continue
        try:
            value, end = decoder.raw_decode(block, start.end())
        except ValueError:
            yield ParsedCall(name.group(1), block[start.end() :], valid=False)
            continue
        yield ParsedCall(name.group(1), block[start.end() : end], isinstance(value, dict))


def _loads(text: str) -> object | None:
    try:
        loaded: object = json.loads(text)
    except ValueError:
        return None
    return loaded


def stable_arguments(call: ParsedCall) -> str:
    """Return arguments that every server accepts: the text itself, or the malformed text as a JSON value.

    A malformed call is replaced once, when it is recorded, so that later prompts never change.
    """
    if call.valid:
        return call.arguments
    return json.dumps({"malformed_arguments": call.arguments}, ensure_ascii=False)
