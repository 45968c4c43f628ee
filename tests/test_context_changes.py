"""Changes of what is declared: all of a change is made or none of it, and it is checked where it is made."""

from __future__ import annotations

from typing import Any

import pytest

from agentkv import AgentKVContext, Costs, Deletion, Document, Field, Inline, Policy, SamplingOptions, Skill
from agentkv.backends import FinishReason
from agentkv.backends.base import Completion, Request, Usage
from agentkv.errors import ConfigurationError, ContextBusyError, FieldError, SegmentError
from agentkv.miss import Miss
from agentkv.testing import ScriptedBackend
from agentkv.tracing import TurnSpan
from tests.desk import Order, desk, new_text


def keys(ctx: AgentKVContext) -> list[str]:
    """Return the keys of the declared segments."""
    return [segment.key for segment in ctx.prompt.segments]


def test_retrieval_drops_retrieved_documents_only() -> None:
    """A document that was declared stays, also if a retrieval brings it too."""
    with desk(ScriptedBackend(), Document("manual", "m")) as ctx:
        ctx.retrieve([Document("one", "1"), Document("manual", "m")])
        ctx.retrieve([Document("two", "2")])
        assert keys(ctx) == ["policy:policy", "document:manual", "document:two"]
        with ctx.fork() as child:
            child.retrieve([])
            assert keys(child) == ["policy:policy", "document:manual"]
        ctx.add(Document("two", "declared"))
        ctx.retrieve([])
        assert keys(ctx) == ["policy:policy", "document:manual", "document:two"]


def test_removed_document_can_be_retrieved_again() -> None:
    """It is a retrieved one as before."""
    with desk(ScriptedBackend()) as ctx:
        ctx.retrieve([Document("one", "1")])
        ctx.remove("document:one")
        ctx.retrieve([Document("one", "1")])
        ctx.retrieve([])
        assert keys(ctx) == ["policy:policy"]


def test_unbinding_skips_fields_that_were_removed_before() -> None:
    """The others go, the object is no longer bound, and nothing of it is left with a hard deletion."""
    backend = ScriptedBackend()
    with desk(backend, Order(status="lost")) as ctx:
        ctx.ask("a")
        ctx.remove("order.status")
        ctx.unbind("order", "hard")
        assert not ctx.prompt.fields
        with pytest.raises(FieldError, match="no object is bound"):
            ctx.unbind("order")
        assert "lost" not in ctx.ledger.to_json()
        ctx.bind(Order())
        ctx.ask("b")
    assert "lost" not in backend.prompts[-1]


@pytest.mark.parametrize("refused", ["shown", "busy"])
def test_unbinding_that_is_refused_changes_nothing(refused: str) -> None:
    """A segment shows a field, or a hard deletion meets a running call: the object stays bound as a whole."""
    order = Order()
    shown = [Skill("s", Inline("Watch {order.eta}."))] if refused == "shown" else []
    with desk(ScriptedBackend(), order, *shown) as ctx:
        ctx.ask("a")
        with ctx.stream("b") as stream:
            next(stream)
            with pytest.raises(SegmentError if refused == "shown" else ContextBusyError):
                ctx.unbind("order", Deletion.SOFT if refused == "shown" else Deletion.HARD)
        assert list(ctx.prompt.fields) == ["order.status", "order.eta"]
        order.status = "lost"
        assert "lost" in ctx.ask("b").report.erratum


def test_field_that_a_segment_shows_cannot_be_removed() -> None:
    """It raises where the mistake is made, and a hard deletion erases nothing."""
    with desk(ScriptedBackend(), Skill("s", Inline("Watch {x}.")), Field("x", "tulip")) as ctx:
        ctx.ask("a")
        before = ctx.ledger
        for how in (None, Deletion.HARD):
            with pytest.raises(SegmentError, match="skill:s shows field 'x'"):
                ctx.remove("x", how)
        assert ctx.ledger is before
        assert ctx.ask("b").report.plan == ()
        ctx.remove("skill:s")
        ctx.remove("x")
        assert ctx.ask("c").report.erratum


def test_added_segment_shows_declared_fields_only() -> None:
    """Otherwise it is refused and nothing is added; a fork takes segment and field in any order."""
    with desk(ScriptedBackend()) as ctx:
        skill = Skill("s", Inline("Watch {x}."))
        with pytest.raises(SegmentError, match="shows field 'x'"):
            ctx.add(skill)
        with pytest.raises(SegmentError, match="shows field 'x'"):
            ctx.retrieve([Document("d", "fine"), Document("e", Inline("{x}"))])
        assert keys(ctx) == ["policy:policy"]
        assert keys(ctx.fork(skill, Field("x", 1))) == ["policy:policy", "skill:s"]


def test_fields_of_a_prompt_that_is_not_yet_whole_are_added_one_by_one() -> None:
    """A segment may be declared before the fields that it shows; entering checks that all are there."""
    backend = ScriptedBackend()
    ctx = AgentKVContext(backend, [Policy(Inline("You serve {a} and {b}."))])
    ctx.add(Field("a", "Ann"))
    with pytest.raises(SegmentError, match="'b'"), ctx:
        pass
    ctx.add(Field("b", "Bo"))
    with ctx:
        ctx.ask("a")
    assert "You serve Ann and Bo." in backend.prompts[0]


