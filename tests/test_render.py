"""What the frozen prefix and later additions look like, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentkv import Document, Field, Inline, Ledger, Mode, Policy, Profile, Prompt, Skill, Tools
from agentkv.entries import Carrier, RebaseReason
from agentkv.errors import TemplateError
from agentkv.profile import GENERIC
from agentkv.render import Carry, choose_carrier, freeze
from agentkv.template import Acceptance, TemplateTraits, measure
from agentkv.testing import ByteTokenizer
from agentkv.tools import as_text
from tests.desk import cancel, lookup

TRAITS = measure(ByteTokenizer())


def frozen(prompt: Prompt, traits: TemplateTraits = TRAITS, mode: Mode = Mode.ON) -> Any:
    """Freeze a prompt."""
    return freeze(
        prompt,
        Ledger(),
        GENERIC,
        traits,
        reason=RebaseReason.FIRST,
        fingerprint="f",
        carry=Carry(),
        mode=mode,
    )


def test_prefix_is_written_in_order() -> None:
    """Announcement, segments as declared, then the fields that stand alone."""
    prompt = Prompt.of(
        [
            Field("name", "Ada", label="Name"),
            Policy(Inline("You serve {name}.")),
            Skill("returns", "Thirty days."),
            Document("faq", "No refunds.\n"),
            Field("eta", None, label="ETA"),
        ]
    )
    assert frozen(prompt).system.split("\n\n") == [
        GENERIC.wording.announcement,
        "You serve Ada.",
        "## Skill: returns\nThirty days.",
        '<document name="faq">\nNo refunds.\n</document>',
        "## Current facts\n- ETA: none",
    ]


def test_only_the_mode_on_announces() -> None:
    """The other modes write the prompt as the caller would have it."""
    prompt = Prompt.of([Policy("Be brief.")])
    assert frozen(prompt, mode=Mode.OFF).system == "Be brief."
    assert frozen(prompt, mode=Mode.OBSERVE).system == "Be brief."
    assert frozen(prompt).system.endswith("\n\nBe brief.")


def test_empty_prompt_has_no_system_text() -> None:
    """Nothing is announced where nothing can change."""
    assert frozen(Prompt()).system == ""


def test_tools_are_announced_although_they_are_all() -> None:
    """A tool can be withdrawn by an erratum too."""
    assert frozen(Prompt.of([Tools([lookup])])).system == GENERIC.wording.announcement


def test_tools_go_to_the_template_or_into_the_text() -> None:
    """A template that knows tools writes them; otherwise they are part of the system text."""
    prompt = Prompt.of([Policy("p"), Tools([lookup, cancel])])
    known = frozen(prompt)
    assert [tool["function"]["name"] for tool in known.tools] == ["cancel", "lookup"]
    unknown = frozen(prompt, replace(TRAITS, tools=False))
    assert unknown.tools == ()
    assert unknown.system.endswith(as_text([tool.schema for tool in prompt.tools]))
    assert unknown.tool_texts == known.tool_texts


def test_values_in_text_stay_on_their_line() -> None:
    """A value with a line break stands as a JSON string."""
    prompt = Prompt.of([Policy(Inline("You serve {name}.")), Field("name", "A\nB")])
    assert frozen(prompt).system.endswith('You serve "A\\nB".')


@pytest.mark.parametrize(
    ("traits", "in_round", "expected"),
    [
        ({}, False, Carrier.SYSTEM_BEFORE),
        ({"late_system": Acceptance.REFUSED}, False, Carrier.USER_BEFORE),
        ({"late_system": Acceptance.DROPPED}, False, Carrier.USER_BEFORE),
        ({"late_system": Acceptance.MOVED}, False, Carrier.USER_BEFORE),
        ({"late_system": Acceptance.REFUSED, "alternation": True}, False, Carrier.FOLDED_BEFORE),
        ({"late_system_in_tool_round": Acceptance.REFUSED}, False, Carrier.SYSTEM_BEFORE),
        ({"late_system_in_tool_round": Acceptance.REFUSED}, True, Carrier.USER_BEFORE),
    ],
)
def test_carrier_beside_a_user_message(traits: dict[str, Any], in_round: bool, expected: Carrier) -> None:
    """The first of the profile's that the template was measured to take in this place."""
    assert choose_carrier(Profile(), replace(TRAITS, **traits), has_user=True, in_round=in_round) is expected


@pytest.mark.parametrize(
    ("traits", "expected"),
    [
        ({}, Carrier.TOOL),
        ({"tool_role": Acceptance.REFUSED}, Carrier.FOLDED_TOOL),
        ({"tool_in_tool_round_rewrites": True}, Carrier.FOLDED_TOOL),
    ],
)
def test_carrier_behind_tool_results(traits: dict[str, Any], expected: Carrier) -> None:
    """A tool message where it rewrites nothing, else the tail of the last result."""
    assert choose_carrier(Profile(), replace(TRAITS, **traits), has_user=False, in_round=True) is expected


def test_template_that_takes_no_carrier_is_refused() -> None:
    """The message says which were tried and what to add."""
    profile = Profile(carriers=(Carrier.SYSTEM_AFTER, Carrier.USER_BEFORE))
    traits = replace(TRAITS, late_system=Acceptance.DROPPED, alternation=True)
    with pytest.raises(TemplateError, match="add a folded carrier"):
        choose_carrier(profile, traits, has_user=True)
