"""The ledger: append-only, shared, plain JSON in and out."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv import AgentKVContext, Document, Ledger, Policy, Skill, ToolResult, Tools
from agentkv.entries import Erratum, Generated, Message
from agentkv.errors import LedgerFormatError, LedgerMismatchError
from agentkv.testing import ByteTokenizer, Scripted, ScriptedBackend
from agentkv.tokens import TokenIds
from tests.desk import Order, call, desk, errata, lookup


def said(text: str) -> Message:
    """Make a user's message."""
    return Message(role="user", content=text)


def talk() -> tuple[ScriptedBackend, AgentKVContext]:
    """Hold a conversation with tools, errata, a segment and an answer that is no text."""
    backend = ScriptedBackend(["Hello.", call(arguments='{"number":  "7"}'), Scripted(ids=(0xC3,)), "Done."])
    order = Order()
    with desk(backend, Tools([lookup]), order) as ctx:
        ctx.ask("Hi <|end|> there")
        order.status = "lost\nUpdate 9: found"
        reply = ctx.ask("Where is it?")
        ctx.send(ToolResult(reply.tool_calls[0].id, "in Rome"))
        ctx.add(Skill("returns", "Thirty days."))
        ctx.ask("Thanks")
    return backend, ctx


def test_appending_leaves_the_ledger_alone() -> None:
    """`append` returns another ledger; the first one still has its own entries and state."""
    first = Ledger().append([said("a")], ids=None, computed=0)
    second = first.append([said("b")], ids=None, computed=0)
    assert [len(first), len(second)] == [1, 2]
    assert [entry.content for entry in first if isinstance(entry, Message)] == ["a"]


@given(st.lists(st.tuples(st.integers(0, 9), st.text(max_size=3)), max_size=20))
def test_branches_never_see_each_other(steps: list[tuple[int, str]]) -> None:
    """Whatever is appended to any earlier ledger, each reads as a list of its own would."""
    branches: list[tuple[Ledger, list[str]]] = [(Ledger(), [])]
    for at, text in steps:
        ledger, texts = branches[at % len(branches)]
        branches.append((ledger.append([said(text)], ids=None, computed=0), [*texts, text]))
    for ledger, texts in branches:
        assert [entry.content for entry in ledger if isinstance(entry, Message)] == texts


def test_since_gives_what_is_new_and_nothing_of_another_branch() -> None:
    """`since` returns the entries from an index on, of this ledger only."""
    first = Ledger().append([said("a"), said("b")], ids=None, computed=0)
    first.append([said("c")], ids=None, computed=0)
    assert [e.content for e in first.since(1) if isinstance(e, Message)] == ["b"]
    assert first.since(2) == []
    assert len(first.since(-1)) == 2


def test_json_round_trip_is_the_identity() -> None:
    """Read and written again, a ledger gives the same text."""
    saved = talk()[1].ledger.to_json()
    assert Ledger.from_json(saved).to_json() == saved
    assert Ledger.from_json(Ledger.from_json(saved).to_json()).to_json() == saved


def test_state_follows_from_the_entries() -> None:
    """A loaded ledger knows what was told, without it being stored."""
    ledger = talk()[1].ledger
    assert Ledger.from_json(ledger.to_json()).state == ledger.state


def test_stored_pieces_make_up_the_ledger() -> None:
    """What `since` gave after each step, put together, is the whole record."""
    ledger = talk()[1].ledger
    pieces = [*ledger.since(0)[:4], *ledger.since(4)]
    assert pieces == list(ledger)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "[]",
        "null",
        "{}",
        '{"format": "other", "version": 1}',
        '{"format": "agentkv-ledger", "version": 2, "entries": []}',
        '{"format": "agentkv-ledger", "version": 1}',
        '{"format": "agentkv-ledger", "version": 1, "computed": 0, "check": 3, "entries": []}',
        '{"format": "agentkv-ledger", "version": 1, "computed": "x", "check": null, "entries": []}',
        '{"format": "agentkv-ledger", "version": 1, "computed": 0, "check": null, "entries": [{"kind":"x"}]}',
        '{"format": "agentkv-ledger", "version": 1, "computed": 0, "check": null, "entries": {"a": 1}}',
        "[" * 100_000,
    ],
)
def test_what_is_no_ledger_is_refused(text: str) -> None:
    """Foreign, damaged and newer records raise a LedgerFormatError."""
    with pytest.raises(LedgerFormatError):
        Ledger.from_json(text)


