"""Segments check themselves, and a prompt changes by copy."""

from __future__ import annotations

import datetime as dt

import pytest

from agentkv import Deletion, Document, Field, Granularity, Inline, Policy, Prompt, Scope, Skill, Tools
from agentkv.errors import FieldError, SegmentError
from tests.desk import cancel, lookup


@pytest.mark.parametrize("template", ["{", "}", "{}", "{a!r}", "{a:>3}", "{a[0]}", "{0[b]}"])
def test_malformed_inline_text_is_refused(template: str) -> None:
    """A brace that is not closed, and a placeholder that is more than a key, raise at once."""
    with pytest.raises(SegmentError, match="double a brace"):
        Inline(template)


def test_inline_text_names_its_fields_in_order() -> None:
    """Keys with dots and colons are read; doubled braces are literal."""
    text = Inline("{{x}} serves {order:7.status} and {name}")
    assert text.keys == ("order:7.status", "name")
    assert "".join(literal for literal, _ in text.parts[:3]) == "{x} serves "


@pytest.mark.parametrize("kind", [Policy, lambda text: Skill("s", text), lambda text: Document("d", text)])
@pytest.mark.parametrize("text", ["", " \n", 3, None, "a\ud800"])
def test_segment_without_sendable_text_is_refused(kind: type, text: object) -> None:
    """Empty text, text that is no str and a lone surrogate raise a SegmentError."""
    with pytest.raises(SegmentError):
        kind(text)


@pytest.mark.parametrize("name", ["", " ", "two\nlines", 3])
def test_segment_name_is_one_printable_line(name: object) -> None:
    """A name that could break a line is refused."""
    with pytest.raises(SegmentError, match="one line"):
        Skill(name, "text")  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["", "a b", "ü", "a\n", "policy:x", "tool:y", 3])
def test_malformed_field_key_is_refused(key: object) -> None:
    """A key of other characters, or with a segment's prefix, raises a FieldError."""
    with pytest.raises(FieldError):
        Field(key, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("label", ["two\nlines", " outer ", "a\u2028b"])
def test_field_label_is_one_line(label: str) -> None:
    """A label that could break a line is refused."""
    with pytest.raises(FieldError, match="one line"):
        Field("key", 1, label=label)


def test_field_makes_a_label_from_its_key() -> None:
    """Dots and underscores read as spaces."""
    assert Field("order.delivery_date", 1).label == "Order delivery date"


def test_told_copy_keeps_everything_but_the_text() -> None:
    """`told` replaces the canonical text and nothing else."""
    field = Field(
        "t",
        dt.datetime(2026, 1, 2, 3, 4, tzinfo=dt.UTC),
        label="T",
        unit="h",
        granularity=Granularity.DAY,
        sensitive=True,
    )
    copy = field.told("x")
    assert copy.text == "x"
    assert (copy.label, copy.unit, copy.granularity, copy.sensitive) == ("T", "h", Granularity.DAY, True)


def test_two_parts_of_one_key_are_refused() -> None:
    """A key, a label or a tool name that stands for two things raises and names it."""
    with pytest.raises(SegmentError, match="skill:a"):
        Prompt.of([Skill("a", "x"), Skill("a", "y")])
    with pytest.raises(FieldError, match="declared twice"):
        Prompt.of([Field("a", 1), Field("a", 2)])
    with pytest.raises(FieldError, match="could not tell them apart"):
        Prompt.of([Field("a", 1, label="X"), Field("b", 2, label="X")])
    with pytest.raises(SegmentError, match="tool:lookup"):
        Prompt.of([Tools([lookup]), Tools([lookup])])


def test_what_is_no_segment_is_refused() -> None:
    """A stray object raises and says what to give."""
    with pytest.raises(SegmentError, match="not a segment"):
        Prompt.of(["text"])  # type: ignore[list-item]


def test_undeclared_inline_field_is_found() -> None:
    """`check` names the segment and the field it shows."""
    with pytest.raises(SegmentError, match=r"policy:policy shows field 'name'.*declared are: age"):
        Prompt.of([Policy(Inline("You serve {name}.")), Field("age", 3)]).check()


def test_tools_are_sorted_by_name() -> None:
    """The order of discovery changes nothing."""
    assert Prompt.of([Tools([lookup, cancel])]).tools == Prompt.of([Tools([cancel]), Tools([lookup])]).tools


def test_changes_leave_the_original_alone() -> None:
    """`with_part`, `without` and `with_texts` return copies."""
    prompt = Prompt.of([Policy("p"), Field("a", 1)])
    changed = prompt.with_part(Skill("s", "t")).without("a").with_part(Tools([lookup]))
    assert [segment.key for segment in prompt.segments] == ["policy:policy"]
    assert list(prompt.fields) == ["a"]
    assert [segment.key for segment in changed.segments] == ["policy:policy", "skill:s"]
    assert not changed.fields
    assert prompt.with_texts({"a": "1"}) is prompt


def test_part_of_the_same_key_is_replaced_in_its_place() -> None:
    """A new text takes the old one's place."""
    prompt = Prompt.of([Skill("a", "1"), Skill("b", "2")]).with_part(Skill("a", "3"))
    assert [(s.name, s.text) for s in prompt.segments] == [("a", "3"), ("b", "2")]


def test_removing_what_is_not_there_names_what_is() -> None:
    """The error lists every key that could be meant."""
    with pytest.raises(SegmentError, match=r"policy:policy, tool:lookup, a"):
        Prompt.of([Policy("p"), Tools([lookup]), Field("a", 1)]).without("b")


def test_how_it_was_removed_is_forgotten_when_it_comes_back() -> None:
    """A hard deletion long ago does not make a later plain removal hard."""
    prompt = Prompt.of([Skill("a", "1")]).without("skill:a", Deletion.HARD)
    assert prompt.deletions == {"skill:a": Deletion.HARD}
    back = prompt.with_part(Skill("a", "1"))
    assert not back.deletions
    assert not back.without("skill:a").deletions


def test_lint_finds_what_breaks_a_shared_prefix() -> None:
    """A segment with fields, or of one session, before a shared one is a finding."""
    prompt = Prompt.of(
        [
            Policy(Inline("Serve {name}.")),
            Document("mine", "x", Scope.SESSION),
            Skill("shared", "y"),
            Field("name", "A"),
        ]
    )
    assert [(f.segment, f.before) for f in prompt.lint()] == [
        ("policy:policy", "skill:shared"),
        ("document:mine", "skill:shared"),
    ]


def test_arranged_prompt_has_no_findings() -> None:
    """Shared text comes first, and what moves keeps its order."""
    prompt = Prompt.of(
        [Policy(Inline("{a}")), Document("mine", "x", Scope.SESSION), Skill("s", "y"), Field("a", 1)]
    )
    arranged = prompt.arranged()
    assert [s.key for s in arranged.segments] == ["skill:s", "policy:policy", "document:mine"]
    assert not arranged.lint()
