"""What was deleted: said to hold no longer, or gone from every byte."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentkv import (
    AgentKVContext,
    Deletion,
    Document,
    Field,
    Inline,
    Ledger,
    Policy,
    Profile,
    Skill,
    ToolResult,
    Tools,
)
from agentkv.entries import RebaseReason
from agentkv.plan import Rebase
from agentkv.testing import ScriptedBackend
from tests.cases.prompts import call, gone, only_grew, tool

RULES = Policy("Refund within thirty days.")
SECRET = "sk-live-4711"


def test_a_soft_deletion_is_said_once_and_keeps_the_prefix() -> None:
    """Documents, skills, tools and fields; the text stays in the context and is disowned (K60)."""
    backend = ScriptedBackend()
    parts = [
        RULES,
        Document("d2", "A text."),
        Skill("s", "A skill."),
        Tools([tool("t")]),
        Field("limit", 100),
    ]
    with AgentKVContext(backend, parts) as context:
        context.ask("Hello")
        for key in ("document:d2", "skill:s", "tool:t", "limit"):
            context.remove(key, Deletion.SOFT)
        erratum = context.ask("And?").report.erratum
        names = ("document 'd2'", "Limit", "skill 's'", "tool 't'")
        assert sorted(erratum.splitlines()) == sorted(gone(1, name) for name in names)
        assert context.ask("So?").report.plan == ()
        assert context.report.epochs == 1
    assert only_grew(backend)


def leaks(context: AgentKVContext, secret: str = SECRET) -> list[str]:
    """Where a secret still stands: the record, what is stored, the reports and every repr."""
    ledger = context.ledger
    places: dict[str, Any] = {
        "json": ledger.to_json(),
        "entries": [repr(entry) for entry in ledger],
        "state": repr(ledger.state),
        "report": repr(context.report),
        "prompt": repr(context.prompt),
        "ids": "" if ledger.ids is None else ScriptedBackend().tokenizer.decode(ledger.ids.tolist()),
    }
    return [place for place, text in places.items() if secret in json.dumps(text)]


def test_a_hard_deletion_of_a_field_leaves_no_byte_of_it() -> None:
    """Not in the prefix, errata, messages, answers or calls, and the next prompt has another salt (K60)."""
    backend = ScriptedBackend(
        [f"Your key is {SECRET}.", call("t", json.dumps({"key": SECRET})), "Done.", "Yes."]
    )
    parts = [
        Policy(Inline("Use the key {key}.")),
        Tools([tool("t")]),
        Field("key", SECRET),
        Field("limit", 1),
    ]
    with AgentKVContext(backend, parts) as context:
        context.ask("What is my key?")
        context.set("key", SECRET + "-b")
        (made,) = context.ask(f"Is it {SECRET}?").tool_calls
        context.send(ToolResult(made.id, f"{SECRET} was used."))
        assert leaks(context)
        context.add(Policy("Use no key."))
        context.remove("key", Deletion.HARD)
        assert leaks(context) == []
        report = context.ask("And?").report
        assert report.plan == (Rebase(RebaseReason.ERASED),)
        assert leaks(context) == []
        assert SECRET not in backend.prompts[-1]
        assert "Use no key." in backend.prompts[-1]
    assert backend.requests[-1].salt not in {request.salt for request in backend.requests[:-1]}


@pytest.mark.parametrize("key", ["document:d", "skill:s"])
@pytest.mark.parametrize("late", [False, True])
def test_a_hard_deletion_of_a_text_leaves_no_byte_of_it(key: str, late: bool) -> None:
    """Whether it stood in the prefix or was appended later (K60)."""
    backend = ScriptedBackend()
    part = (
        Document("d", f"The key is {SECRET}.") if key == "document:d" else Skill("s", f"The key is {SECRET}.")
    )
    with AgentKVContext(backend, [RULES] if late else [RULES, part]) as context:
        context.ask("Hello")
        context.add(part)
        context.ask("Again")
        context.remove(key, Deletion.HARD)
        assert leaks(context) == []
        assert context.ask("And?").report.plan == (Rebase(RebaseReason.ERASED),)
        assert SECRET not in backend.prompts[-1]
        assert leaks(context) == []


def test_a_hard_deletion_reaches_the_summary_of_an_earlier_epoch() -> None:
    """A value that a summary repeated is erased with the rest (K60, K33)."""
    backend = ScriptedBackend()
    with AgentKVContext(backend, [RULES, Field("key", SECRET)]) as context:
        context.ask("Hello")
        context.rebase(summary=f"They use {SECRET}.", keep_last=0)
        context.ask("So?")
        context.remove("key", Deletion.HARD)
        assert leaks(context) == []
        context.ask("And?")
        assert SECRET not in backend.prompts[-1]
        assert leaks(context) == []


def test_a_record_that_was_erased_can_be_stored_and_resumed() -> None:
    """It opens a new epoch under the new salt, and the value does not come back (K60)."""
    backend = ScriptedBackend()
    with AgentKVContext(backend, [RULES, Field("key", SECRET)]) as context:
        context.ask("Hello")
        context.remove("key", Deletion.HARD)
        saved = context.ledger.to_json()
    with AgentKVContext.resume(backend, Ledger.from_json(saved), [RULES]) as resumed:
        assert resumed.ask("And?").report.plan == (Rebase(RebaseReason.ERASED),)
        assert SECRET not in backend.prompts[-1]
        assert resumed.ask("So?").report.plan == ()


@pytest.mark.parametrize("snapshot_every", [1, 16])
def test_an_erratum_never_repeats_the_old_value_of_a_sensitive_field(snapshot_every: int) -> None:
    """When it changes, when it goes, and when only a part of a long value changes (K60)."""
    backend = ScriptedBackend()
    long = "padding " * 400
    parts = [RULES, Field("key", SECRET, sensitive=True), Field("note", f"{long}{SECRET}", sensitive=True)]
    profile = Profile(snapshot_every=snapshot_every)
    with AgentKVContext(backend, parts, profile=profile) as context:
        context.ask("Hello")
        context.set("key", "sk-live-4712")
        context.set("note", f"{long}nothing")
        assert SECRET not in context.ask("And?").report.erratum
        context.remove("key")
        assert SECRET not in context.ask("So?").report.erratum