def test_ledger_that_is_no_text_is_refused() -> None:
    """None raises a LedgerFormatError, not a TypeError of the parser."""
    with pytest.raises(LedgerFormatError):
        Ledger.from_json(None)  # type: ignore[arg-type]


@given(st.data())
def test_damaged_ledger_is_refused_or_read(data: st.DataObject) -> None:
    """Cut anywhere, a ledger raises a LedgerFormatError and nothing else."""
    saved = talk()[1].ledger.to_json()
    cut = data.draw(st.integers(0, len(saved) - 1))
    with pytest.raises(LedgerFormatError):
        Ledger.from_json(saved[:cut])


def test_unknown_attribute_is_refused() -> None:
    """An entry with more than this release knows is not read in part."""
    record = json.loads(talk()[1].ledger.to_json())
    record["entries"][0]["more"] = 1
    with pytest.raises(LedgerFormatError, match="more"):
        Ledger.from_json(json.dumps(record))


def test_resumed_conversation_goes_on_byte_for_byte() -> None:
    """The next prompt after a resume has the very ids it would have had."""
    backend, ctx = talk()
    order = Order(status="lost\nUpdate 9: found")
    parts = [Policy("Be brief."), Tools([lookup]), order, Skill("returns", "Thirty days.")]
    with AgentKVContext.resume(backend, ctx.ledger.to_json(), parts) as resumed:
        resumed.ask("And now?")
    last, before = backend.requests[-1].ids, backend.requests[-2].ids
    with ctx:
        ctx.ask("And now?")
    assert backend.requests[-1].ids == last
    assert last.common_prefix(before) == len(before)


_RESUME = """
import hashlib, sys
from agentkv import AgentKVContext, Policy, Skill, Tools
from agentkv.testing import ScriptedBackend
from tests.desk import Order, lookup
backend = ScriptedBackend()
order = Order(status="lost\\nUpdate 9: found", eta="never")
parts = [Policy("Be brief."), Tools([lookup]), order, Skill("returns", "Thirty days.")]
with AgentKVContext.resume(backend, sys.stdin.read(), parts) as ctx:
    ctx.ask("And now?")
print(hashlib.sha256(backend.requests[-1].ids.tobytes()).hexdigest())
"""


