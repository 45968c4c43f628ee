"""Whatever happens in a conversation: prompts only grow, and what the model was told is true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

import agentkv.traits
from agentkv import AgentKVContext, Deletion, Field, Ledger, Mode, Policy, Profile, Prompt, ToolResult
from agentkv.encode import Encoding
from agentkv.errors import BackendError, TruncationDetectedError
from agentkv.template import BreakPlace
from agentkv.testing import Scripted, ScriptedBackend
from tests.properties import strategies as make
from tests.properties.invariants import (
    Turn,
    check_cache,
    check_errata,
    check_growth,
    check_stored,
    check_structure,
    check_told,
)
from tests.templates import BROKEN


@dataclass
class Talk:
    """A conversation, and what was sent of it."""

    context: AgentKVContext
    prompt: list[int]
    answer: list[int]
    secrets: set[str]
    """Values that were erased and may never be sent again."""


class Conversations(RuleBasedStateMachine):
    """Conversations of one template family, in which anything may happen."""

    name: ClassVar[str]
    only_growth: ClassVar[bool] = False

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
        self.talks = [Talk(context.__enter__(), [], [], set())]

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

    def resume(self) -> None:
        parts, saved = make.parts_of(self.context.prompt), self.context.ledger.to_json()
        self.context.__exit__(None, None, None)
        self.talk.context = AgentKVContext.resume(self.backend, saved, parts, **self.options).__enter__()

    # What becomes of a conversation.

    @rule(what=st.sampled_from(["fork", "another", "erase"]))
    def go_on(self, what: str) -> None:
        match what:
            case "fork" if len(self.talks) < 3:
                child = self.context.fork()
                self.talks.append(
                    replace(self.talk, context=child.__enter__(), secrets=set(self.talk.secrets))
                )
                self.alone = False
            case "another":
                self.talks.insert(0, self.talks.pop())
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
        check_growth(turn, talk.prompt, talk.answer)
        if not self.only_growth:
            self.check_rest(turn)
        answer = after.state.generated
        assert answer is not None
        assert answer.ids is not None
        talk.prompt, talk.answer = turn.ids, list(answer.ids)

    def check_rest(self, turn: Turn) -> None:
        check_told(turn)
        check_errata(turn)
        check_structure(turn)
        check_stored(turn)
        # From the third epoch on, an earlier one than the last may have more of the prompt.
        check_cache(turn, alone=self.alone and turn.report.epoch < 3)
        shown = make.tokenizer_of(self.name).decode(turn.ids)
        assert not any(secret in shown for secret in self.talk.secrets), "what was erased was sent again"


def machine(family: str, *, only_growth: bool = False) -> type[Conversations]:
    """Make the machine of one family."""
    return type(f"Conversations_{family}", (Conversations,), {"name": family, "only_growth": only_growth})


SETTINGS = settings(
    # Fewer than the profile asks for: an example is a conversation of some twenty turns.
    max_examples=max(1, settings().max_examples * 4 // 5),
    stateful_step_count=14,
    suppress_health_check=list(HealthCheck),
    # The explain phase traces every line, which takes minutes here.
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)


@pytest.mark.parametrize("name", make.NAMES)
def test_prompts_only_grow_and_what_was_told_is_true(name: str) -> None:
    """Through changes, tool rounds, stops, failures, forks and resumes, on every template family."""
    run_state_machine_as_test(machine(name), settings=SETTINGS)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        (BROKEN.name, BreakPlace.PROMPT),  # writes the number of messages into the first line
        ("qwen", BreakPlace.GENERATED),  # leaves out what an earlier answer thought
    ],
)
def test_the_machine_finds_prompts_that_are_rendered_anew(
    monkeypatch: pytest.MonkeyPatch, name: str, place: BreakPlace
) -> None:
    """With an encoder that renders everything each turn, the same machine fails on such templates."""
    monkeypatch.setattr(agentkv.traits, "choose_encoding", lambda _: Encoding.MESSAGES)
    with pytest.raises(AssertionError, match=f"not an extension.*{place.name}"):
        run_state_machine_as_test(
            machine(name, only_growth=True), settings=settings(SETTINGS, phases=[Phase.generate])
        )
