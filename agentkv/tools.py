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
from copy import copy
from dataclasses import dataclass, field, make_dataclass
from functools import partial
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
    def text(self) -> str:
        """Canonical JSON of the whole tool; equal for equal tools."""
        return json.dumps([self.name, self.description, self.parameters_json], ensure_ascii=False)


def _langchain_schema(tool: Any) -> object:
    # What LangChain itself puts in when the tool runs is none of the model's arguments.
    schema = getattr(tool, "tool_call_schema", tool.args_schema)
    if isinstance(schema, Mapping):
        return schema
    if schema is not None and hasattr(schema, "model_json_schema"):
        return schema.model_json_schema()
    return None


def _signature_schema(function: Any) -> object:
    from pydantic import PydanticUserError, TypeAdapter

    name = function.__name__
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise SegmentError(f"tool {name!r}: a type of its signature is unknown: {error}") from error
    # A dataclass takes any parameter's name; a pydantic model has names of its own.
    made: Any = make_dataclass(name, _parameters(function, hints), kw_only=True, namespace={"__doc__": ""})
    try:
        schema: dict[str, Any] = TypeAdapter(made).json_schema()
    except PydanticUserError as error:
        raise SegmentError(
            f"tool {name!r}: its signature has no JSON schema ({error}); give a schema instead"
        ) from error
    schema.pop("title", None)
    schema.setdefault("properties", {})
    return schema


def _parameters(function: Any, hints: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise SegmentError(
                f"tool {function.__name__!r}: parameter {name!r} cannot be passed by name; "
                "use ordinary or keyword-only parameters"
            )
        default: Any = parameter.default
        if default is parameter.empty:
            yield name, hints.get(name, Any), field()
        elif type(default).__hash__ is None:
            # A dataclass takes no list or dict as a default.
            yield name, hints.get(name, Any), field(default_factory=partial(copy, default))
        else:
            yield name, hints.get(name, Any), field(default=default)


def as_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Write tool schemas for a template that knows no tools."""
    lines = [json.dumps(tool["function"], sort_keys=True, ensure_ascii=False) for tool in tools]
    return (
        "## Tools\n"
        "These functions can be called:\n" + "\n".join(lines) + "\n"
        'To call one, answer with <tool_call>{"name": "...", "arguments": {...}}</tool_call> '
        "and nothing after it."
    )


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call found in an answer's text."""

    name: str
    arguments: str
    """The argument text byte for byte."""
    valid: bool
    """Whether `arguments` is a JSON object."""


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_NAME = re.compile(r'"name"\s*:\s*("(?:[^"\\]|\\.)*")')
_SPACE = re.compile(r"\s*")


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def parse_calls(text: str) -> tuple[ParsedCall, ...]:
    """Find the calls in an answer: ``<tool_call>`` blocks, else a bare object with name and arguments."""
    if _OPEN in text:
        return tuple(call for call, _, _ in _tagged(text) if call is not None)
    bare = text.strip()
    if not (bare.startswith("{") and bare.endswith("}")):
        return ()
    members, end = _members(bare)
    if end not in (len(bare), None) or not any(key in members for key in ("arguments", "parameters")):
        return ()
    call = _call(bare, members, whole=end is not None)
    return () if call is None else (call,)


def without_calls(text: str) -> str:
    """Return an answer's text without the calls that `parse_calls` finds in it."""
    if _OPEN not in text:
        return "" if parse_calls(text) else text
    kept, at = [], 0
    for _, start, end in _tagged(text):
        kept.append(text[at:start])
        at = end
    return ("".join(kept) + text[at:]).strip()


def _tagged(text: str) -> Iterator[tuple[ParsedCall | None, int, int]]:
    """Yield the call of each tagged block, and where the block begins and ends."""
    at = text.find(_OPEN)
    while at >= 0:
        start = _skip(text, at + len(_OPEN))
        members, end = _members(text[start:]) if text[start : start + 1] == "{" else ({}, None)
        # The end of a whole object is known, whatever its strings hold.
        close = text.find(_CLOSE, start if end is None else start + end)
        stop = len(text) if close < 0 else close
        block = text[start:stop].rstrip()
        if end is None and members:
            members = _members(block)[0]
        yield _call(block, members, whole=end is not None), at, min(len(text), stop + len(_CLOSE))
        at = text.find(_OPEN, stop)


def _call(block: str, members: Mapping[str, str], *, whole: bool) -> ParsedCall | None:
    name = members.get("name")
    if name is None:
        found = _NAME.search(block)
        name = found.group(1) if found else None
    decoded = None if name is None else loads(name)
    if not isinstance(decoded, str):
        return None
    arguments = members.get("arguments", members.get("parameters"))
    if arguments is None:
        return ParsedCall(decoded, "{}" if whole else block, whole)
    return ParsedCall(decoded, arguments, isinstance(loads(arguments), dict))


def _members(text: str) -> tuple[dict[str, str], int | None]:
    """Return an object's members as raw text, and where it ends; None if it is malformed or cut off.

    A malformed value reads to the end of the text.
    """
    found: dict[str, str] = {}
    at = _skip(text, 1)
    if text[at : at + 1] == "}":
        return found, at + 1
    while text[at : at + 1] == '"':
        try:
            key, at = _DECODER.raw_decode(text, at)
        except ValueError:
            break
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            break
        at = _skip(text, at + 1)
        try:
            _, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            found[key] = text[at:]
            break
        found[key] = text[at:end]
        at = _skip(text, end)
        if text[at : at + 1] == "}":
            return found, at + 1
        if text[at : at + 1] != ",":
            break
        at = _skip(text, at + 1)
    return found, None


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def loads(text: str) -> object | None:
    """Return a JSON value; None if the text is none, holds ``NaN``, or is nested too deep to read."""
    try:
        loaded: object = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return loaded


def stable_arguments(call: ParsedCall) -> str:
    """Return arguments that every server accepts: the text itself, or the malformed text as a JSON value.

    A malformed call is replaced once, when it is recorded, so that later prompts never change.
    """
    if call.valid:
        return call.arguments
    return json.dumps({"malformed_arguments": call.arguments}, ensure_ascii=False)