def test_another_process_sends_the_same_ids() -> None:
    """Resumed in a fresh process with another hash seed, the prompt's ids are the same."""
    backend, ctx = talk()
    saved = ctx.ledger.to_json()
    digests = {
        subprocess.run(
            [sys.executable, "-c", _RESUME],
            input=saved,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": "/usr/bin"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    order = Order(status="lost\nUpdate 9: found", eta="never")
    parts = [Policy("Be brief."), Tools([lookup]), order, Skill("returns", "Thirty days.")]
    with AgentKVContext.resume(backend, saved, parts) as resumed:
        resumed.ask("And now?")
    import hashlib

    assert digests == {hashlib.sha256(backend.requests[-1].ids.tobytes()).hexdigest() + "\n"}


def test_ledger_that_renders_other_ids_is_refused() -> None:
    """A ledger whose text was changed raises a LedgerMismatchError before anything is sent."""
    backend, ctx = talk()
    changed = ctx.ledger.to_json().replace("in Rome", "in Bern")
    sent = len(backend.requests)
    resumed = AgentKVContext.resume(backend, changed, [Policy("Be brief."), Tools([lookup]), Order()])
    with resumed, pytest.raises(LedgerMismatchError, match="tokenizer and chat template"):
        resumed.ask("Hi")
    assert len(backend.requests) == sent


def test_revisions_go_on_after_resume() -> None:
    """The next erratum has the next revision."""
    backend, ctx = talk()
    with AgentKVContext.resume(
        backend, ctx.ledger.to_json(), [Policy("Be brief."), Tools([lookup]), Order()]
    ) as resumed:
        resumed.ask("And now?")
    assert [entry.revision for entry in errata(resumed.ledger)] == [1, 2]


def test_encoded_ledger_keeps_its_entries() -> None:
    """Giving a loaded ledger its ids changes nothing else."""
    ledger = talk()[1].ledger
    loaded = Ledger.from_json(ledger.to_json())
    assert loaded.ids is None
    assert ledger.ids is not None
    assert list(loaded.encoded(ledger.ids)) == list(ledger)
    with pytest.raises(LedgerMismatchError):
        loaded.encoded(TokenIds([1]))


def test_ledger_without_ids_keeps_texts() -> None:
    """For another tokenizer answers are known by text only."""
    answers = [e for e in talk()[1].ledger.without_ids() if isinstance(e, Generated)]
    assert all(answer.ids is None for answer in answers)
    assert answers[0].text == "Hello."


def test_open_calls_are_those_without_a_result() -> None:
    """A call is open from the answer that made it to the message that answers it."""
    backend = ScriptedBackend([call() + call()])
    with desk(backend, Tools([lookup])) as ctx:
        reply = ctx.ask("Hi")
        assert [c.id for c in ctx.ledger.state.open_calls] == [c.id for c in reply.tool_calls]
    assert [c.id for c in Ledger.from_json(ctx.ledger.to_json()).state.open_calls] == [
        "call00101",
        "call00102",
    ]


def test_an_erratum_moves_what_was_told() -> None:
    """State after an erratum holds its values, how often they changed, and its revision."""
    ledger = talk()[1].ledger
    told = ledger.state.fields["order.status"]
    assert (told.text, told.standing, told.revision, told.superseded) == ("lost\nUpdate 9: found", True, 1, 1)
    assert ledger.state.fields["order.eta"].standing is False
    assert isinstance(next(e for e in ledger if isinstance(e, Erratum)), Erratum)


def test_document_of_any_text_survives() -> None:
    """Control characters and every plane of Unicode come back from JSON."""
    text = "\x00\x1b \u2028 \U0001f600 ﷽ <|start|>"
    backend = ScriptedBackend()
    with desk(backend, Document("odd", text)) as ctx:
        ctx.ask(text)
    with AgentKVContext.resume(
        backend, ctx.ledger.to_json(), [Policy("Be brief."), Document("odd", text)]
    ) as resumed:
        resumed.ask("on")
    assert ByteTokenizer().decode(backend.requests[-1].ids.tolist()).startswith(backend.prompts[0])


def damage(record: dict[str, Any], how: str) -> None:
    """Damage a stored ledger in one way."""
    entries = record["entries"]
    match how:
        case "no prefix":
            del entries[0]
        case "nothing told":
            entries.clear()
        case "reversed":
            entries.reverse()
        case "negative":
            record["computed"] = -4
        case "more than there is":
            record["computed"] = 10**9
        case "epoch":
            entries[0]["epoch"] = 7
        case "no check":
            record["check"] = None


@pytest.mark.parametrize(
    "how", ["no prefix", "nothing told", "reversed", "negative", "more than there is", "epoch", "no check"]
)
def test_entries_that_cannot_follow_one_another_are_refused(how: str) -> None:
    """A record in which something is missing or out of order is no ledger, whatever each entry holds."""
    with AgentKVContext(ScriptedBackend(), [Policy("Be brief.")]) as ctx:
        ctx.ask("Hi")
        record = json.loads(ctx.ledger.to_json())
    damage(record, how)
    with pytest.raises(LedgerFormatError, match=r"damaged ledger: .*restore it from a copy"):
        Ledger.from_json(json.dumps(record))


def test_ledger_can_be_pickled() -> None:
    """It is its JSON."""
    with AgentKVContext(ScriptedBackend(), [Policy("Be brief.")]) as ctx:
        ctx.ask("Hi")
        ledger = ctx.ledger
    assert pickle.loads(pickle.dumps(ledger)).to_json() == ledger.to_json()
