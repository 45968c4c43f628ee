"""What agentkv.kv offers, and what of it costs nothing to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

import agentkv.kv


@pytest.mark.parametrize("name", agentkv.kv.__all__)
def test_every_name_is_there(name: str) -> None:
    """Also those that are imported when they are first asked for."""
    assert getattr(agentkv.kv, name).__name__ == name


def test_names_are_sorted_and_listed() -> None:
    """As an editor shows them."""
    assert agentkv.kv.__all__ == sorted(agentkv.kv.__all__)
    assert set(agentkv.kv.__all__) <= set(dir(agentkv.kv))


def test_another_name_is_not_there() -> None:
    """As with any module."""
    with pytest.raises(AttributeError, match="has no attribute 'Splice'"):
        agentkv.kv.__getattr__("Splice")


def test_what_a_client_needs_takes_no_torch() -> None:
    """Names, tickets, headers and messages are read without torch, safetensors or numpy."""
    code = (
        "import sys, agentkv.kv, agentkv.kv.artifact, agentkv.kv.protocol, agentkv.kv.tickets\n"
        "print(sorted({'torch', 'safetensors', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
