"""Whatever happens in a conversation: prompts only grow, and what the model was told is true."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

import agentkv.turn
from agentkv import (
    AgentKVContext,
    Deletion,
    Field,
    Ledger,
    Mode,
    Policy,
    Profile,
    Prompt,
    ToolResult,
    TurnReport,
)
from agentkv.encode import Encoding, choose_encoding, encode_ids
from agentkv.entries import Erratum, Frozen, RebaseReason
from agentkv.errors import BackendError, TruncationDetectedError
from agentkv.plan import AppendErratum
from agentkv.report import Miss
from agentkv.template import TemplateEncoder, prefix_violation
from agentkv.testing import Scripted, ScriptedBackend
from agentkv.tokenizer import WireMessage
from tests.properties import strategies as make


class Calm(TemplateEncoder):
    """Encodes the same conversation with ``x`` for all data, so that only the template makes control ids."""

    def opening(
        self, messages: Sequence[WireMessage], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        bare = [
            {
                "type": "function",
                "function": {"name": tool["function"]["name"], "description": "x", "parameters": {}},
            }
            for tool in tools or ()
        ]
        return super().opening(_calmed(messages), tools=bare)

    def extension(self, generated: Sequence[int], messages: Sequence[WireMessage]) -> list[int]:
        return super().extension(generated, _calmed(messages))


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


def check_growth(turn: Turn, sent: list[int]) -> None:
    """Within an epoch the prompt begins with all that was sent and generated; what is shared is known exactly."""
    encoder = make.encoder_of(turn.name)
    opened = next((entry for entry in _new(turn) if isinstance(entry, Frozen)), None)
    # Behind an erasure is another salt, under which nothing is cached.
    erased = opened is not None and opened.reason is RebaseReason.ERASED
    common = 0 if erased else len(os.path.commonprefix([sent, turn.ids]))
    assert len(turn.ids) - turn.report.new_tokens == common, "the common prefix is not the predicted one"
    if opened is None and choose_encoding(encoder) is Encoding.TOKENS:
        broken = prefix_violation(sent, [], turn.ids)
        assert broken is None, f"not an extension: {broken}"


def check_told(turn: Turn) -> None:
    """Every declared field was told its current value, and nothing that is gone stands."""
    dormant = _dormant(turn.truth)
    told = {key: was.text for key, was in turn.after.state.fields.items() if was.text is not None}
    assert _without(told, dormant) == {key: field.text for key, field in turn.truth.fields.items()}
    tools = {f"tool:{name}": text for name, text in turn.after.state.tools.items() if text is not None}
    assert _without(tools, dormant) == {f"tool:{tool.name}": tool.digest for tool in turn.truth.tools}
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
            assert any(form in shown for form in _forms(turn, entry.text)), "it was not sent"
        ledger = ledger.append([entry], ids=None, computed=0)


def _forms(turn: Turn, text: str) -> Iterator[str]:
    """Yield a text as templates write it: as it is, or as JSON."""
    for form in (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]):
        yield form
        if choose_encoding(make.encoder_of(turn.name)) is Encoding.MESSAGES:
            # Rendered as a whole, control tokens in data have their power.
            yield make.tokenizer_of(turn.name).decode(make.tokenizer_of(turn.name).encode(form)).strip()


def check_structure(turn: Turn) -> None:
    """The prompt has the control ids of the template and of the answers; data adds none."""
    if choose_encoding(make.encoder_of(turn.name)) is Encoding.TOKENS:
        entries = [*turn.after.epoch_entries()][:-1]
        known = frozenset(make.tokenizer_of(turn.name).control_tokens.values())
        calm = encode_ids(entries, Calm(make.tokenizer_of(turn.name), make.encoder_of(turn.name).traits))
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
        assert not alone


def _new(turn: Turn) -> Iterator[Any]:
    # An erasure rewrites what came before, so entries are counted, not compared.
    return iter(turn.after.since(len(turn.before)))


@dataclass
class Talk:
    """A conversation, and what was sent of it."""

    context: AgentKVContext
    sent: list[int]
    secrets: set[str]
    """Values that were erased and may never be sent again."""


class Conversations(RuleBasedStateMachine):
    """Conversations of one template family, in which anything may happen."""

    name: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.script = Scripted()
        self.alone = True
        self.talks: list[Talk] = []
        self.options: dict[str, Any] = {}
        self.made = 0

    @initialize(
        parts=st.runner().flatmap(lambda machine: make.segments(machine.name)),
        profile=make.profiles(),
        block=st.sampled_from([1, 16]),
        mode=st.sampled_from([*[Mode.ON] * 6, Mode.OBSERVE, Mode.OFF]),
    )
    def open(self, parts: list[Any], profile: Profile, block: int, mode: Mode) -> None:
        self.backend = ScriptedBackend(
            [lambda _: self.script], tokenizer=make.tokenizer_of(self.name), block_size=block
        )
        self.options = {"profile": profile, "mode": mode}
        context = AgentKVContext(self.backend, parts, **self.options)
        self.talks = [Talk(context.__enter__(), [], set())]

    def teardown(self) -> None:
        for talk in self.talks:
            talk.context.__exit__(None, None, None)

    @property
    def talk(self) -> Talk:
        return self.talks[-1]

    @property
    def context(self) -> AgentKVContext:
        return self.talk.context

    # What changes between turns; see `make.events`.

    def set_or_add_a_field(self, key: str, value: Any) -> None:
        if key in self.context.prompt.fields:
            self.context.set(key, value)
        else:
            self.context.add(Field(key, value, label=make.FIELDS[key]))

    def set_a_field_back(self, key: str) -> None:
        frozen = self.context.ledger.state.frozen
        if key in self.context.prompt.fields and frozen is not None and key in frozen.fields:
            self.context.set(key, frozen.fields[key])

    def remove_a_part(self, number: int, deletion: Deletion | None) -> None:
        prompt = self.context.prompt
        keys = [key for key in prompt.fields if key not in make.INLINE]
        keys += [segment.key for segment in prompt.segments if not isinstance(segment, Policy)]
        keys += [f"tool:{tool.name}" for tool in prompt.tools]
        if keys:
            self.context.remove(keys[number % len(keys)], deletion)
            self.alone = self.alone and deletion is not Deletion.HARD

    def retrieve(self, documents: list[Any]) -> None:
        self.context.retrieve(documents)

    def add_a_part(self, part: Any) -> None:
        self.context.add(part)

    def change_the_policy(self, text: str) -> None:
        self.context.add(Policy(f"Be fair. {text}"))

    def ask_for_a_rebase(self, keep: int | None, summary: str) -> None:
        if keep == 0 and self.context.ledger.state.open_calls:
            keep = 1
        self.context.rebase(summary=summary or None if keep is not None else None, keep_last=keep)
        self.alone = False

    # What becomes of a conversation.

    @rule(what=st.sampled_from(["fork", "another", "resume", "resume", "erase"]))
    def go_on(self, what: str) -> None:
        match what:
            case "fork" if len(self.talks) < 3:
                child = self.context.fork()
                self.talks.append(Talk(child.__enter__(), self.talk.sent, set(self.talk.secrets)))
                self.alone = False
            case "another":
                self.talks.insert(0, self.talks.pop())
            case "resume":
                parts = make.parts_of(self.context.prompt)
                saved = self.context.ledger.to_json()
                self.context.__exit__(None, None, None)
                resumed = AgentKVContext.resume(self.backend, saved, parts, **self.options)
                self.talk.context = resumed.__enter__()
            case "erase" if not self.context.ledger.state.open_calls:
                self.erase_a_secret()
            case _:
                pass

    def erase_a_secret(self) -> None:
        self.made += 1
        secret = f"zebra{self.made:04}"
        self.context.add(Field(f"secret.{self.made}", secret))
        self.turn(["Hm."], Scripted("Well."))
        self.context.remove(f"secret.{self.made}", Deletion.HARD)
        self.talk.secrets.add(secret)
        self.alone = False

    # Turns.

    @rule(
        events=st.runner().flatmap(lambda m: make.events(m.name)),
        text=st.runner().flatmap(lambda m: make.texts(m.name)),
        results=st.runner().flatmap(lambda m: st.lists(make.texts(m.name), min_size=3, max_size=3)),
        answer=st.runner().flatmap(lambda m: make.answers(m.name)),
        user_too=st.booleans(),
    )
    def say(
        self, events: list[make.Event], text: str, results: list[str], answer: Scripted, user_too: bool
    ) -> None:
        self.apply(events)
        self.turn(self.inputs(text, results, user_too), answer)

    @rule(
        events=st.runner().flatmap(lambda m: make.events(m.name)),
        answer=st.runner().flatmap(lambda m: make.calls(m.name)),
        results=st.runner().flatmap(lambda m: st.lists(make.texts(m.name), min_size=3, max_size=3)),
        after=st.runner().flatmap(lambda m: make.answers(m.name)),
        user_too=st.booleans(),
    )
    def call_tools(
        self, events: list[make.Event], answer: Scripted, results: list[str], after: Scripted, user_too: bool
    ) -> None:
        self.apply(events)
        self.turn(self.inputs("Do it.", results, user_too), answer)
        self.turn(self.inputs("And?", results, user_too), after)

    @rule(
        events=st.runner().flatmap(lambda m: make.events(m.name)),
        answer=st.runner().flatmap(lambda m: make.answers(m.name)),
        count=st.integers(0, 6),
        keep=st.booleans(),
        value=st.runner().flatmap(lambda m: make.values(m.name)),
    )
    def stop_a_stream(
        self, events: list[make.Event], answer: Scripted, count: int, keep: bool, value: Any
    ) -> None:
        self.apply(events)
        before, truth, self.script = self.context.ledger, self.context.prompt, answer
        with self.context.stream(*self.inputs("Tell me.", ["r"] * 3, False)) as stream:
            # A stream that never began has no KV to speak of.
            count = max(count, keep)
            for _ in range(count):
                next(stream, None)
            # What changes while the model answers was not told.
            self.context.set("buyer.name", value)
            if keep:
                stream.keep()
        if self.context.ledger is before:
            assert not keep
        else:
            self.check(before, truth)
        self.alone = False

    @rule(
        answer=st.runner().flatmap(lambda m: make.answers(m.name)), count=st.integers(0, 6), cut=st.booleans()
    )
    def fail_a_call(self, answer: Scripted, count: int, cut: bool) -> None:
        before = self.context.ledger
        inputs = self.inputs("Fail.", ["r"] * 3, False)
        if cut:
            self.script = Scripted(ids=answer.ids, read_tokens=1)
        else:
            self.script = Scripted(ids=answer.ids, error=BackendError("gone"), fail_after=count)
        with pytest.raises(TruncationDetectedError if cut else BackendError):
            self.context.send(*inputs)
        assert self.context.ledger is before
        self.alone = False

    def apply(self, events: list[make.Event]) -> None:
        for name, arguments in events:
            getattr(self, name)(**arguments)

    def inputs(self, text: str, results: Sequence[str], user_too: bool) -> list[Any]:
        state = self.context.ledger.state
        given: list[Any] = [
            ToolResult(call.id, result)
            for call, result in zip(state.open_calls, results, strict=False)
            if call.valid and call.available
        ]
        # The order of discovery changes nothing.
        given.reverse()
        return given if state.open_calls and not user_too else [*given, text]

    def turn(self, inputs: Sequence[Any], answer: Scripted) -> None:
        before, truth, self.script = self.context.ledger, self.context.prompt, answer
        self.context.send(*inputs)
        self.check(before, truth)

    def check(self, before: Ledger, truth: Prompt) -> None:
        talk, after, report = self.talk, self.context.ledger, self.context.report.last
        assert report is not None
        turn = Turn(
            self.name,
            before,
            after,
            truth,
            self.backend.requests[-1].ids.tolist(),
            report,
            self.options["profile"],
        )
        check_growth(turn, talk.sent)
        check_told(turn)
        check_errata(turn)
        check_structure(turn)
        check_stored(turn)
        # From the third epoch on, an earlier one than the last may have more of the prompt.
        check_cache(turn, alone=self.alone and report.epoch < 3)
        shown = make.tokenizer_of(self.name).decode(turn.ids)
        assert not any(secret in shown for secret in talk.secrets)
        answer = after.state.generated
        assert answer is not None
        assert answer.ids is not None
        talk.sent = [*turn.ids, *answer.ids]


def machine(family: str) -> type[Conversations]:
    """Make the machine of one family."""
    return type(f"Conversations_{family}", (Conversations,), {"name": family})


SETTINGS = settings(
    # Half of what the profile asks for: an example is a conversation of some twenty turns.
    max_examples=max(1, settings().max_examples // 2),
    stateful_step_count=14,
    suppress_health_check=list(HealthCheck),
    # The explain phase traces every line, which takes minutes here.
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)


@pytest.mark.parametrize("name", make.NAMES)
def test_prompts_only_grow_and_what_was_told_is_true(name: str) -> None:
    """Through changes, tool rounds, stops, failures, forks and resumes, on every template family."""
    run_state_machine_as_test(machine(name), settings=SETTINGS)


def test_the_machine_finds_a_template_that_counts_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first line that changes with each message is found where everything is rendered anew."""
    monkeypatch.setattr(agentkv.turn, "choose_encoding", lambda _: Encoding.MESSAGES)
    with pytest.raises(AssertionError, match=r"not an extension.*index"):
        run_state_machine_as_test(
            machine(make.BROKEN.name), settings=settings(SETTINGS, phases=[Phase.generate], print_blob=False)
        )


def test_the_machine_finds_an_encoder_that_strips_earlier_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasoning that the template leaves out once the user speaks again is found too."""
    monkeypatch.setattr(agentkv.turn, "choose_encoding", lambda _: Encoding.MESSAGES)
    with pytest.raises(AssertionError, match=r"not an extension"):
        run_state_machine_as_test(
            machine("qwen"), settings=settings(SETTINGS, phases=[Phase.generate], print_blob=False)
        )
