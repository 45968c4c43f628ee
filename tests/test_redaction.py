"""What is erased is gone from everything that is stored."""

from __future__ import annotations

import json

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
from agentkv.entries import Frozen, Generated, Message, RebaseReason
from agentkv.errors import ContextBusyError
from agentkv.testing import ScriptedBackend
from tests.desk import KEY, call, desk, epochs, errata, lookup, reason

SECRET = 'IBAN "DE 42"\nüber\u2028x'


def everywhere(ctx: AgentKVContext, backend: ScriptedBackend) -> str:
    """Return all that is stored, shown or sent after an erasure, JSON escapes undone too."""
    saved = ctx.ledger.to_json()
    return "\n".join(
        [saved, json.dumps(json.loads(saved)), repr(ctx.report), repr(ctx.prompt), backend.prompts[-1]]
    )


def test_erased_value_is_nowhere() -> None:
    """Value, its JSON forms and answers that quote it are gone from ledger, report and the next prompt."""
    quoted = json.dumps({"number": SECRET})
    backend = ScriptedBackend([f"It is {SECRET}.", call(arguments=quoted), "Fine.", "Gone."])
    with desk(backend, Tools([lookup]), Field("iban", SECRET), Field("name", "Ada")) as ctx:
        ctx.ask(f"Mine is {SECRET}!")
        ctx.set("iban", SECRET + "y")
        reply = ctx.ask("Look it up")
        ctx.send(ToolResult(reply.tool_calls[0].id, f"found {SECRET}"))
        ctx.remove("iban", Deletion.HARD)
        assert "DE 42" not in ctx.ledger.to_json()
        assert "DE 42" not in repr(ctx.report)
        last = ctx.ask("Go on")
        text = everywhere(ctx, backend)
    assert reason(last) is RebaseReason.ERASED
    assert "DE 42" not in text
    assert "über" not in text
    assert "Ada" in backend.prompts[-1]


def test_erasing_moves_to_another_salt() -> None:
    """The new epoch shares no cache with the one that held the value, and reads nothing from it."""
    backend = ScriptedBackend()
    with desk(backend, Field("iban", SECRET)) as ctx:
        ctx.ask("a")
        ctx.ask("b")
        ctx.remove("iban", Deletion.HARD)
        reply = ctx.ask("c")
    salts = [request.salt for request in backend.requests]
    assert salts[0] == salts[1] != salts[2]
    assert reply.report.cached_tokens == 0


def test_salt_changes_even_if_the_process_ends_in_between() -> None:
    """A ledger that was saved right after an erasure opens its epoch under the new salt when resumed."""
    backend = ScriptedBackend()
    with desk(backend, Field("iban", SECRET)) as ctx:
        ctx.ask("a")
        ctx.remove("iban", Deletion.HARD)
    with AgentKVContext.resume(backend, ctx.ledger.to_json(), [Policy("Be brief.")], salt_key=KEY) as resumed:
        assert reason(resumed.ask("b")) is RebaseReason.ERASED
    assert backend.requests[0].salt != backend.requests[1].salt


def test_field_that_comes_back_after_erasure_is_in_the_new_epoch() -> None:
    """Declared again before the next turn, its new value is told under the new salt."""
    backend = ScriptedBackend()
    with desk(backend, Field("iban", SECRET)) as ctx:
        ctx.ask("a")
        ctx.remove("iban", Deletion.HARD)
        ctx.add(Field("iban", "another"))
        assert reason(ctx.ask("b")) is RebaseReason.ERASED
    assert "another" in backend.prompts[-1]
    assert backend.requests[0].salt != backend.requests[1].salt


def test_erasing_while_an_answer_is_made_is_refused() -> None:
    """The running turn would bring the value back: nothing is removed, and afterwards it works."""
    backend = ScriptedBackend()
    with desk(backend, Field("iban", SECRET)) as ctx:
        with ctx.stream("a") as stream:
            next(stream)
            with pytest.raises(ContextBusyError):
                ctx.remove("iban", Deletion.HARD)
        assert "iban" in ctx.prompt.fields
        ctx.remove("iban", Deletion.HARD)
        ctx.ask("b")
        assert "DE 42" not in everywhere(ctx, backend)


def test_part_of_a_long_value_is_erased_too() -> None:
    """An erratum that said only the changed part of a long value keeps no piece of it."""
    backend = ScriptedBackend()
    long = "x" * 300
    with desk(backend, Field("note", long), profile=Profile(max_statement_chars=100)) as ctx:
        ctx.ask("a")
        ctx.set("note", long[:150] + "hunter2" + long[150:])
        ctx.ask("b")
        assert "hunter2" in errata(ctx.ledger)[0].text
        ctx.remove("note", Deletion.HARD)
        ctx.ask("c")
        assert "hunter2" not in everywhere(ctx, backend)


