"""What importing the package takes."""

from __future__ import annotations

import subprocess
import sys

import pytest

import langchain_agentkv


def run(script: str) -> str:
    """Run a script in a new interpreter and return what it printed."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_package_needs_langchains_core_alone():
    """Neither langchain nor langgraph nor an HTTP client of OpenAI's is imported before it is asked for."""
    script = (
        "import sys, langchain_agentkv\n"
        "heavy = ('langchain', 'langgraph', 'langchain_openai', 'torch')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert run(script) == "[]"


@pytest.mark.parametrize(
    ("missing", "code", "extra"),
    [
        ("langchain", "langchain_agentkv.AgentKVMiddleware", "agents"),
        ("langchain", "langchain_agentkv.create_agent", "agents"),
        ("langchain_openai", "from langchain_agentkv import ChatVLLM", "vllm"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(missing: str, code: str, extra: str):
    """The message says what to install."""
    script = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "import langchain_agentkv\n"
        "from agentkv.errors import MissingDependencyError\n"
        f"try:\n    {code}\nexcept MissingDependencyError as error:\n    print(error)"
    )
    assert f"pip install 'langchain-agentkv[{extra}]'" in run(script)


def test_public_names_are_there():
    """Every name of `__all__` can be had, and no other by accident."""
    assert all(hasattr(langchain_agentkv, name) for name in langchain_agentkv.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = langchain_agentkv.nothing
