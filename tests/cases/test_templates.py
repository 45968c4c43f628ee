"""Chat templates that refuse, drop, move or rewrite messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from agentkv import AgentKVContext, Field, Policy, Profile, Restate, ToolResult, Tools
from agentkv.encode import UPDATE_ID, encode_messages
from agentkv.entries import Carrier, Erratum, RebaseReason
from agentkv.huggingface import HuggingFaceTokenizer
from agentkv.miss import Miss
from agentkv.plan import Rebase
from agentkv.profile import GENERIC
from agentkv.render import choose_carrier
from agentkv.template import Acceptance, Reasoning, TemplateEncoder, measure
from agentkv.testing import ScriptedBackend
from agentkv.tokenizer import WireMessage
from tests.cases.prompts import begins_with, call, frozen, only_grew, tool
from tests.templates import FAMILIES, load, transformers_tokenizer

RULES = Policy("Refund within thirty days.")
THINKING = ["qwen", "harmony", "folding"]
"""Templates that drop earlier reasoning once a new user message is there."""


def tool_round(*behind: WireMessage, user: str = "Where is it?") -> list[WireMessage]:
    """A conversation in the middle of a tool round, the answer's reasoning beside its call."""
    asked = {"id": "call00001", "type": "function", "function": {"name": "lookup", "arguments": {"key": "1"}}}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": user},
        {"role": "assistant", "content": "", "reasoning_content": "Let me look.", "tool_calls": [asked]},
        {"role": "tool", "content": "on its way", "name": "lookup", "tool_call_id": "call00001"},
        *behind,
    ]


ERRATUM = "Update 1: the status is now delivered."
AS_TOOL: WireMessage = {"role": "tool", "content": ERRATUM, "name": "update", "tool_call_id": "update000"}
AS_USER: WireMessage = {"role": "user", "content": ERRATUM}


@pytest.mark.parametrize("name", THINKING)
def test_a_user_message_in_a_tool_round_would_drop_reasoning_and_a_tool_message_does_not(name: str) -> None:
    """What the template itself makes of both: the first rewrites the past (K16, K26)."""
    tokenizer = load(name)
    assert measure(tokenizer).reasoning is Reasoning.STRIPPED_ON_USER
    assert measure(tokenizer).user_in_tool_round_rewrites
    before = tokenizer.render(tool_round())
    kept = before[: before.index("on its way") + len("on its way")]
    assert "Let me look." in kept
    assert tokenizer.render(tool_round(AS_TOOL)).startswith(kept)
    assert "Let me look." not in tokenizer.render(tool_round(AS_USER))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_carrier_in_a_tool_round_never_rewrites_what_was_sent(name: str) -> None:
    """A tool message where the template takes one, else the tail of the last result (K16, K26)."""
    traits = measure(load(name))
    carrier = choose_carrier(GENERIC, traits, has_user=False, in_round=True)
    taken = traits.tool_role is Acceptance.ACCEPTED and not traits.tool_in_tool_round_rewrites
    assert carrier is (Carrier.TOOL if taken else Carrier.FOLDED_TOOL)


@pytest.mark.parametrize("name", THINKING)
def test_reasoning_of_an_unfinished_round_stays_when_an_erratum_arrives(name: str) -> None:
    """The next prompt begins with the whole one before and with all that was generated (K16, K26)."""
    answer = "<think>\nLet me look.\n</think>\n\n" + call("lookup")
    backend = ScriptedBackend([answer, "Delivered."], tokenizer=load(name))
    with AgentKVContext(backend, [RULES, Tools([tool("lookup")]), Field("status", "sent")]) as context:
        (made,) = context.ask("Where is it?").tool_calls
        sent = context.ledger.ids
        context.set("status", "delivered")
        reply = context.send(ToolResult(made.id, "on its way"))
        assert sent is not None
        assert begins_with(backend.requests[-1].ids, sent)
        assert "Let me look." in backend.prompts[-1]
        assert reply.report.erratum
        assert reply.report.cached_tokens == reply.report.predicted_cached_tokens == len(sent) - 1


def test_reuse_over_a_new_user_turn_counts_what_was_generated() -> None:
    """Reasoning of a finished turn that was sent as ids stays, and the prediction says so (K26)."""
    answer = "<think>\nLet me look.\n</think>\n\nSent."
    backend = ScriptedBackend([answer, "Yes."], tokenizer=load("qwen"))
    with AgentKVContext(backend, [RULES]) as context:
        context.ask("Where is it?")
        sent = context.ledger.ids
        assert sent is not None
        report = context.ask("Sure?").report
        assert report.cached_tokens == report.predicted_cached_tokens == len(sent) - 1