@pytest.mark.parametrize(
    "text", ["top\nUpdate 3: paid\nsecret words", "a </document> secret words", "plain secret words"]
)
def test_erased_document_is_gone_as_it_was_shown(text: str) -> None:
    """A document is found although its lines were quoted and its fence was mended."""
    backend = ScriptedBackend()
    with desk(backend, Document("d", text)) as ctx:
        ctx.ask("a")
        ctx.remove("document:d", Deletion.HARD)
        ctx.ask("b")
        assert "secret words" not in everywhere(ctx, backend)


def test_added_skill_with_a_value_in_it_is_erased() -> None:
    """A segment that came later is erased with the values that it shows."""
    backend = ScriptedBackend()
    with desk(backend, Field("code", "sesame")) as ctx:
        ctx.ask("a")
        ctx.add(Skill("door", Inline("Say {code} to open.")))
        ctx.ask("b")
        ctx.remove("skill:door", Deletion.HARD)
        ctx.ask("c")
        assert "to open" not in everywhere(ctx, backend)


def test_erased_tool_is_gone() -> None:
    """Description and parameters of a tool are erased, whether frozen or added."""
    backend = ScriptedBackend()
    with desk(backend, Tools([lookup])) as ctx:
        ctx.ask("a")
        ctx.remove("tool:lookup", Deletion.HARD)
        ctx.ask("b")
        assert "Look an order up" not in everywhere(ctx, backend)
        assert '"number"' not in everywhere(ctx, backend)


@pytest.mark.parametrize(
    "value", ["user", "message", "first turn", "exact", "frozen", "7", "none", "name", "kind"]
)
def test_value_that_is_a_word_of_the_format_can_be_erased(value: str) -> None:
    """Roles, kinds and keys of the record stay what they are; the ledger can still be read."""
    backend = ScriptedBackend([call(arguments=f'{{"number": "{value}", "n": 7}}'), "Well."])
    with desk(backend, Tools([lookup]), Field("x", value)) as ctx:
        ctx.ask(f"It is {value}.")
        ctx.remove("x", Deletion.HARD)
        reloaded = Ledger.from_json(ctx.ledger.to_json())
        (message,) = [entry for entry in reloaded if isinstance(entry, Message)]
        searched = value not in ("7", "none")
        assert message.content == ("It is [redacted]." if searched else f"It is {value}.")
        (answer,) = [entry for entry in reloaded if isinstance(entry, Generated)]
        assert isinstance(json.loads(answer.tool_calls[0].arguments), dict)
        assert (answer.ids is None) is searched


@pytest.mark.parametrize("value", [False, None, 2, "GB"])
def test_value_that_tells_nothing_by_itself_is_not_searched_in_what_was_said(value: object) -> None:
    """Erasing a flag or a small number takes it out of prefixes and errata and leaves sentences whole."""
    backend = ScriptedBackend(["No, none for 2 shirts in GB."])
    with desk(backend, Skill("fees", Inline("Flag {x}. No fee for 2.")), Field("x", value)) as ctx:
        ctx.ask("Is there no fee for 2 shirts in GB, none?")
        ledger = ctx.ledger.erase("x")
    (message,) = [entry for entry in ledger if isinstance(entry, Message)]
    assert message.content == "Is there no fee for 2 shirts in GB, none?"
    (frozen,) = [entry for entry in ledger if isinstance(entry, Frozen)]
    assert frozen.fields["x"] == frozen.system == "[redacted]"


def test_words_that_only_contain_the_value_stay() -> None:
    """A value is erased as a whole word."""
    ledger = Ledger().append([Message(role="user", content="Ada and Adam, (Ada)")], ids=None, computed=0)
    (entry,) = ledger.redact("Ada")
    assert isinstance(entry, Message)
    assert entry.content == "[redacted] and Adam, ([redacted])"


def test_value_behind_a_json_escape_is_found() -> None:
    """The letter of an escape before a value does not hide it."""
    ledger = Ledger().append(
        [Message(role="tool", content=r'{"q": "x\nAda"}', call_id="1")], ids=None, computed=0
    )
    assert "Ada" not in ledger.redact("Ada").to_json()


@pytest.mark.parametrize("secret", ["", " ", "[redacted]"])
def test_nothing_to_redact_changes_nothing(secret: str) -> None:
    """Blank secrets are ignored."""
    ledger = Ledger().append([Message(role="user", content="a [redacted] b")], ids=None, computed=0)
    assert list(ledger.redact(secret)) == list(ledger)


def test_erasing_twice_is_erasing_once() -> None:
    """A second erasure finds nothing more and still opens only one epoch."""
    backend = ScriptedBackend()
    with desk(backend, Field("a", "alpha"), Field("b", "beta")) as ctx:
        ctx.ask("1")
        ctx.remove("a", Deletion.HARD)
        ctx.remove("b", Deletion.HARD)
        ctx.ask("2")
        ctx.ask("3")
    assert [entry.reason for entry in epochs(ctx.ledger)] == [RebaseReason.FIRST, RebaseReason.ERASED]
    assert isinstance(next(iter(ctx.ledger)), Frozen)
