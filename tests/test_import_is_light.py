"""Importing agentkv costs little and changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HEAVY = frozenset(
    {
        "accelerate",
        "gguf",
        "httpx",
        "jinja2",
        "langchain",
        "langchain_core",
        "langgraph",
        "numpy",
        "opentelemetry",
        "rich",
        "safetensors",
        "tokenizers",
        "torch",
        "transformers",
        "typer",
        "vllm",
    }
)
"""Top-level packages that a program which only imports agentkv must not pay for."""

MOST_MODULES = 420
"""Modules that an import may load beyond the interpreter's own: about 230 are pydantic with the part of the
standard library that it uses, and one heavy dependency would add hundreds."""

PROBE = """
import json, os, sys, threading

writes, calls = [], []

def watch(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            writes.append(str(path))
    elif event.split(".")[0] in {"shutil", "socket", "subprocess", "tempfile"}:
        calls.append(event)
    elif event in {"os.fork", "os.mkdir", "os.putenv", "os.remove", "os.rename", "os.rmdir", "os.unsetenv",
                   "os.system", "os.chdir", "os.posix_spawn", "signal.pthread_kill"}:
        calls.append(event)

before, environment, threads = set(sys.modules), dict(os.environ), threading.active_count()
handlers = list(sys.meta_path), list(sys.path), sys.excepthook
sys.addaudithook(watch)
import agentkv
result = {
    "modules": sorted(set(sys.modules) - before),
    "environment": dict(os.environ) == environment,
    "threads": threading.active_count() - threads,
    "hooks": handlers == (list(sys.meta_path), list(sys.path), sys.excepthook),
    "writes": list(writes),
    "calls": list(calls),
}
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a fresh interpreter saw while it imported agentkv in an empty home folder."""
    home = tmp_path_factory.mktemp("home")
    environment = os.environ | {"HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", PROBE],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen | {"left": [path.name for path in home.iterdir()]}


def test_import_loads_no_heavy_dependency(imported: dict[str, Any]) -> None:
    """None of the packages behind the extras, nor those of the command line, is loaded."""
    loaded = {name.partition(".")[0] for name in imported["modules"]}
    assert "agentkv" in loaded
    assert loaded & HEAVY == set()


def test_import_loads_few_modules(imported: dict[str, Any]) -> None:
    """The number of loaded modules stays below its bound, whatever their names are."""
    assert len(imported["modules"]) <= MOST_MODULES


def test_import_writes_no_file(imported: dict[str, Any]) -> None:
    """No file is opened for writing, and the home folder stays empty."""
    assert imported["writes"] == []
    assert imported["left"] == []


def test_import_makes_no_call_to_the_outside(imported: dict[str, Any]) -> None:
    """No socket, process, folder or change of the environment is asked of the system."""
    assert imported["calls"] == []
    assert imported["environment"]


def test_import_starts_no_thread_and_sets_no_hook(imported: dict[str, Any]) -> None:
    """Threads, import hooks, the module path and the exception hook are as before."""
    assert imported["threads"] == 0
    assert imported["hooks"]
