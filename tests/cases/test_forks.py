"""Sub-agents that go on from a parent's prompt."""

from __future__ import annotations

from agentkv import AgentKVContext, Document, Field, Policy, Skill, Tools, mutable, mutable_fields
from agentkv.entries import RebaseReason
from agentkv.miss import Miss
from agentkv.plan import Rebase
from agentkv.testing import ScriptedBackend
from tests.cases.prompts import begins_with, call, frozen, news, tool

RULES = Policy("Refund within thirty days. " * 20)
ROLES = [Skill("role", f"You are sub-agent {letter}.") for letter in "ABC"]


def parent(backend: ScriptedBackend) -> AgentKVContext:
    """A parent that has said something."""
    parts = [RULES, Tools([tool("lookup")]), Field("f", "a")]
    context = AgentKVContext(backend, parts, template_arguments={"effort": "max"})
    with context:
        context.ask("Plan the work.")
    return context


def test_children_go_on_from_the_parents_ids_and_their_roles_come_last() -> None:
    """Same system text, tools and template arguments; all of it hits (K39)."""
    backend = ScriptedBackend()
    first = parent(backend)
    base = first.ledger.ids
    assert base is not None
    for role in ROLES:
        with first.fork(role) as child:
            report = child.ask("Begin.").report
            request = backend.requests[-1]
            assert begins_with(request.ids, base)
            assert backend.tokenizer.decode(request.ids.tolist(len(base))).count(str(role.text)) == 1
            assert frozen(child.ledger) == frozen(first.ledger)
            assert request.tools == backend.requests[0].tools
            assert request.salt == backend.requests[0].salt
            assert report.cached_tokens >= report.predicted_cached_tokens == len(base) - 1


def test_what_a_child_says_reaches_neither_parent_nor_siblings() -> None:
    """Their errata and documents are their own, and so is their conversation (K39)."""
    backend = ScriptedBackend()
    first = parent(backend)
    one, two = first.fork(ROLES[0]), first.fork(ROLES[1])
    with one, two, first:
        one.set("f", "b")
        one.add(Document("found", "Only one knows this."))
        assert one.ask("Go").report.erratum
        assert two.ask("Go").report.erratum == ""
        assert first.ask("Go").report.plan == ()
        assert not any("Only one knows this." in prompt for prompt in backend.prompts[-2:])
        assert len({request.conversation for request in backend.requests[-3:]}) == 3


def test_a_shared_object_tells_every_branch() -> None:
    """An object that all of them show is one truth (K39, K52)."""

    @mutable_fields
    class Order:
        status: str = mutable(label="Status")

    order, backend = Order("sent"), ScriptedBackend()
    with AgentKVContext(backend, [RULES, order]) as first:
        first.ask("Hello")
        with first.fork() as child:
            order.status = "delivered"
            for context in (first, child):
                assert "now delivered" in context.ask("And?").report.erratum


def test_a_child_with_other_template_arguments_is_reported_as_a_new_epoch() -> None:
    """Another level of reasoning changes the beginning: never a silent miss (K39)."""
    backend = ScriptedBackend()
    with parent(backend).fork(ROLES[0]) as child:
        child.set_template_arguments(effort="low")
        report = child.ask("Begin.").report
    assert report.plan == (Rebase(RebaseReason.MODEL),)
    assert report.miss is Miss.REBASED
    assert report.cached_tokens < report.prompt_tokens / 10


def test_a_child_on_another_backend_starts_cold_and_says_so() -> None:
    """The parent's record under another model is encoded anew (K39)."""
    from tests.templates import load

    first = parent(ScriptedBackend())
    other = ScriptedBackend(tokenizer=load("qwen"))
    parts = [RULES, Tools([tool("lookup")]), Field("f", "a")]
    with AgentKVContext.resume(other, first.ledger, parts, template_arguments={"effort": "max"}) as child:
        report = child.ask("Begin.").report
    assert report.plan == (Rebase(RebaseReason.MODEL),)
    assert report.cached_tokens == 0


def test_a_child_with_one_tool_more_keeps_the_prefix() -> None:
    """Its tool is appended, so that it starts as warm as the others (K39)."""
    backend = ScriptedBackend()
    first = parent(backend)
    base = first.ledger.ids
    assert base is not None
    with first.fork() as child:
        child.add(Tools([tool("search", "Searches the web.")]))
        child.ask("Begin.")
    assert begins_with(backend.requests[-1].ids, base)
    assert "Searches the web." in news(backend)


def test_a_fork_inside_a_tool_round_takes_the_open_call_along() -> None:
    """Both branches can answer it (K39)."""
    from agentkv import ToolResult

    backend = ScriptedBackend([call("lookup"), "Parent.", "Child."])
    with AgentKVContext(backend, [RULES, Tools([tool("lookup")])]) as first:
        (made,) = first.ask("Go").tool_calls
        with first.fork() as child:
            assert first.send(ToolResult(made.id, "for the parent")).text == "Parent."
            assert child.send(ToolResult(made.id, "for the child")).text == "Child."
    assert "for the parent" not in backend.prompts[-1]