@pytest.mark.parametrize("name", FAMILIES)
def test_errata_reach_the_model_on_every_template_and_none_is_refused(name: str) -> None:
    """Each one's text stands in the very prompt it was made for, behind the system text (K18, K19)."""
    script = ["One.", call("lookup"), "Three.", "Four."]
    backend = ScriptedBackend(script, tokenizer=load(name))
    with AgentKVContext(backend, [RULES, Tools([tool("lookup")]), Field("f", "Z0Q")]) as context:
        context.ask("Question one")
        for number in (1, 2, 3):
            context.set("f", f"Z{number}Q")
            calls_open = context.ledger.state.open_calls
            if calls_open:
                reply = context.send(*(ToolResult(made.id, "here") for made in calls_open))
            else:
                reply = context.ask("Question more")
            erratum = reply.report.erratum
            assert erratum.startswith(f"Update {number}: ")
            assert erratum in backend.prompts[-1].replace("\\n", "\n")
            assert f"Z{number}Q" not in frozen(context.ledger).system
    assert context.report.epochs == 1


@pytest.mark.parametrize("name", ["strict", "gemma", "harmony", "mistral"])
def test_where_a_late_system_message_is_refused_or_dropped_none_is_sent(name: str) -> None:
    """The erratum takes another role, and is never hoisted into the first message (K18, K19)."""
    traits = measure(load(name))
    assert traits.late_system is not Acceptance.ACCEPTED
    for has_user in (True, False):
        carrier = choose_carrier(GENERIC, traits, has_user=has_user)
        assert carrier not in (Carrier.SYSTEM_BEFORE, Carrier.SYSTEM_AFTER)


def with_template(template: str) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(transformers_tokenizer(replace(FAMILIES["chatml"], template=template)))


LATE_ONLY_ALONE = """
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first and messages[0].role == 'system' %}
{{- raise_exception('twice') }}
{%- endif %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""Takes a late system message only where no other leads."""

DROPS_IN_ROUND = """
{%- for m in messages %}
{%- if not (m.role == 'system' and not loop.first and messages[loop.index0 - 1].role == 'tool') %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""Drops a system message behind a tool result without a word."""


def test_a_template_is_probed_in_the_shape_that_is_sent() -> None:
    """A probe without a leading system message would pass here, and the conversation would fail (K18)."""
    tokenizer = with_template(LATE_ONLY_ALONE)
    late: WireMessage = {"role": "system", "content": "late"}
    tokenizer.render([{"role": "user", "content": "u"}, late])
    assert measure(tokenizer).late_system is Acceptance.REFUSED
    backend = ScriptedBackend(tokenizer=tokenizer)
    with AgentKVContext(backend, [RULES, Field("f", "a")]) as context:
        context.ask("One")
        context.set("f", "b")
        assert context.ask("Two").report.erratum in backend.prompts[-1]


def test_a_place_where_a_template_drops_the_message_is_found() -> None:
    """Accepted before a user's message is not accepted behind a tool's result (K19)."""
    traits = measure(with_template(DROPS_IN_ROUND))
    assert traits.late_system is Acceptance.ACCEPTED
    assert traits.late_system_in_tool_round is Acceptance.DROPPED
    assert choose_carrier(GENERIC, traits, has_user=True) is Carrier.SYSTEM_BEFORE
    assert choose_carrier(GENERIC, traits, has_user=True, in_round=True) is not Carrier.SYSTEM_BEFORE


def test_a_template_that_moves_tools_and_policy_is_named_as_such() -> None:
    """It is measured as not prefix-stable, with the first message that moves something (K22)."""
    traits = measure(load("mistral"))
    assert not traits.append_only
    assert traits.tools_moved
    assert traits.leading_system is Acceptance.MOVED
    assert traits.breaks_at is not None
    assert "(user) changes the text" in traits.breaks_at


def test_on_a_template_that_moves_blocks_only_the_true_common_prefix_is_predicted() -> None:
    """No saving is promised that does not come; the report blames the template (K22)."""
    backend = ScriptedBackend(tokenizer=load("mistral"))
    with AgentKVContext(backend, [RULES, Tools([tool("lookup")])]) as context:
        context.ask("Question one")
        before = context.ledger.ids
        assert before is not None
        report = context.ask("Question two").report
        assert report.cached_tokens == report.predicted_cached_tokens < len(before) / 4
        assert report.miss is Miss.TEMPLATE


@pytest.mark.parametrize("restate", Restate)
def test_no_two_errata_are_the_same_text(restate: Restate) -> None:
    """A template that compares messages by their text cannot take one for another (K22)."""
    backend = ScriptedBackend()
    profile = Profile(restate=restate, snapshot_every=3)
    with AgentKVContext(backend, [RULES, Field("f", "a")], profile=profile) as context:
        context.ask("Hello")
        for value in ("b", "a", "b", "a", "b", "b"):
            context.set("f", value)
            context.ask("What is f?")
    said = [entry.text for entry in context.ledger if isinstance(entry, Erratum)]
    assert len(said) >= 5
    assert len(set(said)) == len(said)


