"""Tools that come and go, and calls as the model wrote them."""

from __future__ import annotations

import json

import pytest

from agentkv import (
    AgentKVContext,
    Costs,
    Field,
    Ledger,
    Policy,
    Prompt,
    ToolResult,
    Tools,
    UserMessage,
    begin,
    finish,
)
from agentkv.backends.base import Completion, FinishReason, RawToolCall, Usage
from agentkv.encode import encode_messages
from agentkv.entries import Erratum, SegmentAdded
from agentkv.template import TemplateEncoder
from agentkv.testing import ScriptedBackend
from agentkv.traits import ModelTraits
from tests.cases.prompts import begins_with, call, frozen, gone, news, only_grew, tool
from tests.templates import load

RULES = Policy("Use the tools. " * 10)


def test_a_tool_that_is_found_late_and_one_that_vanishes_leave_the_prefix_alone() -> None:
    """The late one is appended and can be called; a call of the vanished one is refused, not made (K06)."""
    backend = ScriptedBackend(["One.", "Two.", call("t9"), "Nine it is.", "Five.", call("t2"), "Sorry."])
    with AgentKVContext(backend, [RULES, Tools([tool("t1"), tool("t2")])]) as context:
        context.ask("One")
        system, tools = frozen(context.ledger).system, backend.requests[0].rendered_tools
        context.ask("Two")
        context.add(Tools([tool("t9", "Counts to nine.")]))
        (made,) = context.ask("Three").tool_calls
        assert made.name == "t9"
        assert news(backend).count("Counts to nine.") == 1
        context.send(ToolResult(made.id, "9"))
        context.remove("tool:t2")
        assert context.ask("Five").report.erratum == gone(1, "tool 't2'")
        reply = context.ask("Six")
        assert reply.tool_calls == ()
        (refused,) = reply.refused
        assert refused.content == "The tool 't2' is not available. It was not called."
        context.ask("Seven")
        assert refused.content in news(backend)
        assert frozen(context.ledger).system == system
        assert all(request.rendered_tools == tools for request in backend.requests)
    assert only_grew(backend)


@pytest.mark.parametrize("name", ["chatml", "llama", "qwen", "gemma", "strict", "phi"])
def test_tools_come_and_go_on_any_template(name: str) -> None:
    """Whether the template writes tools itself or agentkv does, what was sent only grows (K06)."""
    backend = ScriptedBackend(["One.", "Two.", "Three."], tokenizer=load(name))
    with AgentKVContext(backend, [RULES, Tools([tool("first"), tool("second")])]) as context:
        context.ask("One")
        context.add(Tools([tool("late", "Came later.")]))
        context.ask("Two")
        assert "Came later." in news(backend)
        context.remove("tool:second")
        context.ask("Three")
        assert gone(1, "tool 'second'") in news(backend)
    assert only_grew(backend)


def test_a_tool_whose_schema_changed_is_told_anew() -> None:
    """And one that was withdrawn and comes back, too (K06)."""
    backend = ScriptedBackend()
    with AgentKVContext(backend, [RULES, Tools([tool("t", "Old text.")])]) as context:
        context.ask("One")
        context.add(Tools([tool("t", "New text.")]))
        context.ask("Two")
        assert "New text." in news(backend)
        context.remove("tool:t")
        context.ask("Three")
        context.add(Tools([tool("t", "New text.")]))
        context.ask("Four")
        assert "New text." in news(backend)
    assert only_grew(backend)


def test_a_switch_of_the_toolset_is_told_before_the_next_call() -> None:
    """From planning to building: what is gone and what is new, computed from the registries (K07)."""
    backend = ScriptedBackend(["Planned.", "Still planning.", "Building."])
    with AgentKVContext(backend, [RULES, Tools([tool("read"), tool("write_plan")])]) as context:
        context.ask("Plan")
        context.ask("More")
        context.add(Tools([tool("edit"), tool("read")]))
        context.remove("tool:write_plan")
        context.ask("Build")
        said = news(backend)
        assert said.index("write_plan") < said.index("Build")
        assert said.index('"edit"') < said.index("Build")
        assert '"read"' not in said
        assert [type(entry) for entry in list(context.ledger)[-4:-2]] == [SegmentAdded, Erratum]


def test_the_same_toolset_again_says_nothing() -> None:
    """Another order, new schema objects: no notice (K07)."""
    backend = ScriptedBackend()
    with AgentKVContext(backend, [RULES, Tools([tool("a"), tool("b")])]) as context:
        context.ask("One")
        context.add(Tools([tool("b"), tool("a")]))
        assert context.ask("Two").report.plan == ()


def test_a_toolset_can_change_within_a_round_of_calls() -> None:
    """The notice follows the results that are awaited, and comes before the next model call (K07)."""
    backend = ScriptedBackend([call("a"), "Done."])
    with AgentKVContext(backend, [RULES, Tools([tool("a"), tool("b")])]) as context:
        (made,) = context.ask("Go").tool_calls
        context.remove("tool:b")
        context.send(ToolResult(made.id, "result of a"))
        said = news(backend)
        assert said.index("result of a") < said.index(gone(1, "tool 'b'"))
    assert only_grew(backend)


