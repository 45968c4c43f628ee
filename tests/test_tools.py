"""Tools are read from what people have, and calls from what models write."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.tools import InjectedToolArg
from langchain_core.tools import tool as langchain_tool
from pydantic import Field as PydanticField

from agentkv import Tools
from agentkv.errors import SegmentError
from agentkv.tools import ParsedCall, ToolSpec, parse_calls, stable_arguments, without_calls
from tests.desk import lookup


def refund(amount: Annotated[int, PydanticField(ge=1)], currency: Literal["EUR", "USD"] = "EUR") -> str:
    """Refund an amount.

    In cents.
    """
    return f"{amount} {currency}"


def test_function_becomes_a_schema() -> None:
    """Types, constraints, defaults and the docstring of a function are in its schema."""
    spec = ToolSpec.of(refund)
    parameters = json.loads(spec.parameters_json)
    assert (spec.name, spec.description) == ("refund", "Refund an amount.\n\nIn cents.")
    assert parameters["properties"]["amount"]["minimum"] == 1
    assert parameters["properties"]["currency"]["enum"] == ["EUR", "USD"]
    assert parameters["required"] == ["amount"]


def test_openai_schema_is_read_wrapped_or_not() -> None:
    """Both forms of OpenAI's schema give the same tool."""
    body = {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    }
    assert ToolSpec.of(body) == ToolSpec.of({"type": "function", "function": body})


def test_langchain_tool_is_read() -> None:
    """A LangChain tool gives its name, description and schema."""
    spec = ToolSpec.of(langchain_tool(lookup))
    assert spec.name == "lookup"
    assert "Look an order up" in spec.description
    assert "number" in json.loads(spec.parameters_json)["properties"]


def test_injected_arguments_are_not_the_models() -> None:
    """What LangChain puts in when a tool runs is no part of its schema."""

    @langchain_tool
    def cancel(number: str, state: Annotated[dict[str, Any], InjectedToolArg]) -> str:
        """Cancel an order."""
        return number

    assert list(json.loads(ToolSpec.of(cancel).parameters_json)["properties"]) == ["number"]


@pytest.mark.parametrize(
    "odd",
    [
        3,
        {"no": "name"},
        {"name": "two words"},
        lambda *args: args,
        {"name": "f", "parameters": {"a": float("nan")}},
    ],
)
def test_what_is_no_tool_is_refused(odd: Any) -> None:
    """Something without a name or a schema raises a SegmentError."""
    with pytest.raises(SegmentError):
        ToolSpec.of(odd)


def test_function_with_parameters_that_have_no_name_is_refused() -> None:
    """Positional-only and variadic parameters cannot be given by name."""

    def variadic(*numbers: int) -> None: ...

    with pytest.raises(SegmentError, match="numbers"):
        ToolSpec.of(variadic)


def test_awkward_parameter_names_are_taken() -> None:
    """A parameter may be called like something of pydantic's, or begin with an underscore."""

    def odd(schema: str, model_config: int, _private: str = "x", copy: bool = False) -> None: ...

    assert set(json.loads(ToolSpec.of(odd).parameters_json)["properties"]) == {
        "schema",
        "model_config",
        "_private",
        "copy",
    }


def test_two_tools_of_one_name_are_refused() -> None:
    """The name is in the message."""
    with pytest.raises(SegmentError, match="'lookup' is given twice"):
        Tools([lookup, lookup])


@pytest.mark.parametrize(
    "arguments",
    [
        '{"b": 1,  "a": 2}',
        '{"x":1.50}',
        '{"x": 1e5, "y":"caf\\u00e9"}',
        "{}",
        '{"nested": {"name": "Ada", "arguments": {}}}',
        '{"html": "</tool_call>"}',
        '{"name": "not the tool"}',
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        '<tool_call>{{"name": "f", "arguments": {}}}</tool_call>',
        'Let me see.\n<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>',
        '<tool_call>{{"name": "f", "arguments": {}}}',
        '{{"name": "f", "parameters": {}}}',
        '<tool_call>{{"arguments": {}, "name": "f"}}</tool_call>',
    ],
)
def test_arguments_are_kept_byte_for_byte(arguments: str, form: str) -> None:
    """Spaces, key order, escapes and number forms of valid arguments stay as the model wrote them."""
    (call,) = parse_calls(form.format(arguments))
    assert call == ParsedCall("f", arguments, valid=True)
    assert stable_arguments(call) == arguments


@pytest.mark.parametrize(
    "arguments", ['{"a": }', "[1]", '"text"', '{"a": NaN}', "{'a': 1}", '{"a"', "[" * 100_000]
)
def test_malformed_arguments_have_a_stable_form(arguments: str) -> None:
    """Arguments that are no JSON object are invalid, and stored as an object that holds their text."""
    (call,) = parse_calls(f'<tool_call>{{"name": "f", "arguments": {arguments}</tool_call>')
    assert not call.valid
    stable = stable_arguments(call)
    assert arguments.startswith(json.loads(stable)["malformed_arguments"][: len(arguments)])


def test_several_calls_are_read_in_order() -> None:
    """Each block gives a call; text around them does not matter."""
    text = 'a<tool_call>{"name":"f","arguments":{}}</tool_call>b<tool_call>{"name":"g","parameters":{}}'
    assert [call.name for call in parse_calls(text)] == ["f", "g"]
    assert without_calls(text) == "ab"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello.",
        '{"a": 1}',
        '{"status": "x", "note": "\\"arguments\\": {}"}',
        "<tool_call></tool_call>",
        "<tool_call>x",
    ],
)
def test_plain_answer_holds_no_call(text: str) -> None:
    """Text and JSON without a name and arguments are not calls."""
    assert parse_calls(text) == ()


@given(st.text(alphabet='{}[]":,<>/tolcanmergus_ \\\n', max_size=80))
def test_any_text_is_parsed_without_an_error(text: str) -> None:
    """Whatever a model writes gives calls or none, and each has arguments that are JSON."""
    for call in parse_calls(f"<tool_call>{text}"):
        assert isinstance(json.loads(stable_arguments(call)), dict)
    assert isinstance(without_calls(text), str)
