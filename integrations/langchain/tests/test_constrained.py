"""A model in this process: calls are held to the tools' schemas."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import pytest
from agentkv.backends import TransformersBackend
from agentkv.backends.base import Request, SamplingOptions
from agentkv.errors import CapabilityError, ConfigurationError, MissingDependencyError
from agentkv.testing import ByteTokenizer
from agentkv.tokens import TokenIds
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from llguidance import LLMatcher
from pydantic import Field

from langchain_agentkv import ChatAgentKV
from langchain_agentkv.constrained import _grammar
from langchain_agentkv.exact import tool_schemas


@tool
def move(
    number: Annotated[str, Field(pattern="^LO-[0-9]{3}$")], town: Literal["Leeds", "York"], fast: bool
) -> str:
    """Send an order to another town."""
    return f"{number} goes to {town}"


@tool
def lookup(number: str) -> str:
    """Look an order up."""
    return number


@pytest.fixture(scope="module")
def tiny() -> TransformersBackend:
    """A model of random weights, whose tokens are bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=258,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=4096,
        eos_token_id=257,
        bos_token_id=256,
    )
    return TransformersBackend(LlamaForCausalLM(config), ByteTokenizer())


def request(choice: str | None, **options: Any) -> Request:
    tools = tool_schemas([lookup, move])
    sampling = SamplingOptions(tool_choice=choice, **options)
    return Request(TokenIds([1]), "conversation", "salt", options=sampling, tools=tools)


@pytest.mark.parametrize("choice", [None, "auto", "required", "move"])
def test_tools_make_a_sound_grammar(choice: str | None):
    """Whatever the choice, llguidance reads the grammar without a word."""
    grammar = _grammar(request(choice))
    assert grammar is not None
    assert LLMatcher.validate_grammar_with_warnings(grammar) == (False, [])


def test_a_response_format_makes_a_grammar():
    """A JSON schema, in OpenAI's form."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    grammar = _grammar(request(None, response_format=form))
    assert grammar is not None
    assert LLMatcher.validate_grammar(grammar) == ""


def test_an_unknown_response_format_is_refused():
    """The message names what there is."""
    with pytest.raises(ConfigurationError, match="give json_schema or json_object"):
        _grammar(request(None, response_format={"type": "grammar"}))


def test_without_llguidance_a_required_call_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tiny: TransformersBackend
):
    """And a call that is not required is left to the model."""
    monkeypatch.delitem(sys.modules, "langchain_agentkv.constrained", raising=False)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    chat = ChatAgentKV(backend=tiny, max_tokens=2)
    with pytest.raises(MissingDependencyError, match=r"langchain-agentkv\[constrained\]"):
        chat.bind_tools([lookup], tool_choice="any").invoke("Hello")
    assert chat.bind_tools([lookup]).invoke("Hello").usage_metadata
    with pytest.raises(MissingDependencyError, match=r"langchain-agentkv\[constrained\]"):
        ChatAgentKV(backend=tiny, max_tokens=2, constrain="always").bind_tools([lookup]).invoke("Hello")


def test_a_model_that_is_never_held_refuses_a_required_call(tiny: TransformersBackend):
    """It could not keep the promise."""
    chat = ChatAgentKV(backend=tiny, max_tokens=2, constrain="never")
    with pytest.raises(CapabilityError, match="cannot hold an answer to a tool"):
        chat.bind_tools([lookup], tool_choice="any").invoke("Hello")


def test_a_required_call_fits_its_schema_and_the_ids_go_on():
    """On the small model: pattern, choice and type hold, and the next prompt begins with the call's ids."""
    backend = TransformersBackend.from_pretrained("smollm2-135m", dtype="float32", device="cpu")
    chat = ChatAgentKV(backend=backend, max_tokens=48)
    question = HumanMessage("Send LO-123 to York.")
    answer = chat.bind_tools([lookup, move], tool_choice="move").invoke([question])
    [call] = answer.tool_calls
    assert call["name"] == "move"
    assert move.get_input_schema().model_validate(call["args"])
    result = ToolMessage("It goes to York.", tool_call_id=call["id"] or "")
    later = chat.bind_tools([lookup, move]).invoke([question, answer, result], max_tokens=4)
    first: Any = answer.usage_metadata
    second: Any = later.usage_metadata
    assert second["input_token_details"]["cache_read"] == first["total_tokens"] - 1
