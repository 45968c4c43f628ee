"""What holds after every turn of every conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentkv import Deletion, Ledger, Profile, Prompt, TurnReport
from agentkv.encode import Encoding, choose_encoding, encode_ids, render_ids
from agentkv.entries import Erratum, Frozen, RebaseReason
from agentkv.miss import Miss
from agentkv.plan import AppendErratum
from agentkv.template import TemplateEncoder, prefix_violation
from agentkv.tokenizer import WireMessage
from agentkv.tokens import TokenIds
from tests.properties import strategies as make


class Calm(TemplateEncoder):
    """Encodes the same conversation with ``x`` for all data, so that only the template makes control ids."""

    def opening(
        self, messages: Sequence[WireMessage], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        return super().opening(_calmed(messages), tools=_bare(tools))

    def extension(self, generated: Sequence[int], messages: Sequence[WireMessage]) -> list[int]:
        return super().extension(generated, _calmed(messages))

    def render_all(
        self, messages: Sequence[WireMessage], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        # What the model said is its own, control tokens included.
        calm = [m if m["role"] == "assistant" else _calmed([m])[0] for m in messages]
        return super().render_all(calm, tools=_bare(tools))


def _bare(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {"name": tool["function"]["name"], "description": "x", "parameters": {}},
        }
        for tool in tools or ()
    ]


def _calmed(messages: Sequence[WireMessage]) -> list[WireMessage]:
    return [{**message, "content": "x" if message["content"] else ""} for message in messages]


@dataclass(frozen=True)
class Turn:
    """A turn that was recorded."""

    name: str
    before: Ledger
    after: Ledger
    truth: Prompt
    """What was true when it began."""
    ids: list[int]
    """The prompt that the backend got."""
    report: TurnReport
    profile: Profile


def check_growth(turn: Turn, prompt: list[int], answer: list[int]) -> None:
    """Within an epoch a prompt begins with the one before and its answer; what is shared is known exactly."""
    encoder = make.encoder_of(turn.name)
    opened = next((entry for entry in _new(turn) if isinstance(entry, Frozen)), None)
    # Behind an erasure is another salt, under which nothing is cached.
    erased = opened is not None and opened.reason is RebaseReason.ERASED
    common = 0 if erased else TokenIds([*prompt, *answer]).common_prefix(TokenIds(turn.ids))
    assert len(turn.ids) - turn.report.new_tokens == common, "the common prefix is not the predicted one"
    if opened is None and choose_encoding(encoder) is Encoding.TOKENS:
        broken = prefix_violation(prompt, answer, turn.ids)
        assert broken is None, f"not an extension: {broken}"


def check_told(turn: Turn) -> None:
    """Every declared field was told its current value, and nothing that is gone stands."""
    dormant = _dormant(turn.truth)
    told = {key: was.text for key, was in turn.after.state.fields.items() if was.text is not None}
    assert _without(told, dormant) == {key: field.text for key, field in turn.truth.fields.items()}
    tools = {f"tool:{name}": text for name, text in turn.after.state.tools.items() if text is not None}
    assert _without(tools, dormant) == {f"tool:{tool.name}": tool.text for tool in turn.truth.tools}
    for segment in turn.truth.segments:
        assert turn.after.state.segments[segment.key] == segment.digest


def _dormant(prompt: Prompt) -> set[str]:
    return {key for key, how in prompt.deletions.items() if how is Deletion.DORMANT}


def _without(told: Mapping[str, str], keys: set[str]) -> dict[str, str]:
    return {key: text for key, text in told.items() if key not in keys}


def check_errata(turn: Turn) -> None:
    """An erratum says what is wrong, what is restated, or everything; its text reaches the model."""
    tokenizer = make.tokenizer_of(turn.name)
    asked = {key for step in turn.report.plan if isinstance(step, AppendErratum) for key in step.restated}
    truth = {key: field.text for key, field in turn.truth.fields.items()}
    ledger, dormant = turn.before, _dormant(turn.truth)
    shown = tokenizer.decode(turn.ids)
    for entry in _new(turn):
        if isinstance(entry, Erratum):
            told = {key: was.text for key, was in ledger.state.fields.items()}
            wrong = {key for key in truth if told.get(key) != truth[key]}
            wrong |= {key for key, text in told.items() if text is not None and key not in truth} - dormant
            said = {statement.key: statement.now for statement in entry.statements}
            assert entry.revision == ledger.state.revision + 1
            assert len(said) == len(entry.statements), "a field is stated twice"
            assert {key: now for key, now in said.items() if now is not None}.items() <= truth.items()
            fields = {key for key in said if key in truth or key in told}
            if entry.snapshot:
                assert fields >= truth.keys()
            else:
                assert fields - wrong == asked, "it repeats what is known"
                assert fields >= wrong, "it leaves out what is wrong"
            assert any(form in shown for form in _forms(turn, entry)), "it was not sent"
        ledger = ledger.append([entry], ids=None, computed=0)


def _forms(turn: Turn, erratum: Erratum) -> Iterator[str]:
    """Yield what a template may write for an erratum: its text, or that as JSON."""
    if choose_encoding(make.encoder_of(turn.name)) is Encoding.MESSAGES:
        # There control tokens in data are escaped, so that the text is another one.
        yield turn.profile.wording.header.format(revision=erratum.revision).strip()
    yield from (
        erratum.text,
        json.dumps(erratum.text, ensure_ascii=False)[1:-1],
        json.dumps(erratum.text)[1:-1],
    )


def check_structure(turn: Turn) -> None:
    """The prompt has the control ids of the template and of the answers; data adds none."""
    tokenizer, encoder = make.tokenizer_of(turn.name), make.encoder_of(turn.name)
    encode = encode_ids if choose_encoding(encoder) is Encoding.TOKENS else render_ids
    calm = encode([*turn.after.epoch_entries()][:-1], Calm(tokenizer, encoder.traits))
    known = frozenset(tokenizer.control_tokens.values())
    assert [i for i in turn.ids if i in known] == [i for i in calm if i in known]


def check_stored(turn: Turn) -> None:
    """The ledger is all there is: read back, it has the same state and gives the same ids."""
    loaded = Ledger.from_json(turn.after.to_json())
    assert loaded.state == turn.after.state
    assert list(loaded) == list(turn.after)
    if choose_encoding(make.encoder_of(turn.name)) is Encoding.TOKENS:
        assert encode_ids(loaded.epoch_entries(), make.encoder_of(turn.name)) == turn.after.ids


def check_cache(turn: Turn, *, alone: bool) -> None:
    """The prediction is what the cache had; only what other calls left there makes it more."""
    assert turn.report.cached_tokens >= turn.report.predicted_cached_tokens
    if turn.report.cached_tokens != turn.report.predicted_cached_tokens:
        assert turn.report.miss is Miss.SHARED
        # Where prompts are rendered anew, one before the last may share more with this one.
        assert not alone or choose_encoding(make.encoder_of(turn.name)) is Encoding.MESSAGES


def _new(turn: Turn) -> Iterator[Any]:
    # An erasure rewrites what came before, so entries are counted, not compared.
    return iter(turn.after.since(len(turn.before)))
