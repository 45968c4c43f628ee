"""A context tells what changed, commits after success, and refuses what does not fit."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from agentkv import (
    AgentKVContext,
    Deletion,
    Field,
    Granularity,
    Inline,
    SamplingOptions,
    Skill,
    ToolResult,
    Tools,
    UserMessage,
)
from agentkv.backends.base import Capabilities, Completion, RawToolCall, Request
from agentkv.entries import Generated, Message
from agentkv.errors import (
    BackendError,
    BackendTimeoutError,
    CapabilityError,
    ConfigurationError,
    ContextBusyError,
    ContextClosedError,
    ContextError,
    FieldError,
    InputError,
    SegmentError,
    TruncationDetectedError,
    ValueRenderError,
)
from agentkv.testing import Scripted, ScriptedBackend
from tests.desk import Order, call, cancel, desk, errata, extends, lookup, new_text, reason


def test_pulled_field_is_read_each_turn() -> None:
    """A function's value is compared with what was told."""
    backend, days = ScriptedBackend(), iter(["Monday", "Monday", "Tuesday"])
    with desk(backend) as ctx:

        @ctx.field(label="Today", unit="(UTC)")
        def today() -> str:
            return next(days)

        for text in ("a", "b", "c"):
            ctx.ask(text)
    assert "- Today: Monday (UTC)" in backend.prompts[0]
    assert [e.text for e in errata(ctx.ledger)] == [
        "Update 1: the Today is no longer Monday (UTC). The Today is now Tuesday (UTC)."
    ]


def test_set_keeps_unit_and_granularity() -> None:
    """A field set by key is cut and labelled as it was declared."""
    backend = ScriptedBackend()
    with desk(
        backend,
        Field("t", datetime(2026, 1, 1, 9, 5, tzinfo=UTC), unit="o'clock", granularity=Granularity.HOUR),
    ) as ctx:
        ctx.ask("a")
        ctx.set("t", datetime(2026, 1, 1, 9, 50, tzinfo=UTC))
        assert ctx.ask("b").report.plan == ()
        ctx.set("t", datetime(2026, 1, 1, 10, 1, tzinfo=UTC))
        assert "2026-01-01 10:00+00:00 o'clock" in ctx.ask("c").report.erratum


def test_value_that_cannot_be_shown_is_refused_and_the_old_one_stays() -> None:
    """`set` raises where the mistake is made."""
    with desk(ScriptedBackend(), Field("x", 1)) as ctx:
        with pytest.raises(ValueRenderError):
            ctx.set("x", object())
        with pytest.raises(FieldError, match="fields are: x"):
            ctx.set("y", 1)
        assert ctx.prompt.fields["x"].text == "1"


def test_second_object_needs_its_own_key() -> None:
    """Two objects of a class are told apart by key and label, also inline."""
    backend = ScriptedBackend()
    with desk(backend, Order()) as ctx:
        with pytest.raises(FieldError, match="with a key of its own"):
            ctx.bind(Order())
        second = Order(status="lost")
        ctx.bind(second, key="order:7731")
        ctx.add(Skill("s", Inline("Watch {order:7731.status}.")))
        ctx.ask("a")
        with pytest.raises(SegmentError, match=r"order:7731\.status"):
            ctx.unbind("order:7731", Deletion.SOFT)
        ctx.remove("skill:s")
        ctx.unbind("order:7731", Deletion.SOFT)
        assert "no longer applies" in ctx.ask("b").report.erratum
    assert "- Order status (7731): lost" not in backend.prompts[0]
    assert "Watch lost." in backend.prompts[0]
    assert "- Estimated delivery (7731): Monday" in backend.prompts[0]


@pytest.mark.parametrize("after", [0, 1, 3])
def test_failed_call_commits_nothing_and_its_retry_says_the_same(after: int) -> None:
    """Before the first token or amid the answer: the retry sends the same bytes, with the same revision."""
    failing = Scripted("Hello", error=BackendTimeoutError("too slow"), fail_after=after)
    backend, order = ScriptedBackend(["OK", failing, "Fine"]), Order()
    with desk(backend, order) as ctx:
        ctx.ask("a")
        before = ctx.ledger
        order.status = "lost"
        with pytest.raises(BackendTimeoutError, match="too slow"):
            ctx.ask("b")
        assert ctx.ledger is before
        assert ctx.report.turns == 1
        ctx.ask("b")
        ctx.ask("c")
    assert backend.requests[1].ids == backend.requests[2].ids
    assert [entry.revision for entry in errata(ctx.ledger)] == [1]
    assert backend.prompts[-1].count("Update 1:") == 1