ODD = [
    '{"path": "f", "edits": []}',
    '{"path":"f","edits":[]}',
    '{ "edits" : [ ] ,\n "path" : "f" }',
    '{"b":1.0,"a":1e3,"é":"\\u00e9"}',
]


@pytest.mark.parametrize("arguments", ODD)
def test_arguments_are_kept_as_the_model_wrote_them(arguments: str) -> None:
    """Key order, white space, number forms and escapes stay, in the prompt and in the record (K10)."""
    backend = ScriptedBackend([call("t", arguments), "Done."])
    with AgentKVContext(backend, [RULES, Tools([tool("t")])]) as context:
        (made,) = context.ask("Go").tool_calls
        before = context.ledger.ids
        assert before is not None
        assert made.raw == arguments
        assert made.arguments == json.loads(arguments)
        made.arguments["extra"] = 1  # what a framework does to its own copy reaches nothing
        context.send(ToolResult(made.id, "done"))
        assert begins_with(backend.requests[-1].ids, before)
        assert arguments in backend.prompts[-1]
        stored = Ledger.from_json(context.ledger.to_json())
        kept = [c.arguments for e in stored for c in getattr(e, "tool_calls", ())]
        assert kept == [arguments]


def served(calls: tuple[RawToolCall, ...], prompt_tokens: int) -> Completion:
    """An answer whose calls the server parsed."""
    usage = Usage(prompt_tokens, cached_tokens=0, computed_tokens=prompt_tokens, generated_tokens=1)
    return Completion("", None, FinishReason.TOOL_CALLS, usage, 0.0, 0.0, tool_calls=calls)


@pytest.mark.parametrize("arguments", ODD)
def test_arguments_that_a_server_parsed_are_kept_too(arguments: str) -> None:
    """The string it gave is the one that is recorded (K10)."""
    backend = ScriptedBackend()
    traits = ModelTraits(backend.tokenizer, backend.capabilities)
    prompt = Prompt.of([RULES, Tools([tool("t")])])
    pending = begin(prompt, [UserMessage("Go")], Ledger(), traits, Costs())
    ledger, _ = finish(pending, served((RawToolCall("c1", "t", arguments),), len(pending.ids)))
    (kept,) = ledger.state.open_calls
    assert kept.arguments == arguments


def test_state_that_agentkv_renders_is_sorted() -> None:
    """A dict that was filled in another order is the same value (K10)."""
    assert Field("f", {"b": 1, "a": 2}).text == Field("f", {"a": 2, "b": 1}).text == '{"a":2,"b":1}'


CUT = ['{"value": ', '{"value": "x', "[1, 2", "", '{"a": NaN}', "[1]", '"text"', "{'a': 1}"]


@pytest.mark.parametrize("arguments", CUT)
def test_a_malformed_call_is_replaced_once_and_answered(arguments: str) -> None:
    """What was cut by the limit stays usable: refused, recorded as JSON, and never changed again (K12)."""
    text = f'<tool_call>{{"name": "t", "arguments": {arguments}'
    backend = ScriptedBackend([text, "Sorry.", "Going on."])
    encoder = TemplateEncoder(backend.tokenizer)
    with AgentKVContext(backend, [RULES, Tools([tool("t")])]) as context:
        reply = context.ask("Go")
        assert reply.tool_calls == ()
        assert [result.content for result in reply.refused] == [
            "The arguments are not a JSON object. The tool was not called."
        ]
        (kept,) = context.ledger.state.open_calls
        first = encode_messages(context.ledger.epoch_entries(), encoder)
        for question in ("Again", "And again"):
            before = context.ledger.ids
            assert before is not None
            context.ask(question)
            assert begins_with(backend.requests[-1].ids, before)
            now = encode_messages(context.ledger.epoch_entries(), encoder)
            assert now[: len(first)] == first
            first = now
        assert kept.valid is False
        assert isinstance(json.loads(kept.arguments), dict)
        resumed = Ledger.from_json(context.ledger.to_json())
        assert encode_messages(resumed.epoch_entries(), encoder) == first


@pytest.mark.parametrize("arguments", CUT)
def test_a_malformed_call_that_a_server_parsed_is_replaced_too(arguments: str) -> None:
    """Every later request carries a JSON object, which no server refuses (K12)."""
    backend = ScriptedBackend()
    traits = ModelTraits(backend.tokenizer, backend.capabilities)
    prompt = Prompt.of([RULES, Tools([tool("t")])])
    pending = begin(prompt, [UserMessage("Go")], Ledger(), traits, Costs())
    ledger, _ = finish(pending, served((RawToolCall("c1", "t", arguments),), len(pending.ids)))
    result = begin(prompt, [ToolResult("c1", "Malformed.")], ledger, traits, Costs())
    assert ledger.ids is not None
    assert begins_with(result.ids, ledger.ids)
    (kept,) = ledger.state.open_calls
    assert json.loads(kept.arguments) == {"malformed_arguments": arguments}
