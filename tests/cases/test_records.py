"""What was told stays told: errata keep their place and bytes in the record."""

from __future__ import annotations

import pytest

from agentkv import AgentKVContext, Document, Field, Ledger, Policy, Tools
from agentkv.encode import Encoding, choose_encoding, encode_ids, render_ids
from agentkv.entries import Erratum, Generated
from agentkv.inputs import ToolResult
from agentkv.template import TemplateEncoder
from agentkv.testing import ScriptedBackend
from tests.cases.prompts import call, tool
from tests.templates import FAMILIES, load


def conversation(name: str) -> tuple[ScriptedBackend, AgentKVContext]:
    """Five turns with a field that changes thrice, a tool round and a document that comes late."""
    backend = ScriptedBackend(["One.", "Two.", call("t"), "Three.", "Four."], tokenizer=load(name))
    tools = Tools([tool("t")])
    with AgentKVContext(backend, [Policy("Be brief."), tools, Field("f", "a"), Field("g", "x")]) as context:
        context.ask("Question one")
        context.set("f", "b")
        context.ask("Question two")
        context.set("f", "c")
        (made,) = context.ask("Question three").tool_calls
        context.set("f", "d")
        context.send(ToolResult(made.id, "the result"))
        context.add(Document("late", "A late text."))
        context.ask("Question five")
    return backend, context


@pytest.mark.parametrize("name", FAMILIES)
def test_the_stored_record_reproduces_every_prompt_that_was_sent(name: str) -> None:
    """Each prompt of the conversation is made again, id for id, from the loaded record alone (K14)."""
    backend, context = conversation(name)
    entries = list(Ledger.from_json(context.ledger.to_json()))
    encoder = TemplateEncoder(load(name))
    turns = [at for at, entry in enumerate(entries) if isinstance(entry, Generated)]
    assert len(turns) == len(backend.requests) == 5
    for at, request in zip(turns, backend.requests, strict=True):
        before = Ledger().append(entries[:at], ids=None, computed=0)
        made = render_ids if choose_encoding(encoder) is Encoding.MESSAGES else encode_ids
        assert made(before.epoch_entries(), encoder) == request.ids


@pytest.mark.parametrize("name", FAMILIES)
def test_a_resumed_conversation_goes_on_where_it_was(name: str) -> None:
    """Its next prompt is the one that the first would have sent, and it says nothing twice (K14)."""
    backend, context = conversation(name)
    parts = [
        Policy("Be brief."),
        Tools([tool("t")]),
        Field("f", "d"),
        Field("g", "x"),
        Document("late", "A late text."),
    ]
    with AgentKVContext.resume(backend, context.ledger.to_json(), parts) as resumed, context:
        assert resumed.ask("Question six").report.plan == ()
        context.ask("Question six")
    assert backend.requests[-1].ids == backend.requests[-2].ids


def test_errata_stay_when_their_turn_becomes_history() -> None:
    """No reminder is moved to the newest message: each stands where it was said (K14)."""
    backend, context = conversation("chatml")
    last = backend.prompts[-1]
    said = [entry.text for entry in context.ledger if isinstance(entry, Erratum)]
    assert len(said) == 3
    questions = ["Question two", "Question three", "Question five"]
    assert [last.count(text) for text in said] == [1, 1, 1]
    assert last.index(said[0]) < last.index(questions[0]) < last.index(said[1]) < last.index(questions[1])
    assert last.index("the result") < last.index(said[2]) < last.index(questions[2])
