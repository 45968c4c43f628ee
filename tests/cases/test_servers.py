"""What servers do to prompts: render them anew, drop tools, answer from another replica."""

from __future__ import annotations

import asyncio

import pytest

from agentkv import AgentKVContext, AsyncAgentKVContext, Field, Policy, ToolResult, Tools
from agentkv.backends import PromptForm, Request, Usage
from agentkv.errors import BackendConnectionError
from agentkv.huggingface import HuggingFaceTokenizer
from agentkv.inputs import IN_WORDS
from agentkv.miss import Miss
from agentkv.testing import Scripted, ScriptedBackend
from tests.cases.prompts import begins_with, call, news, only_grew, tool
from tests.templates import FAMILIES as TEMPLATES
from tests.templates import load, transformers_tokenizer

RULES = Policy("Refund within thirty days. " * 20)


def compact(name: str) -> str:
    """A call as a model writes it, with other white space than a template's."""
    return '<tool_call>\n{"name":"' + name + '","arguments":{"b":1,"a":2}}\n</tool_call>'


@pytest.mark.parametrize("form", list(PromptForm))
def test_a_call_that_the_server_writes_anew_is_named_and_token_prompts_keep_it(form: PromptForm) -> None:
    """Compared are the engine's ids; the report names the message; prompts of ids stay exact (K11)."""
    backend = ScriptedBackend([compact("lookup"), "Done.", "Bye."], tokenizer=load("qwen"), prompts=form)
    with AgentKVContext(backend, [RULES, Tools([tool("lookup")])]) as ctx:
        (made,) = ctx.ask("Look it up").tool_calls
        assert made.raw == '{"b":1,"a":2}'
        told = ctx.ledger.ids
        report = ctx.send(ToolResult(made.id, "found")).report
        assert told is not None
        assert ctx.ledger.ids is not None
        assert begins_with(ctx.ledger.ids, told) is (form is PromptForm.IDS)
        assert report.cached_tokens == report.predicted_cached_tokens
        if form is PromptForm.MESSAGES:
            assert report.miss is Miss.RENDERED
            assert report.broken_by == "message 2 (assistant)"
            assert report.predicted_cached_tokens < len(told) - 1
        else:
            assert report.miss is None
        assert ctx.report.mispredicted == 0


def test_a_server_whose_template_is_another_one_is_found_out() -> None:
    """It reads other ids than the client expects; the report names the first message that differs (K11)."""
    tokenizer = load("chatml")
    other = transformers_tokenizer(TEMPLATES["chatml"])
    other.chat_template = tokenizer._chat_template().replace("<|im_end|>", " <|im_end|>")
    served = HuggingFaceTokenizer(other)
    backend = ScriptedBackend(
        ["One.", "Two."], tokenizer=tokenizer, served=served, prompts=PromptForm.MESSAGES
    )
    with AgentKVContext(backend, [RULES]) as ctx:
        ctx.ask("Hello")
        report = ctx.ask("And now?").report
    assert report.miss is Miss.RENDERED
    assert report.broken_by.startswith("message")


def test_reasoning_that_a_template_drops_is_not_expected_to_hit() -> None:
    """The prediction reaches up to the first block that is dropped, and what is cached agrees (K26)."""
    answers = ["<think>\nHm.\n</think>\n\nOne.", "<think>\nWell.\n</think>\n\nTwo.", "Three."]
    backend = ScriptedBackend(answers, tokenizer=load("qwen"), prompts=PromptForm.MESSAGES)
    with AgentKVContext(backend, [RULES, Field("f", "a")]) as ctx:
        first = ctx.ask("Hello").report
        told = ctx.ledger.ids
        ctx.set("f", "b")
        second = ctx.ask("And now?").report
        third = ctx.ask("And then?").report
    assert told is not None
    for report in (second, third):
        assert report.cached_tokens == report.predicted_cached_tokens
        assert report.miss is Miss.RENDERED
    assert first.prompt_tokens - 1 <= second.predicted_cached_tokens < len(told) - 1


