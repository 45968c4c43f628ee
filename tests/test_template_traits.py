"""What is measured of each family's template."""

from __future__ import annotations

import datetime as dt

import pytest

from agentkv.errors import TemplateError
from agentkv.template import Acceptance, Reasoning, TemplateTraits, measure, pinned_date
from tests.templates import FAMILIES, load

ACCEPTED, MOVED, DROPPED, REFUSED = (
    Acceptance.ACCEPTED,
    Acceptance.MOVED,
    Acceptance.DROPPED,
    Acceptance.REFUSED,
)


@pytest.mark.parametrize(
    ("name", "leading", "late", "tool"),
    [
        ("chatml", ACCEPTED, ACCEPTED, ACCEPTED),
        ("llama", ACCEPTED, ACCEPTED, ACCEPTED),
        ("gemma", REFUSED, REFUSED, REFUSED),
        ("qwen", ACCEPTED, ACCEPTED, ACCEPTED),
        ("mistral", MOVED, REFUSED, ACCEPTED),
        ("strict", ACCEPTED, REFUSED, ACCEPTED),
        ("harmony", ACCEPTED, DROPPED, ACCEPTED),
        ("phi", ACCEPTED, ACCEPTED, ACCEPTED),
    ],
)
def test_what_becomes_of_each_role(
    name: str, leading: Acceptance, late: Acceptance, tool: Acceptance
) -> None:
    """A leading system message, a late one and a tool message are kept, moved, dropped or refused."""
    traits = measure(load(name))
    assert (traits.leading_system, traits.late_system, traits.tool_role) == (leading, late, tool)
    assert traits.late_system_in_tool_round is late


@pytest.mark.parametrize(
    ("name", "append_only"),
    [
        ("chatml", True),
        ("llama", True),
        ("gemma", True),
        ("qwen", True),
        ("phi", True),
        ("plain-close", True),
        ("mistral", False),
        ("strict", False),
        ("harmony", False),
        ("shifting", False),
    ],
)
def test_append_only_is_measured_and_a_break_is_named(name: str, append_only: bool) -> None:
    """A template is append-only, or the message that breaks it is said in words."""
    traits = measure(load(name))
    assert traits.append_only is append_only
    assert (traits.breaks_at is None) is append_only


def test_the_moved_message_is_named() -> None:
    """A template that moves the system text to the last user turn says which text moved, and why."""
    assert measure(load("mistral")).breaks_at == "message 3 (user) changes the text of message 0 (system)"


@pytest.mark.parametrize(("name", "shown", "moved"), [("qwen", 1, 0), ("mistral", 1, 1), ("chatml", 0, 0)])
def test_whether_tools_show_and_stay(name: str, shown: int, moved: int) -> None:
    """Tools are shown at the start, behind the first answer, or nowhere."""
    traits = measure(load(name))
    assert (traits.tools, traits.tools_moved) == (bool(shown), bool(moved))


def test_without_the_tools_probe_no_tools_are_reported() -> None:
    """The tools probe can be left out."""
    assert not measure(load("qwen"), tools_probe=False).tools


@pytest.mark.parametrize(
    ("name", "reasoning", "user_rewrites", "tool_rewrites"),
    [
        ("qwen", Reasoning.STRIPPED_ON_USER, True, False),
        ("harmony", Reasoning.STRIPPED_ON_USER, True, False),
        ("chatml", Reasoning.KEPT, False, False),
        ("shifting", Reasoning.KEPT, True, True),
    ],
)
def test_what_a_message_in_a_tool_round_rewrites(
    name: str, reasoning: Reasoning, user_rewrites: bool, tool_rewrites: bool
) -> None:
    """Where reasoning is stripped, a user message in a tool round rewrites it; a tool one does not."""
    traits = measure(load(name))
    assert traits.reasoning is reasoning
    assert traits.user_in_tool_round_rewrites is user_rewrites
    assert traits.tool_in_tool_round_rewrites is tool_rewrites


def test_alternation_is_measured() -> None:
    """Only the template that demands alternating roles refuses two user messages in a row."""
    assert [name for name in FAMILIES if measure(load(name)).alternation] == ["gemma"]


def test_a_date_is_found_and_can_be_pinned() -> None:
    """A template that writes today's date is found, and writes a pinned one if told to."""
    assert [name for name in FAMILIES if measure(load(name)).date_injected] == ["harmony"]
    text = load("harmony").render([{"role": "user", "content": "Hi"}], **pinned_date(dt.date(2001, 2, 3)))
    assert "Today is 2001-02-03." in text


def test_trimming_is_measured() -> None:
    """Templates that trim a content are told from those that do not."""
    assert [name for name in FAMILIES if measure(load(name)).trims_content] == ["llama", "gemma", "strict"]


def test_a_default_system_text_is_found() -> None:
    """Only the template that speaks of its own accord has a default system text."""
    assert [name for name in FAMILIES if measure(load(name)).default_system] == ["chatml"]


@pytest.mark.parametrize(
    ("name", "close"),
    [("chatml", "<|im_end|>\n"), ("llama", "<|eot|>"), ("harmony", "<|end|>"), ("plain-close", "\n\n")],
)
def test_the_close_of_an_answer(name: str, close: str) -> None:
    """The close is what follows an answer when the conversation goes on."""
    assert measure(load(name)).assistant_close == close


@pytest.mark.parametrize("name", FAMILIES)
def test_traits_survive_json(name: str) -> None:
    """Traits read back from their JSON form are equal."""
    traits = measure(load(name))
    assert TemplateTraits.from_dict(traits.to_dict()) == traits


def test_damaged_traits_are_refused() -> None:
    """Stored traits with a value or a name that is not known say to measure again."""
    stored = measure(load("chatml")).to_dict()
    with pytest.raises(TemplateError, match="measure them again"):
        TemplateTraits.from_dict({**stored, "reasoning": "sometimes"})
    with pytest.raises(TemplateError, match="surprise"):
        TemplateTraits.from_dict({**stored, "surprise": True})
