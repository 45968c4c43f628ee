"""The public names are pinned: adding or losing one is a decision, not an accident."""

from __future__ import annotations

import agentkv

NAMES = [
    "AgentKVContext",
    "AgentKVError",
    "AsyncAgentKVContext",
    "AsyncStream",
    "Costs",
    "Deletion",
    "Document",
    "Field",
    "Granularity",
    "Inline",
    "Ledger",
    "Mode",
    "Policy",
    "Profile",
    "Prompt",
    "Reply",
    "Restate",
    "SamplingOptions",
    "Scope",
    "SessionReport",
    "Skill",
    "Splicing",
    "Stream",
    "ToolCall",
    "ToolResult",
    "Tools",
    "TurnReport",
    "UserMessage",
    "Wording",
    "__version__",
    "begin",
    "finish",
    "mutable",
    "mutable_fields",
]


def test_public_names_are_the_pinned_ones() -> None:
    """`agentkv.__all__` is exactly the pinned list, in its order."""
    assert agentkv.__all__ == NAMES


def test_public_names_are_sorted() -> None:
    """The list is sorted, so that a name has one place."""
    assert sorted(NAMES) == NAMES


def test_every_public_name_is_there() -> None:
    """Each name can be imported."""
    assert all(hasattr(agentkv, name) for name in NAMES)
