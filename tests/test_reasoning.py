"""Reasoning is told apart from the answer, however the answer is cut."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentkv.errors import ConfigurationError
from agentkv.reasoning import Piece, ReasoningSplitter, opens_reasoning, split

SNIPPETS = ["<think>", "</think>", "<thi", "nk>", "</", "<", "\n", " ", "\t", "Yes.", "é", "a b"]
answers = st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=3), max_size=10).map("".join)


def pushed(pieces: list[str], *, inside: bool) -> Piece:
    """Push pieces one after another and join what comes out."""
    splitter = ReasoningSplitter(inside=inside)
    made = [*(splitter.push(piece) for piece in pieces), splitter.flush()]
    return Piece("".join(p.text for p in made), "".join(p.reasoning for p in made))


@given(answers, st.booleans(), st.data())
def test_it_does_not_matter_where_an_answer_is_cut(text: str, inside: bool, data: st.DataObject) -> None:
    """Pushed in any pieces, empty ones too, an answer is split as it is in one."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    assert pushed(pieces, inside=inside) == split(text, inside=inside)
    assert pushed(list(text), inside=inside) == split(text, inside=inside)


@given(answers, st.booleans())
@example(" <think>\n\n</think> \n", False)
@example("<think><think>a</think></think>", True)
def test_it_is_what_one_pattern_over_the_whole_answer_finds(text: str, inside: bool) -> None:
    """Text and reasoning are those of an expression that reads the whole answer at once."""
    opening = r"(?:\s*<think>)?" if inside else r"\s*<think>"
    found = re.fullmatch(opening + r"\s*(?:(.*?)\s*</think>\s*(.*)|((?:(?!</think>).)*))", text, re.DOTALL)
    expected = Piece(found[2] or "", found[1] or found[3] or "") if found else Piece(text)
    assert split(text, inside=inside) == expected


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nIt is late.\n</think>\n\nYes.\n", False, Piece("Yes.\n", "It is late.")),
        ("\n <think>It is late.</think>Yes.", False, Piece("Yes.", "It is late.")),
        ("\nIt is late.\n</think>\n\nYes.", True, Piece("Yes.", "It is late.")),
        ("<think>It is late.</think>Yes.", True, Piece("Yes.", "It is late.")),
        ("<think>\n\n</think>\n\nYes.", False, Piece("Yes.")),
    ],
)
def test_a_leading_block_is_reasoning(text: str, inside: bool, expected: Piece) -> None:
    """Neither part holds a tag or the white space directly around one."""
    assert split(text, inside=inside) == expected


@pytest.mark.parametrize("text", ["  Yes. <think>no</think>", "Yes.</think>", " \n<thin", "", " \n"])
def test_an_answer_without_a_leading_block_is_text_to_the_letter(text: str) -> None:
    """A tag that comes later, alone or unfinished is plain text."""
    assert split(text) == Piece(text)


def test_a_second_block_is_plain_text() -> None:
    """Behind the first close tag nothing is a tag any more."""
    answer = "<think>a</think>b <think>c</think>"
    assert split(answer) == Piece("b <think>c</think>", "a")


@pytest.mark.parametrize(
    ("text", "inside"), [("<think>It is late. </thi", False), ("It is late. </thi", True)]
)
def test_an_answer_that_ends_inside_the_block_is_all_reasoning(text: str, inside: bool) -> None:
    """An unfinished close tag is part of what was thought."""
    assert split(text, inside=inside) == Piece("", "It is late. </thi")


def test_only_the_beginning_of_a_tag_is_held_back() -> None:
    """What can be no tag any more is given at once, as is all text behind the block."""
    splitter = ReasoningSplitter(inside=False)
    steps = ["<thi", "nk>", "a < b", " </th", "e", "n", "</think>", "\n", "Yes. <", "\n"]
    assert [splitter.push(step) for step in steps] == [
        Piece(),
        Piece(),
        Piece("", "a < b"),
        Piece(),
        Piece("", " </the"),
        Piece("", "n"),
        Piece(),
        Piece(),
        Piece("Yes. <"),
        Piece("\n"),
    ]
    assert splitter.flush() == Piece()


def test_text_is_given_at_once_where_it_can_begin_no_block() -> None:
    """The first letter decides; white space before it is kept."""
    splitter = ReasoningSplitter(inside=False)
    assert [splitter.push(step) for step in (" ", "<", "b", ">")] == [
        Piece(),
        Piece(),
        Piece(" <b"),
        Piece(">"),
    ]


def test_other_tags_can_be_given() -> None:
    """The tags are the caller's, even where one is part of the other."""
    assert split("THINK a /THINK b", "THINK", "/THINK") == Piece("b", "a")
    assert not opens_reasoning("THINK a /THINK", "THINK", "/THINK")
    assert opens_reasoning("/THINK THINK\n", "THINK", "/THINK")


@pytest.mark.parametrize(
    ("tail", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<think>a</think>b<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("What does <think> mean?<|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_a_prompt_opens_a_block_if_it_ends_with_the_open_tag(tail: str, opened: bool) -> None:
    """The last open tag counts if it is not closed and only white space follows."""
    assert opens_reasoning(tail) is opened


@pytest.mark.parametrize(("opening", "close"), [("", "</t>"), ("<t>", "</t>\n"), ("<t>", "<t>")])
def test_tags_that_cannot_be_told_are_refused(opening: str, close: str) -> None:
    """Empty, padded and equal tags raise, with the tag in the message."""
    for use in (split, opens_reasoning):
        with pytest.raises(ConfigurationError, match="_tag"):
            use("x", opening, close)