@pytest.mark.parametrize("form", list(PromptForm))
def test_a_turn_without_tools_leaves_them_in_the_prompt(form: PromptForm) -> None:
    """It is asked for in words at the tail, and a call that comes all the same is not made (K08)."""
    backend = ScriptedBackend(["Hi.", call("lookup"), "Bye."], tokenizer=load("llama"), prompts=form)
    with AgentKVContext(backend, [RULES, Tools([tool("lookup")])]) as ctx:
        ctx.ask("Hello")
        reply = ctx.ask("Look it up", tool_choice="none")
        assert reply.tool_calls == reply.refused == ()
        assert news(backend).count(IN_WORDS) == 1
        report = ctx.ask("Thanks").report
        assert news(backend).count(IN_WORDS) == 0
        assert report.cached_tokens == report.predicted_cached_tokens
    assert len({str(request.rendered_tools) for request in backend.requests}) == 1
    assert form is PromptForm.MESSAGES or only_grew(backend)


def test_branches_of_a_cold_prefix_wait_for_one_prefill() -> None:
    """All of them find the whole blocks that they share (K40)."""
    backend = ScriptedBackend(["OK."], block_size=16)
    with AgentKVContext(backend, [RULES]) as ctx:
        for index, branch in enumerate(ctx.fan_out(8)):
            with branch:
                report = branch.ask(f"{index}: go").report
            assert report.cached_tokens >= (len(RULES.text) // 16) * 16
            assert report.miss is Miss.SHARED
        cold = ctx.fan_out(2, warm=False)
        assert len(cold) == 2


class Failing(ScriptedBackend):
    """A server that fails to compute anything ahead."""

    def prefill(self, request: Request) -> Usage:
        raise BackendConnectionError("gone")


def test_a_prefill_that_fails_blocks_no_branch(caplog: pytest.LogCaptureFixture) -> None:
    """The branches are there, compute it themselves, and the log says so without the prompt (K40)."""
    backend = Failing(["OK."])
    with AgentKVContext(backend, [RULES]) as ctx:
        for branch in ctx.fan_out(2):
            with branch:
                assert branch.ask("Go").text == "OK."
    assert "was not computed ahead: gone" in caplog.text
    assert "Refund" not in caplog.text


def test_asynchronous_branches_are_warmed_with_awaited_fields() -> None:
    """A field that is awaited has its value in the beginning that is computed ahead (K40)."""

    async def main() -> None:
        backend = ScriptedBackend(["OK."])
        async with AsyncAgentKVContext(backend, [RULES]) as ctx:

            @ctx.field(label="Today")
            async def today() -> str:
                await asyncio.sleep(0)
                return "Monday"

            one, two = await ctx.fan_out(2)
            async with one, two:
                for branch in (one, two):
                    report = (await branch.ask("Go")).report
                    assert report.cached_tokens > len(RULES.text)

    asyncio.run(main())


def test_a_conversation_and_its_forks_have_one_routing_key() -> None:
    """Each has an id of its own; a router sees one key for all of them, or the one that was given (K51)."""
    backend = ScriptedBackend(["OK."])
    with AgentKVContext(backend, [RULES]) as ctx:
        ctx.ask("Hello")
        with ctx.fork() as child, child.fork() as grandchild:
            child.ask("Hello")
            grandchild.ask("Hello")
    assert len({request.conversation for request in backend.requests}) == 3
    assert len({request.routing_key for request in backend.requests}) == 1
    with AgentKVContext(backend, [RULES], routing_key="team-7") as ctx, ctx.fork() as child:
        ctx.ask("Hello")
        child.ask("Hello")
    assert [request.routing_key for request in backend.requests[-2:]] == ["team-7", "team-7"]


def test_a_prefix_that_another_replica_does_not_hold_is_no_broken_prefix() -> None:
    """The prompt only grew, so the report says where it was lost (K51)."""
    backend = ScriptedBackend([Scripted("One."), "Two."])
    with AgentKVContext(backend, [RULES]) as ctx:
        ctx.ask("Hello")
        backend.evict()
        report = ctx.ask("And now?").report
    assert report.miss is Miss.LOST
    assert "another replica" in report.miss.value
    assert only_grew(backend)