def test_change_between_failure_and_retry_is_told() -> None:
    """The retry compares anew: what was never told leaves no trace."""
    backend, order = ScriptedBackend(["OK", Scripted(error=BackendError("no")), "Fine"]), Order()
    with desk(backend, order) as ctx:
        ctx.ask("a")
        order.status = "lost"
        with pytest.raises(BackendError):
            ctx.ask("b")
        order.status = "in transit"
        ctx.ask("b")
    assert not errata(ctx.ledger)


def test_backend_that_ends_without_a_completion_is_an_error() -> None:
    """Nothing is recorded, and the context can be used again."""

    class Silent(ScriptedBackend):
        def stream(self, request: Request):  # type: ignore[no-untyped-def]
            yield from ()

    with desk(Silent()) as ctx:
        for _ in range(2):
            with pytest.raises(BackendError, match="without a completion"):
                ctx.ask("a")
        assert len(ctx.ledger) == 0


def test_error_behind_the_completion_does_not_undo_it() -> None:
    """A whole answer is committed once, whatever happens when the stream is closed."""

    class Late(ScriptedBackend):
        def stream(self, request: Request):  # type: ignore[no-untyped-def]
            yield from super().stream(request)
            raise BackendError("too late")

    with desk(Late(["Hello."])) as ctx:
        assert ctx.ask("a").text == "Hello."
        assert ctx.report.turns == 1


def test_truncated_prompt_is_detected_and_not_recorded() -> None:
    """A server that read fewer tokens than were sent raises; the next call works."""
    with desk(ScriptedBackend([Scripted("x", read_tokens=3), "y"])) as ctx:
        with pytest.raises(TruncationDetectedError, match="read 3"):
            ctx.ask("a")
        assert len(ctx.ledger) == 0
        assert ctx.ask("a").text == "y"


def test_call_before_and_after_the_block_is_refused() -> None:
    """A context answers between entering and leaving only, and can be entered again."""
    backend = ScriptedBackend()
    ctx = desk(backend)
    with pytest.raises(ContextClosedError):
        ctx.ask("a")
    with ctx:
        ctx.ask("a")
    with pytest.raises(ContextClosedError):
        ctx.stream("b")
    with ctx:
        ctx.ask("b")
    assert all(extends(backend))


def test_entering_twice_is_refused() -> None:
    """The inner block would close the outer one's context."""
    with desk(ScriptedBackend()) as ctx:
        with pytest.raises(ContextError, match="open already"), ctx:
            pass
        assert ctx.ask("a").text == "OK."


def test_leaving_releases_what_the_backend_keeps() -> None:
    """The backend is told to forget the conversation, also after an error."""

    class Keeping(ScriptedBackend):
        released: tuple[str, ...] = ()

        def release(self, conversation: str) -> None:
            self.released += (conversation,)

    backend = Keeping()
    with pytest.raises(RuntimeError), desk(backend, conversation="seven"):
        raise RuntimeError
    assert backend.released == ("seven",)


def test_second_call_while_one_runs_is_refused() -> None:
    """From another thread, and from within the model call itself."""
    inside, go = threading.Event(), threading.Event()

    def slow(_: Request) -> str:
        inside.set()
        go.wait(10)
        return "Hello."

    with desk(ScriptedBackend([slow, "Again."])) as ctx:
        replies: list[str] = []
        thread = threading.Thread(target=lambda: replies.append(ctx.ask("a").text))
        thread.start()
        assert inside.wait(10)
        with pytest.raises(ContextBusyError):
            ctx.ask("b")
        go.set()
        thread.join(10)
        assert replies == ["Hello."]
        assert ctx.ask("b").text == "Again."


def test_context_is_usable_after_each_kind_of_error() -> None:
    """A refused input, option or value frees the context."""
    with desk(ScriptedBackend(), Tools([lookup])) as ctx:
        wrong: list[list[Any]] = [[ToolResult("x", "y")], [], [3], [UserMessage(3)], [UserMessage("\ud800")]]  # type: ignore[arg-type]
        for bad in wrong:
            with pytest.raises(InputError):
                ctx.send(*bad)
        with pytest.raises(ConfigurationError, match="max_tokens"):
            ctx.ask("a", max_token=3)
        assert ctx.ask("a").text == "OK."


def test_capabilities_are_checked_at_entry() -> None:
    """A window too small for an answer, and tenants on a backend without salts, are refused."""
    with pytest.raises(CapabilityError, match="lower max_tokens"), desk(ScriptedBackend(context_window=100)):
        pass
    backend = ScriptedBackend()
    backend.capabilities = Capabilities("plain", 10_000, 1, salts=False)
    with pytest.raises(CapabilityError, match="'acme' could read"), desk(backend, tenant="acme"):
        pass
    with desk(backend) as ctx:
        assert ctx.ask("a").text == "OK."