@pytest.mark.parametrize("how", ["remove", "unbind"])
def test_deletion_can_be_named_by_its_text(how: str) -> None:
    """A name that is not known is refused with those that are, and nothing is changed."""
    with desk(ScriptedBackend(), Order(status="tulip")) as ctx:
        ctx.ask("a")
        key = "order.status" if how == "remove" else "order"
        with pytest.raises(ConfigurationError, match="'gone' is unknown; use one of dormant, soft"):
            getattr(ctx, how)(key, "gone")
        assert len(ctx.prompt.fields) == 2
        getattr(ctx, how)(key, "hard")
        assert "tulip" not in ctx.ledger.to_json()


def test_prompt_calls_no_function() -> None:
    """It shows what the last turn read; before the first turn that is what was declared."""
    calls: list[str] = []
    backend = ScriptedBackend()
    with desk(backend, Order(), Field("x", 1)) as ctx:

        @ctx.field(label="Today")
        def today() -> str:
            calls.append("today")
            return "Monday"

        assert [ctx.prompt.fields[key].text for key in ("today", "x")] == ["none", "1"]
        assert not calls
        ctx.set("order.status", "lost")
        assert ctx.prompt.fields["order.status"].text == "lost"
        ctx.ask("a")
        assert ctx.prompt.fields["today"].text == "Monday"
        assert calls == ["today"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"salt_key": b"short"}, "salt key is 5 bytes"),
        ({"salt_key": "x" * 20}, "salt key is a str"),
        ({"tenant": ""}, "tenant is empty"),
        ({"tenant": 7}, "tenant is a int"),
    ],
)
def test_salt_key_and_tenant_are_checked_at_construction(options: dict[str, Any], message: str) -> None:
    """Not with the first call."""
    with pytest.raises(ConfigurationError, match=message):
        AgentKVContext(ScriptedBackend(), [], **options)


@pytest.mark.parametrize(
    "option",
    [
        {"max_tokens": 0}, {"max_tokens": 2.5}, {"max_tokens": True}, {"max_tokens": "9"},
        {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": "hot"}, {"temperature": None},
        {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"top_k": 1.0},
        {"repetition_penalty": 0}, {"repetition_penalty": float("inf")},
        {"seed": 1.5}, {"seed": "one"}, {"stop": "end"}, {"stop": ("",)}, {"stop": (3,)},
    ],
)  # fmt: skip
def test_sampling_options_are_checked_where_they_are_given(option: dict[str, Any]) -> None:
    """For a context or one call, on any backend: the message names the option and nothing is sent."""
    (name,) = option
    with pytest.raises(ConfigurationError, match=f"option {name}="):
        SamplingOptions(**option)
    backend = ScriptedBackend()
    with desk(backend) as ctx:
        with pytest.raises(ConfigurationError, match=f"option {name}="):
            ctx.ask("a", **option)
        assert not backend.requests
        ctx.ask("a", temperature=1, top_p=0.5, seed=7, stop=["end"])
    assert backend.requests[0].options.stop == ("end",)


def test_kept_stream_says_that_it_was_stopped() -> None:
    """Its finish reason is none of the model's."""
    with desk(ScriptedBackend(["Hello."])) as ctx:
        stream = ctx.stream("a")
        next(stream)
        assert stream.keep().finish_reason is FinishReason.STOPPED
        assert ctx.report.mispredicted == 0


def test_what_others_put_into_the_cache_is_no_wrong_prediction() -> None:
    """A turn that finds more than was predicted is named, and not counted."""
    backend = ScriptedBackend()
    with desk(backend) as ctx:
        ctx.ask("a")
    with desk(backend) as second:
        assert second.ask("a").report.miss is Miss.SHARED
        assert second.report.mispredicted == 0


def test_measured_costs_can_be_handed_on() -> None:
    """Another context begins with what the first one measured."""

    class Timed(ScriptedBackend):
        def stream(self, request: Request):  # type: ignore[no-untyped-def]
            length = len(request.ids)
            yield Completion("Hi", None, FinishReason.STOP, Usage(length, 0, length, 0, 3), 1.0, 2.0)

    with desk(Timed()) as ctx:
        assert ctx.costs == Costs()
        ctx.ask("a")
        assert ctx.costs.calls == 1
    with desk(Timed(), costs=ctx.costs) as second:
        second.ask("a")
        assert second.costs.calls == 2


def test_call_that_the_backend_refuses_at_once_ends_its_span() -> None:
    """A backend may raise before it streams: nothing stays open, and the context is free."""
    dropped: list[str] = []
    original = TurnSpan.drop

    def drop(span: TurnSpan, why: str) -> None:
        dropped.append(why)
        original(span, why)

    class Refusing(ScriptedBackend):
        refuses = True

        def stream(self, request: Request):  # type: ignore[no-untyped-def]
            if self.refuses:
                raise ConfigurationError("no")
            return super().stream(request)

    backend = Refusing()
    with pytest.MonkeyPatch.context() as patch, desk(backend) as ctx:
        patch.setattr(TurnSpan, "drop", drop)
        with pytest.raises(ConfigurationError, match="no"):
            ctx.ask("a")
        assert dropped == ["stopped or failed"]
        backend.refuses = False
        assert ctx.ask("a").text == "OK."


def test_forks_share_a_bound_object_and_not_what_is_set() -> None:
    """What is true of the object is told in both; a field set by key is told where it is set."""
    backend, order = ScriptedBackend(), Order()
    with desk(backend, order, Field("x", 1)) as ctx:
        ctx.ask("a")
        with ctx.fork() as child:
            child.set("order.status", "lost")
            child.set("x", 2)
            assert "lost" in child.ask("b").report.erratum
        assert order.status == "lost"
        erratum = ctx.ask("c").report.erratum
        assert "lost" in erratum
        assert "2" not in erratum.replace("Update 1", "")
    assert "Update 2" not in new_text(backend)
