"""What is wrong is said at the entry, and nothing is lost."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from agentkv import AgentKVContext, Field, Inline, Policy, Tools
from agentkv.errors import AgentKVError, ConfigurationError, SegmentError, ValueRenderError
from agentkv.testing import ScriptedBackend
from tests import templates

POLICY = Policy("Be brief.")


@pytest.mark.parametrize("backend", [None, "gpt-4", ScriptedBackend, object()])
def test_what_is_no_backend_is_refused(backend: Any) -> None:
    """A name, a class or nothing cannot run a conversation."""
    with pytest.raises(ConfigurationError, match="is no backend"):
        AgentKVContext(backend, [POLICY])


@pytest.mark.parametrize("segments", [POLICY, None, 5])
def test_segments_are_a_list(segments: Any) -> None:
    """A single segment is not taken for a list of them."""
    with pytest.raises(SegmentError, match="give a list of segments"):
        AgentKVContext(ScriptedBackend(), segments)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tenant", 5),
        ("tenant", ""),
        ("profile", "generic"),
        ("sampling", {"max_tokens": 5}),
        ("costs", {"a": 1}),
        ("conversation", 7),
        ("mode", "sometimes"),
        ("salt_key", b"short"),
    ],
)
def test_options_of_the_wrong_kind_are_named(option: str, value: Any) -> None:
    """The message names the option; nothing waits for the first call."""
    with pytest.raises(ConfigurationError) as caught:
        AgentKVContext(ScriptedBackend(), [POLICY], **{option: value})
    assert option.partition("_")[0] in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Inline(5),  # type: ignore[arg-type]
        lambda: Tools(print),  # type: ignore[arg-type]
        lambda: Field("k", 1, label=5),  # type: ignore[arg-type]
        lambda: Field("k", 1, unit="a\nUpdate 9: x"),
        lambda: Field("k", 1, depends_on="order"),  # type: ignore[arg-type]
        lambda: Field("k", 1, granularity="week"),  # type: ignore[arg-type]
        lambda: Policy("x", scope="everyone"),  # type: ignore[arg-type]
    ],
)
def test_declarations_of_the_wrong_kind_raise_ours(make: Any) -> None:
    """No bare TypeError or AttributeError leaves a declaration."""
    with pytest.raises(AgentKVError):
        make()


def test_a_value_without_text_is_named_by_its_field() -> None:
    """Declared, set or pulled: the message says which field it is."""
    with pytest.raises(ValueRenderError, match="'weight'"):
        Field("weight", object())
    with AgentKVContext(ScriptedBackend(), [POLICY, Field("weight", 1)]) as ctx:
        with pytest.raises(ValueRenderError, match="'weight'"):
            ctx.set("weight", object())
        ctx.field("height")(object)
        with pytest.raises(ValueRenderError, match="'height'"):
            ctx.ask("Hi")
        assert len(ctx.ledger) == 0


def test_field_works_with_and_without_brackets() -> None:
    """The bare decorator declares the function under its own name."""
    with AgentKVContext(ScriptedBackend(), [POLICY]) as ctx:

        @ctx.field
        def today() -> str:
            return "Monday"

        @ctx.field(label="Weather")
        def weather() -> str:
            return "rain"

        ctx.ask("Hi")
        assert {key: told.text for key, told in ctx.ledger.state.fields.items()} == {
            "today": "Monday",
            "weather": "rain",
        }
        assert today() == "Monday"


def test_a_template_that_is_not_prefix_stable_is_said_at_entry(caplog: pytest.LogCaptureFixture) -> None:
    """One warning names what moves; a stable template says nothing."""
    with caplog.at_level(logging.WARNING, "agentkv"):
        with AgentKVContext(ScriptedBackend(), [POLICY]):
            pass
        assert caplog.messages == []
        with AgentKVContext(ScriptedBackend(tokenizer=templates.load("mistral")), [POLICY]):
            pass
    assert len(caplog.messages) == 1
    assert "not prefix-stable" in caplog.messages[0]


def test_a_placeholder_without_inline_is_said_at_entry(caplog: pytest.LogCaptureFixture) -> None:
    """A declared field's key in braces in plain text is hardly meant; other braces are."""
    plain = Policy('You serve {name}. Answer as {"a": {}}.')
    with caplog.at_level(logging.WARNING, "agentkv"), AgentKVContext(ScriptedBackend(), [plain]):
        pass
    assert caplog.messages == []
    named = [plain, Field("name", "Ann")]
    with caplog.at_level(logging.WARNING, "agentkv"), AgentKVContext(ScriptedBackend(), named):
        pass
    assert len(caplog.messages) == 1
    assert "policy:policy holds {name}" in caplog.messages[0]