def test_sampling_options_reach_the_backend() -> None:
    """Those of the context, and those of one call over them."""
    backend = ScriptedBackend()
    with desk(backend, sampling=SamplingOptions(max_tokens=5, seed=7)) as ctx:
        ctx.ask("a", temperature=0.5)
        ctx.ask("b")
    assert [request.options for request in backend.requests] == [
        SamplingOptions(max_tokens=5, seed=7, temperature=0.5),
        SamplingOptions(max_tokens=5, seed=7),
    ]


def results(ctx: AgentKVContext) -> list[tuple[str | None, str]]:
    """Return the tool results of a ledger."""
    return [(e.call_id, e.content) for e in ctx.ledger if isinstance(e, Message) and e.role == "tool"]


def test_tool_round_is_told_in_the_order_of_its_calls() -> None:
    """Results may be given in any order, with a user message among them."""
    backend = ScriptedBackend([call() + call("cancel"), "Done."])
    with desk(backend, Tools([lookup, cancel])) as ctx:
        first, second = ctx.ask("Hi").tool_calls
        assert (first.name, first.arguments, second.name) == ("lookup", {"number": "7"}, "cancel")
        ctx.send("and hurry", ToolResult(second.id, "two"), ToolResult(first.id, "one"))
    assert results(ctx) == [(first.id, "one"), (second.id, "two")]
    assert (
        new_text(backend).index("one") < new_text(backend).index("two") < new_text(backend).index("and hurry")
    )


def test_results_that_do_not_fit_are_refused_and_nothing_is_lost() -> None:
    """Missing, unknown and double results raise with names; the right ones then work."""
    backend = ScriptedBackend([call() + call("cancel"), "Done."])
    with desk(backend, Tools([lookup, cancel])) as ctx:
        first, second = ctx.ask("Hi").tool_calls
        one, two = ToolResult(first.id, "one"), ToolResult(second.id, "two")
        with pytest.raises(InputError, match=r"without a result: call00102 \(cancel\)"):
            ctx.send(one)
        with pytest.raises(InputError, match="without a result"):
            ctx.ask("never mind")
        with pytest.raises(InputError, match="'nine', which is not open; open calls: call00101, call00102"):
            ctx.send(one, two, ToolResult("nine", "x"))
        with pytest.raises(InputError, match="two results for call 'call00101'"):
            ctx.send(one, one, two)
        assert ctx.send(one, two).text == "Done."
        with pytest.raises(InputError, match="open calls: none"):
            ctx.send(one)
    assert len(backend.requests) == 2


def test_erratum_in_a_tool_round_stands_behind_all_results() -> None:
    """Nothing comes between the results of one round."""
    backend, order = ScriptedBackend([call() + call(), "Done."]), Order()
    with desk(backend, Tools([lookup]), order) as ctx:
        first, second = ctx.ask("Hi").tool_calls
        order.status = "lost"
        ctx.send(ToolResult(first.id, "result one"), ToolResult(second.id, "result two"))
    text = new_text(backend)
    assert text.index("result one") < text.index("result two") < text.index("Update 1:")
    assert all(extends(backend))


def test_removed_tool_is_refused_without_the_caller() -> None:
    """A tombstone says that it is gone; a call of it is answered by itself with the next inputs."""
    backend = ScriptedBackend(["Hi", call() + call("cancel"), "Done."])
    with desk(backend, Tools([lookup, cancel])) as ctx:
        ctx.ask("a")
        ctx.remove("tool:lookup")
        reply = ctx.ask("b")
        assert reply.report.erratum == "Update 1: the tool 'lookup' no longer applies."
        assert [c.name for c in reply.tool_calls] == ["cancel"]
        assert [r.call_id for r in reply.refused] == ["call00201"]
        ctx.send(ToolResult(reply.tool_calls[0].id, "cancelled"))
    assert results(ctx) == [
        ("call00201", "The tool 'lookup' is not available. It was not called."),
        ("call00202", "cancelled"),
    ]


def test_round_of_refused_calls_needs_no_input() -> None:
    """`send` without inputs goes on when every call was refused."""
    backend = ScriptedBackend([call(arguments='{"a": }'), "Sorry."])
    with desk(backend, Tools([lookup])) as ctx:
        reply = ctx.ask("a")
        assert not reply.tool_calls
        assert ctx.send().text == "Sorry."
    assert results(ctx) == [("call00101", "The arguments are not a JSON object. The tool was not called.")]


@pytest.mark.parametrize("arguments", ['{"b":1,   "a": "\\u00e9"}', '{"x": 1.50}'])
def test_raw_arguments_are_kept(arguments: str) -> None:
    """The text of the arguments is stored and resent as the model wrote it."""
    backend = ScriptedBackend([call(arguments=arguments), "Done."])
    with desk(backend, Tools([lookup])) as ctx:
        reply = ctx.ask("a")
        assert reply.tool_calls[0].raw == arguments
        ctx.send(ToolResult(reply.tool_calls[0].id, "x"))
    assert arguments in backend.prompts[-1]
    assert all(extends(backend))


