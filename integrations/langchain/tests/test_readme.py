"""README.md is run."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from scripted import Scripted, append_only, calling, updates_in

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"(<!-- output -->\n)?```(\w+)\n(.*?)```", re.DOTALL)


def test_the_readme_runs(monkeypatch: pytest.MonkeyPatch):
    """Every Python block runs, and an output block is what the block before printed."""
    answers = [
        "It is on its way.",
        calling(("cancel", {"number": "7"})),
        "It is cancelled.",
        "You are welcome.",
    ]
    model = Scripted(answers=answers)
    module = ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)
    names = vars(module)
    names.update(model=model, saver=InMemorySaver())
    printed = ""
    for is_output, language, code in BLOCK.findall(README.read_text()):
        if language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(code, "README.md", "exec"), names)
            printed = out.getvalue()
        elif is_output:
            assert printed == code
    assert append_only(model.calls[:3]) == [True, True]
    assert updates_in(model.calls[2]) == [
        "Update 1: the Order status is no longer in transit. The Order status is now cancelled."
    ]


def test_the_first_example_is_short():
    """At most 25 lines."""
    first = next(code for _, language, code in BLOCK.findall(README.read_text()) if language == "python")
    assert len(first.splitlines()) <= 25
