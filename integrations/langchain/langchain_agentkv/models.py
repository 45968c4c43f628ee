"""What is asked of a chat model before it is called."""

from __future__ import annotations

from typing import Any


def identity(model: Any) -> str:
    """Return which model it is: another one reads another prompt."""
    inner = getattr(model, "bound", model)
    name = getattr(inner, "model_name", None) or getattr(inner, "model", None)
    return f"{type(inner).__name__}:{name}" if isinstance(name, str) else type(inner).__name__


def window_of(model: Any) -> int | None:
    """Return the most tokens that a model takes, if its profile says."""
    profile = getattr(model, "profile", None)
    most = profile.get("max_input_tokens") if isinstance(profile, dict) else None
    return most if isinstance(most, int) and most > 0 else None


def forced_tool(choice: object) -> str:
    """Return the name of the tool that a tool choice forces; empty if it forces none by name."""
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, dict) else None
        return str(name or "")
    return choice if isinstance(choice, str) and choice not in ("auto", "none", "any", "required") else ""