def test_calls_that_the_server_parsed_are_checked_too() -> None:
    """Its arguments may be no JSON: such a call is refused, not handed on."""

    class Parsing(ScriptedBackend):
        def stream(self, request: Request):  # type: ignore[no-untyped-def]
            calls = (RawToolCall("a", "lookup", '{"number": '), RawToolCall("b", "lookup", '{"number": "7"}'))
            for event in super().stream(request):
                yield replace(event, tool_calls=calls) if isinstance(event, Completion) else event

    with desk(Parsing(), Tools([lookup])) as ctx:
        reply = ctx.ask("Hi")
        assert [c.id for c in reply.tool_calls] == ["b"]
        assert [r.call_id for r in reply.refused] == ["a"]
        (answer,) = [entry for entry in ctx.ledger if isinstance(entry, Generated)]
        assert answer.tool_calls[0].arguments == '{"malformed_arguments": "{\\"number\\": "}'


def test_tool_added_in_mid_conversation_can_be_called() -> None:
    """Its schema is appended, and a call of it is handed to the caller."""
    backend = ScriptedBackend(["Hi", call("cancel")])
    with desk(backend) as ctx:
        ctx.ask("a")
        ctx.add(Tools([cancel]))
        assert [c.name for c in ctx.ask("b").tool_calls] == ["cancel"]
    assert all(extends(backend))


def test_text_of_a_call_is_no_call_without_tools() -> None:
    """Where no tool was ever told, an answer in that form is text."""
    with desk(ScriptedBackend([call()])) as ctx:
        assert ctx.ask("a").tool_calls == ()
        assert ctx.ask("b").text.startswith("<tool_call>")


def test_fork_begins_with_the_parents_ids_and_never_touches_it() -> None:
    """The child's prompt extends the parent's; what either says later stays with it."""
    backend = ScriptedBackend()
    with desk(backend, Field("x", 1)) as parent:
        parent.ask("a")
        sent = backend.requests[-1].ids
        with parent.fork(Skill("role", "You are the reviewer.")) as child:
            child.set("x", 2)
            child.ask("b")
            assert backend.requests[-1].ids.common_prefix(sent) == len(sent)
            assert "You are the reviewer." in backend.prompts[-1]
            assert backend.requests[-1].conversation != backend.requests[0].conversation
        assert parent.ask("c").report.plan == ()
        assert "Update" not in new_text(backend)
        assert not errata(parent.ledger)
        assert [entry.revision for entry in errata(child.ledger)] == [1]
        assert parent.prompt.fields["x"].text == "1"


def test_summary_stands_for_what_is_left_out() -> None:
    """A rebase with a summary keeps the last user turns and drops the others."""
    backend = ScriptedBackend(["first answer", "second answer", "third answer"])
    with desk(backend) as ctx:
        ctx.ask("first question")
        ctx.ask("second question")
        ctx.rebase(summary="They said hello.", keep_last=1)
        ctx.ask("third question")
        ctx.ask("fourth question")
    for prompt in backend.prompts[2:]:
        assert "first question" not in prompt
        assert prompt.index("They said hello.") < prompt.index("second question")
        assert "second answer" in prompt


def test_summary_that_does_not_fit_is_refused() -> None:
    """Without keep_last, with a negative one, or in a tool round that would lose its calls."""
    with desk(ScriptedBackend([call(), "OK"]), Tools([lookup])) as ctx:
        ctx.ask("a")
        for summary, keep_last in (("x", None), ("x", -1), ("x", 0)):
            with pytest.raises(ConfigurationError, match="keep_last"):
                ctx.rebase(summary=summary, keep_last=keep_last)
        ctx.rebase(summary="x", keep_last=1)
        assert ctx.send(ToolResult("call00101", "found")).text == "OK"


def test_requested_rebase_survives_a_failed_call() -> None:
    """It is still asked for when the call is made again, and only once."""
    backend = ScriptedBackend(["OK", Scripted(error=BackendError("no")), "OK"])
    with desk(backend) as ctx:
        ctx.ask("a")
        ctx.rebase()
        with pytest.raises(BackendError):
            ctx.ask("b")
        assert reason(ctx.ask("b")) is not None
        assert reason(ctx.ask("c")) is None


def test_label_of_an_added_field_must_be_free() -> None:
    """Two fields of one label could not be told apart."""
    with desk(ScriptedBackend(), Field("a", 1, label="X"), Field("b", 1)) as ctx:
        with pytest.raises(FieldError, match="both labelled"):
            ctx.add(Field("c", 1, label="X"))
        with pytest.raises(FieldError, match="both labelled"):
            ctx.add(Field("b", 2, label="X"))
        ctx.add(Field("a", 2, label="X"))
        assert ctx.prompt.fields["a"].text == "2"
