"""The modes, and requests that cannot be extended."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
from agentkv import Profile
from agentkv.backends.plain import PlainTokenizer
from agentkv.entries import Carrier
from agentkv.errors import AgentKVError, ConfigurationError, ContextWindowError

from agents import Desk, report
from langchain_agentkv import AgentKVMiddleware, field
from scripted import Scripted, append_only, calling, updates_in


def test_off_rewrites_the_prompt():
    """The kill switch: current values in the system text, no errata, nothing recorded."""
    desk = Desk(options={"mode": "off"})
    desk.ask("Hello")
    desk.order.status = "lost"
    result = desk.ask("And?")
    assert "Order status: lost" in desk.calls[1].system
    assert "Facts can change" not in desk.calls[1].system
    assert updates_in(desk.calls[1]) == []
    assert not desk.state().get("agentkv_log")
    assert report(result)["mode"] == "off"


def test_the_environment_switches_off(monkeypatch: pytest.MonkeyPatch):
    """AGENTKV_MODE=off overrides what the program says."""
    monkeypatch.setenv("AGENTKV_MODE", "off")
    desk = Desk()
    assert report(desk.ask("Hello"))["mode"] == "off"


def test_an_unknown_mode_is_refused():
    """A mistyped mode is no default."""
    with pytest.raises(ConfigurationError, match="mode"):
        AgentKVMiddleware(mode="onn")


def test_observe_sends_what_the_agent_would_and_reports_what_would_have_been_new():
    """The agent is as it was; the report compares."""
    off, observed, on = (Desk(options={"mode": mode}) for mode in ("off", "observe", "on"))
    reports = []
    for desk in (off, observed, on):
        desk.ask("Hello")
        desk.order.status = "lost"
        reports.append(report(desk.ask("And?")))
    assert [c.texts for c in observed.calls] == [c.texts for c in off.calls]
    _, seen, would = reports
    assert seen["would_have_new_tokens_estimated"] == would["new_tokens_estimated"]
    assert seen["new_tokens_estimated"] > 0


def test_observe_counts_what_rewriting_costs():
    """A long policy behind the changed field is new in every call without agentkv."""
    text = "Be thorough and kind. " * 100
    desk = Desk(options={"mode": "observe"})
    for turn in range(3):
        desk.order.status = f"step {turn}"
        result = desk.ask(text)
    seen = report(result)
    assert seen["new_tokens_estimated"] > 2 * seen["would_have_new_tokens_estimated"]


def test_observe_records_no_errata_as_told_when_it_is_switched_on():
    """What was only observed was never said: switching on opens an epoch."""
    observed = Desk(options={"mode": "observe"})
    observed.ask("Hello")
    observed.order.status = "lost"
    observed.ask("And?")
    on = Desk(checkpointer=observed.agent.checkpointer)
    on.order.status = "lost"
    assert report(on.ask("Well?"))["reason"] == "the mode changed"
    assert "Order status: lost" in on.calls[0].system


def test_off_in_between_loses_nothing():
    """After the kill switch the conversation goes on in its epoch."""
    on = Desk()
    on.ask("Hello")
    on.order.status = "lost"
    on.ask("And?")
    off = Desk(checkpointer=on.agent.checkpointer, options={"mode": "off"})
    off.ask("Off?")
    again = Desk(checkpointer=on.agent.checkpointer)
    again.order.status = "found"
    result = again.ask("On?")
    assert report(result)["reason"] == ""
    assert len(updates_in(again.calls[0])) == 2
    assert append_only([on.calls[1], again.calls[0]]) == [True]


@pytest.mark.parametrize("behaviour", ["ignore", "warn"])
def test_what_cannot_be_extended_is_sent_rewritten(behaviour: str):
    """Too long for the window even in a new epoch: the request goes out as the agent would send it."""
    desk = Desk(options={"context_window": 300, "unsupported_model_behavior": behaviour})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = desk.ask("word " * 400)
    assert "Order status: in transit" in desk.calls[0].system
    assert report(result)["reason"].startswith("cannot be extended: the prompt has")
    ours = [str(w.message) for w in caught if "agentkv" in str(w.message)]
    assert len(ours) == (behaviour == "warn")


def test_what_cannot_be_extended_raises_where_asked():
    """`unsupported_model_behavior="raise"`."""
    desk = Desk(options={"context_window": 300, "unsupported_model_behavior": "raise"})
    with pytest.raises(ContextWindowError):
        desk.ask("word " * 400)
    assert issubclass(ContextWindowError, AgentKVError)


def test_a_window_that_the_model_tells_refuses_nothing():
    """Tokens are estimates: what may not fit is still told as errata, and the server decides."""
    model = Scripted(profile={"max_input_tokens": 300})
    desk = Desk(model=model)
    desk.ask("word " * 400)
    desk.order.status = "lost"
    result = desk.ask("And?")
    assert report(result)["reason"] == ""
    assert len(updates_in(desk.calls[1])) == 1


class Lenient(PlainTokenizer):
    """A template that takes system and tool messages anywhere."""

    fingerprint = "lenient"  # type: ignore[misc]

    def render(
        self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False, **_: Any
    ) -> str:
        parts = [json.dumps(list(tools))] if tools else []
        for message in messages:
            calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
            parts.append(f"<|agentkv:start|>{message['role']}\n{message['content']}{calls}<|agentkv:end|>\n")
        return "".join(parts) + ("<|agentkv:start|>assistant\n" if add_generation_prompt else "")


def test_a_known_template_chooses_the_carrier():
    """Where the template takes them, errata are system messages, and tool messages behind results."""
    answers = ["Hi.", "Well.", calling(("lookup", {"number": "7"})), "Known."]

    @field("round", label="Round")
    def number(state: dict[str, Any]) -> int:
        return sum(message.type == "tool" for message in state["messages"])

    desk = Desk(answers, segments=[number], options={"tokenizer": Lenient()})
    desk.ask("Hello")
    desk.ask("And?")
    desk.ask("Look 7 up")
    assert [message.type for message in desk.calls[-1].messages[-3:]] == ["ai", "tool", "tool"]
    assert desk.calls[-1].messages[-1].content == "Update 1: the Round is no longer 0. The Round is now 1."
    desk.ask("Thanks.")
    assert append_only(desk.calls) == [True, True, True, True]


def test_a_known_template_takes_errata_as_system_messages():
    """In front of what the user said."""
    desk = Desk(options={"tokenizer": Lenient()})
    desk.ask("Hello")
    desk.order.status = "lost"
    desk.ask("And?")
    assert [message.type for message in desk.calls[1].messages[-2:]] == ["system", "human"]
    assert desk.calls[1].messages[-1].content == "And?"
    desk.ask("Well?")
    assert append_only(desk.calls) == [True, True]


def test_a_profile_chooses_the_carrier():
    """Behind the user's text instead of in front of it."""
    profile = Profile(carriers=(Carrier.FOLDED_AFTER,))
    desk = Desk(options={"profile": profile})
    desk.ask("Hello")
    desk.order.status = "lost"
    desk.ask("And?")
    assert desk.calls[1].texts[-1].startswith("And?\n\nUpdate 1")


def test_a_window_that_fills_opens_an_epoch():
    """Errata that would overflow the window are written into the prompt, with that reason."""
    desk = Desk(options={"context_window": 900, "profile": Profile(max_errata_share=0.05)})
    reasons = []
    for turn in range(8):
        desk.order.status = f"step {turn}"
        reasons.append(report(desk.ask("And?"))["reason"])
    assert "errata take too much of the context window" in reasons