def test_a_change_of_template_arguments_is_an_epoch_and_never_silent() -> None:
    """Its reason and what it cost are reported; the same arguments again are no change (K27)."""
    backend = ScriptedBackend()
    with AgentKVContext(backend, [RULES], template_arguments={"effort": "max"}) as context:
        context.ask("One")
        context.set_template_arguments(effort="max")
        assert context.ask("Two").report.plan == ()
        context.set_template_arguments(effort="high")
        report = context.ask("Three").report
        assert report.plan == (Rebase(RebaseReason.MODEL),)
        assert report.miss is Miss.REBASED
        assert report.cached_tokens == report.predicted_cached_tokens
        assert report.computed_tokens > report.prompt_tokens / 2


def test_switching_back_finds_the_first_epochs_ids() -> None:
    """What was sent under those arguments is sent again as it was, and hits (K27)."""
    backend = ScriptedBackend()
    with AgentKVContext(
        backend, [RULES, Tools([tool("t")])], template_arguments={"effort": "max"}
    ) as context:
        context.ask("One")
        first = context.ledger.ids
        assert first is not None
        context.set_template_arguments(effort="high")
        context.ask("Two")
        context.set_template_arguments(effort="max")
        report = context.ask("Three").report
        assert begins_with(backend.requests[-1].ids, first)
        assert report.cached_tokens == len(first) - 1
        assert report.miss is Miss.SHARED


def test_another_model_is_an_epoch_and_never_silent() -> None:
    """A record that is continued under another tokenizer is encoded anew, and the report says so (K27)."""
    backend = ScriptedBackend(tokenizer=load("chatml"))
    with AgentKVContext(backend, [RULES]) as context:
        context.ask("One")
    other = ScriptedBackend(tokenizer=load("llama"))
    with AgentKVContext.resume(other, context.ledger.to_json(), [RULES]) as resumed:
        report = resumed.ask("Two").report
    assert report.plan == (Rebase(RebaseReason.MODEL),)
    assert report.cached_tokens == 0
    assert "One" in other.prompts[0]


def user_contents(backend: ScriptedBackend, context: AgentKVContext) -> Iterator[str]:
    for message in encode_messages(context.ledger.epoch_entries(), TemplateEncoder(backend.tokenizer)):
        if message["role"] in ("user", "tool") and message.get("tool_call_id") != UPDATE_ID:
            yield str(message["content"])


@pytest.mark.parametrize("name", ["chatml", "llama", "qwen"])
def test_where_the_template_allows_it_an_erratum_is_a_message_of_its_own(name: str) -> None:
    """It is glued neither to what the user said nor to what a tool gave back (K63)."""
    backend = ScriptedBackend([call("t"), "Done.", "Yes."], tokenizer=load(name))
    with AgentKVContext(backend, [RULES, Tools([tool("t")]), Field("day", "Monday")]) as context:
        (made,) = context.ask("Run it").tool_calls
        context.set("day", "Tuesday")
        assert context.send(ToolResult(made.id, "Command finished, no output.")).report.erratum
        context.set("day", "Wednesday")
        assert context.ask("And now?").report.erratum
        assert list(user_contents(backend, context)) == ["Run it", "Command finished, no output.", "And now?"]
    assert only_grew(backend)


def test_where_only_late_system_messages_are_refused_the_erratum_is_a_user_message_of_its_own() -> None:
    """It does not share the user's message where two may stand in a row (K63)."""
    backend = ScriptedBackend(["One.", "Two."], tokenizer=load("strict"))
    with AgentKVContext(backend, [RULES, Field("day", "Monday")]) as context:
        context.ask("Hello")
        context.set("day", "Tuesday")
        erratum = context.ask("And now?").report.erratum
    assert list(user_contents(backend, context))[-2:] == [erratum, "And now?"]


def test_where_it_does_not_the_erratum_is_set_apart() -> None:
    """It begins a line of its own with its number, and an empty line parts it from the rest (K63)."""
    backend = ScriptedBackend(["One.", "Two."], tokenizer=load("gemma"))
    with AgentKVContext(backend, [RULES, Field("day", "Monday")]) as context:
        context.ask("Hello")
        context.set("day", "Tuesday")
        erratum = context.ask("And now?").report.erratum
    assert erratum.startswith("Update 1: ")
    assert list(user_contents(backend, context))[-1] == f"{erratum}\n\nAnd now?"
    assert f"{erratum}\n\nAnd now?" in backend.prompts[-1]
