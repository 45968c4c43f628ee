"""The error tree is as its docstring draws it."""

from __future__ import annotations

import builtins
import re

import pytest

from agentkv import errors

_LINE = re.compile(r"^    (?P<bars>[│├└─ ]*)(?P<name>\w+Error)(?: \((?P<standard>\w+)\))?")


def drawn() -> list[tuple[str, str | None, str | None]]:
    """Read name, parent and standard base of each class from the docstring."""
    stack: list[str] = []
    rows = []
    for line in (errors.__doc__ or "").splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        depth = len(found["bars"]) // 4
        del stack[depth:]
        rows.append((found["name"], stack[-1] if stack else None, found["standard"]))
        stack.append(found["name"])
    return rows


@pytest.mark.parametrize(("name", "parent", "standard"), drawn())
def test_class_has_the_parent_and_standard_base_that_are_drawn(
    name: str, parent: str | None, standard: str | None
) -> None:
    """A class subclasses what stands above it in the drawing, and the standard exception in brackets."""
    made = getattr(errors, name)
    assert issubclass(made, getattr(errors, parent) if parent else Exception)
    if standard is not None:
        assert getattr(builtins, standard) in made.__bases__


def test_every_class_is_drawn() -> None:
    """No error is missing from the drawing, and none is drawn that does not exist."""
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert {name for name, _, _ in drawn()} == defined


def test_every_class_says_when_it_is_raised() -> None:
    """Each class has a docstring of its own."""
    assert all(vars(getattr(errors, name)).get("__doc__") for name, _, _ in drawn())
