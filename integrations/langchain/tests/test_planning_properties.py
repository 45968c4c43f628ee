"""What holds for any conversation: planning is a pure function of the request and the record."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from agentkv import Field, Policy, Prompt
from agentkv.backends.plain import PlainTokenizer
from agentkv.plan import Mode
from agentkv.traits import ModelTraits
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from langchain_agentkv.canonical import canonical, digest
from langchain_agentkv.planning import Asked, capabilities, plan
from langchain_agentkv.recording import FROZEN_KEY, LOG_KEY, record
from langchain_agentkv.records import joined, read_told
from langchain_agentkv.toolset import Toolset
from scripted import calling

TRAITS = ModelTraits(PlainTokenizer(), capabilities(None))
KEYS = ("a.status", "b.count")


def schema(name: str) -> dict[str, Any]:
    """Return a tool's schema."""
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


@dataclass
class Talk:
    """A conversation that is driven by random steps, with the record as a checkpoint would keep it."""

    values: dict[str, str] = field(default_factory=lambda: dict.fromkeys(KEYS, "v0"))
    messages: list[BaseMessage] = field(default_factory=list)
    tools: list[str] = field(default_factory=lambda: ["look", "send"])
    state: dict[str, Any] = field(default_factory=dict)
    sent: list[tuple[str, str]] = field(default_factory=list)
    bound: list[Any] = field(default_factory=list)
    revision: int = 0
    edited: bool = False
    reasons: list[str] = field(default_factory=list)
    number: int = 0

    def call(self, answer: AIMessage) -> None:
        """Make a call and check what holds for each."""
        fields = [Field(key, value) for key, value in self.values.items()]
        prompt = Prompt.of([Policy("Rules."), *fields])
        asked = Asked(tuple(self.messages), SystemMessage("Be kind."), Toolset.of(map(schema, self.tools)))
        told = read_told(self.state.get(FROZEN_KEY), self.state.get(LOG_KEY))
        planned = plan(asked, told, prompt, TRAITS, mode=Mode.ON)
        twin = plan(asked, told, prompt, TRAITS, mode=Mode.ON)
        sent = [wire(message) for message in planned.messages]
        assert sent == [wire(message) for message in twin.messages], "planning is pure"
        system = "" if planned.system is None else str(planned.system.content)
        if not planned.reason:
            again = planned.change.again
            before = self.sent[: -1 - bool(planned.said and again)] if self.edited or again else self.sent
            assert sent[: len(before)] == before, "append-only"
            assert list(planned.tools) == self.bound, "the same tools"
        lines = [line for _, text in sent for line in text.splitlines() if line.startswith("Update ")]
        assert len(lines) == len(set(lines)), "each erratum once"
        assert self.believed(system, "\n".join(text for _, text in sent)) == self.values, (
            "what is true can be read"
        )
        numbers = [int(re.findall(r"\d+", line)[0]) for line in lines]
        assert numbers == sorted(numbers)
        self.revision = max([self.revision, *numbers])
        update = record(planned, answer)
        assert json.loads(json.dumps(update)) == update, "plain JSON"
        if FROZEN_KEY in update:
            self.state[FROZEN_KEY] = update[FROZEN_KEY]
        self.state[LOG_KEY] = joined(self.state.get(LOG_KEY), [update[LOG_KEY]])
        kept = read_told(self.state[FROZEN_KEY], self.state[LOG_KEY])
        assert kept is not None
        revisions = [item.entry.revision for item in kept.said if hasattr(item.entry, "revision")]
        assert max([kept.opening.revision, *revisions]) >= self.revision, "revisions never go back"
        self.messages.append(answer)
        self.sent = [*sent, wire(answer)]
        self.bound = list(planned.tools)
        self.edited = False
        self.reasons.append(planned.reason)

    def believed(self, system: str, said: str) -> dict[str, str]:
        """Read the prompt as a perfect model would: the last statement of a field is true."""
        found = {}
        for key in KEYS:
            label = Field(key, "").label
            statement = re.compile(rf"[Tt]he {label} is now (\S+)\.|^{label}: (\S+)$", re.MULTILINE)
            first = re.findall(rf"- {label}: (\S+)", system)[-1]
            found[key] = [first, *("".join(pair) for pair in statement.findall(said))][-1]
        return found


def wire(message: BaseMessage) -> tuple[str, str]:
    """Return what of a message is sent."""
    return digest(message), str(canonical(message).content)


VALUES = st.sampled_from(["v0", "v1", "v2", "v3"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.text(max_size=8)),
        st.tuples(st.just("round"), st.integers(1, 3)),
        st.tuples(st.just("set"), st.tuples(st.sampled_from(KEYS), VALUES)),
        st.tuples(st.just("tools"), st.lists(st.sampled_from(["look", "send", "move"]), unique=True)),
        st.tuples(st.just("edit"), st.text("xyz", min_size=1, max_size=4)),
        st.tuples(st.just("remove"), st.integers(0, 5)),
        st.tuples(st.just("reshape"), st.none()),
        st.tuples(st.just("again"), st.none()),
        st.tuples(st.just("foreign"), st.none()),
    ),
    min_size=1,
    max_size=24,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_any_conversation_keeps_its_promises(steps: list[tuple[str, Any]]) -> None:
    """Append-only within an epoch, each erratum once, what is true can be read, revisions never go back."""
    talk = Talk()
    for kind, what in steps:
        drive(talk, kind, what)


def drive(talk: Talk, kind: str, what: Any) -> None:
    """Take one step."""
    talk.number += 1
    last = talk.messages[-1] if talk.messages else None
    match kind:
        case "ask":
            talk.messages.append(HumanMessage(what or "?"))
            talk.call(AIMessage(f"Answer {talk.number}."))
        case "round":
            calls = [("look", {"x": str(n)}) for n in range(what)]
            talk.messages.append(HumanMessage("Look."))
            answer = calling(*calls, start=10 * talk.number)
            talk.call(answer)
            talk.messages += [
                ToolMessage(f"r{n}", tool_call_id=c["id"]) for n, c in enumerate(answer.tool_calls)
            ]
            talk.call(AIMessage(f"Seen {talk.number}."))
        case "set":
            talk.values[what[0]] = what[1]
        case "tools":
            talk.tools = what
        case "edit" if isinstance(last, AIMessage):
            talk.messages[-1] = AIMessage(what)
            talk.edited = True
        case "remove" if what < len(talk.messages) - 1:
            del talk.messages[what]
        case "reshape":
            talk.messages = [
                m.model_copy(update={"content": [{"type": "text", "text": str(m.text)}]})
                for m in talk.messages
            ]
        case "again" if isinstance(last, AIMessage) and talk.sent:
            talk.messages.pop()
            talk.call(AIMessage(f"Answer {talk.number}, again."))
        case "foreign":
            talk.messages += [HumanMessage("You there?"), AIMessage("Another agent's answer.")]


def test_the_checker_sees_a_broken_prefix() -> None:
    """The property's own check fails where a prefix is not extended."""
    talk = Talk()
    drive(talk, "ask", "one")
    talk.sent[0] = ("other", "other")
    with pytest.raises(AssertionError, match="append-only"):
        drive(talk, "ask", "two")
