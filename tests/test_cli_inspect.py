"""``agentkv inspect`` on ledgers that real conversations left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentkv import ToolResult
from agentkv.cli import main
from agentkv.errors import LedgerError, LedgerFormatError
from agentkv.ledger import Ledger
from agentkv.segments import Deletion, Field, Skill, Tools
from agentkv.testing import ScriptedBackend
from tests.desk import Order, call, desk, lookup

SECRET = "9 Orchard Street"


def written(folder: Path, ledger: Ledger) -> str:
    """Store a ledger and return its file."""
    file = folder / "ledger.json"
    file.write_text(ledger.to_json(), encoding="utf-8")
    return str(file)


@pytest.fixture
def stored(tmp_path: Path) -> str:
    """A conversation of five turns: two errata, a removed skill, a tool call and a rebase."""
    order = Order()
    backend = ScriptedBackend(["One.", "Two.", call(), "Four.", "Five."])
    with desk(backend, Skill("returns", "Take it back."), Tools([lookup]), order) as context:
        context.add(Field("address", SECRET, label="Address"))
        context.ask("Hello")
        order.status = "delivered"
        context.ask("And now?")
        context.remove("skill:returns")
        (made,) = context.ask("Look it up.").tool_calls
        context.send(ToolResult(made.id, "a result"))
        context.remove("address", Deletion.SOFT)
        context.rebase()
        context.ask("Go on.")
        return written(tmp_path, context.ledger)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run the command in this process and return what it printed."""
    main.app(["inspect", *words], standalone_mode=False)
    return capsys.readouterr().out


def test_epochs_turns_and_errata_are_shown(stored: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each table is there, with reasons, numbers and keys."""
    out = run(capsys, stored)
    assert "5 turns, 2 epochs, last erratum 2" in out
    assert "first turn" in out
    assert "requested" in out
    assert "order.status = …" in out
    assert "skill:returns = (no longer applies)" in out
    assert "system message before the user's" in out
    assert [line for line in out.splitlines() if line.rstrip().endswith("lookup")]


def test_values_are_hidden(stored: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a value nor a message stands in the output, as tables or as JSON."""
    for words in ((stored,), (stored, "--json")):
        out = run(capsys, *words)
        for text in (SECRET, "delivered", "in transit", "And now?", "Take it back.", "a result", "Five."):
            assert text not in out


def test_values_are_shown_when_asked_for(stored: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With --values the last told value and what each erratum said stand in the output."""
    out = run(capsys, stored, "--values")
    assert "order.status = delivered" in out
    assert [line.split() for line in out.splitlines() if line.startswith("order.eta")] == [
        ["order.eta", "Monday", "the", "prefix", "0"]
    ]


def test_what_was_last_told_names_its_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A field told by an erratum says by which, and how many earlier values stand in the context."""
    order = Order()
    with desk(ScriptedBackend(), order) as context:
        for status in ("in transit", "held", "delivered"):
            order.status = status
            context.ask("Hm")
        found = json.loads(run(capsys, written(tmp_path, context.ledger), "--json", "--values"))
    assert found["fields"] == [
        {"key": "order.status", "value": "delivered", "told_by": "erratum 2", "superseded": 2},
        {"key": "order.eta", "value": "Monday", "told_by": "the prefix", "superseded": 0},
    ]


def test_json_holds_counts_that_fit_the_conversation(stored: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Turns carry their prompt's and answer's tokens, and what was said before the answer."""
    found = json.loads(run(capsys, stored, "--json"))
    assert [turn["turn"] for turn in found["history"]] == [1, 2, 3, 4, 5]
    assert found["history"][1]["said"] == ["erratum 1", "user"]
    assert found["history"][2]["calls"] == ["lookup"]
    assert found["history"][3]["said"] == ["tool"]
    last = found["history"][-1]
    assert last["prompt_tokens"] + last["answer_tokens"] == found["tokens"]
    assert [(epoch["epoch"], epoch["reason"]) for epoch in found["epochs"]] == [
        (1, "first turn"),
        (2, "requested"),
    ]


def test_only_the_last_entries_are_listed(stored: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--entries leaves earlier turns and errata out, and counts them nevertheless."""
    found = json.loads(run(capsys, stored, "--json", "--entries", "1"))
    assert [turn["turn"] for turn in found["history"]] == [5]
    assert found["errata"] == []
    assert found["turns"] == 5
    assert len(found["epochs"]) == 2


def test_an_empty_ledger_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A conversation that has not begun is a ledger too."""
    assert "0 entries, 0 turns, 0 epochs" in run(capsys, written(tmp_path, Ledger()))


def test_a_value_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Escape sequences and line breaks in a value are shown as text."""
    with desk(ScriptedBackend(), Field("note", "\x1b[31mred\n[bold]b[/bold]")) as context:
        context.ask("Hello")
        out = run(capsys, written(tmp_path, context.ledger), "--values")
    assert "\x1b" not in out
    assert r'"\u001b[31mred\n[bold]b[/bold]"' in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"hello", "it is not JSON"),
        (b"\xff\xfe", "it is not UTF-8"),
        (b"{}", '"format" must be'),
        (b'{"format":"agentkv-ledger","version":99}', "this release reads version 1"),
    ],
)
def test_a_file_that_is_no_ledger_is_named(tmp_path: Path, text: bytes, message: str) -> None:
    """The error says which file it is and what is wrong with it."""
    file = tmp_path / "other.json"
    file.write_bytes(text)
    with pytest.raises(LedgerFormatError, match=r"other\.json") as caught:
        main.app(["inspect", str(file)], standalone_mode=False)
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The error says which file could not be read."""
    with pytest.raises(LedgerError, match=r"none\.json cannot be read"):
        main.app(["inspect", str(tmp_path / "none.json")], standalone_mode=False)


def test_the_error_for_a_damaged_ledger_holds_no_value(stored: str) -> None:
    """A record that does not fit is named by its place, without what it holds."""
    file = Path(stored)
    record = json.loads(file.read_text(encoding="utf-8"))
    record["entries"][0]["fields"]["address"] = [SECRET]
    file.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(LedgerFormatError, match=r"entry 0\.frozen\.fields\.address") as caught:
        main.app(["inspect", stored], standalone_mode=False)
    assert SECRET not in str(caught.value)
