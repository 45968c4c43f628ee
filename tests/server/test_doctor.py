"""`agentkv.doctor` on a real vLLM server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentkv.doctor import Examination, ServerOptions, Status, examine, tokens
from agentkv.doctor.session import Asked, Session
from agentkv.http import HttpClient
from scripts.vllm_server import Server
from tests.templates import load


@pytest.fixture(scope="module")
def examined(vllm_server: Server, small_model_dir: Path) -> Examination:
    """What is found of the server, once for all tests."""
    return examine(ServerOptions(vllm_server.url), model=vllm_server.model, tokenizer=small_model_dir)


def test_everything_that_is_needed_is_there(examined: Examination) -> None:
    """No needed check fails, and none is left out."""
    assert {f.name: f.found for f in examined.findings if f.needed and f.status is not Status.OK} == {}
    assert examined.ok


def test_nothing_is_a_warning(examined: Examination) -> None:
    """The server is started with all that agentkv can use."""
    assert [f.name for f in examined.findings if f.status is Status.WARNING] == []


def test_the_block_size_is_measured(examined: Examination) -> None:
    """Cached counts of real prefixes give what the server was started with."""
    assert examined["block size"].found.startswith("32 tokens, as /metrics says (96 of 97, 64 of 96")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("scale-out", "render, generate and derender answer"),
        ("tool parser", "a forced call was parsed"),
        ("structured output", "an answer was held to a choice of words"),
        ("parameters", "return_token_ids and cache_salt arrive; unknown ones are ignored"),
        ("salts", "a prompt that is cached under one salt is found neither under another nor without one"),
        ("connector", "absent: splices need it, errata do not"),
        ("late system messages", "accepted where they stand"),
        ("append-only", "each rendered prompt, with its answer, begins the next"),
        ("date", "none is written"),
    ],
)
def test_what_the_server_offers_is_found(examined: Examination, name: str, found: str) -> None:
    """Each finding says what was measured."""
    assert (examined[name].status, examined[name].found) == (Status.OK, found)


def test_priorities_are_accepted(examined: Examination) -> None:
    """The server was started with priority scheduling."""
    assert examined["priority"].status is Status.OK


def test_a_template_without_tools_leaves_tool_choice_unchecked(examined: Examination) -> None:
    """The small model's template shows no tools, so nothing can be taken out."""
    assert examined["tool_choice none"].status is Status.UNCHECKED


def test_another_tokenizer_is_noticed(vllm_server: Server) -> None:
    """The server's own tokenizer tells it from one that was trained here."""
    session = Session(
        HttpClient(ServerOptions(vllm_server.url)), Asked(vllm_server.model, tokenizer=load("qwen"))
    )
    found = tokens.tokenizer(session)
    session.http.close()
    assert found.status is Status.FAILED
    assert "they part at index" in found.found


def test_the_command_passes(vllm_server: Server, small_model_dir: Path) -> None:
    """Its JSON holds the same, alone on standard output, and it ends with 0."""
    words = ["doctor", vllm_server.url, "--tokenizer", str(small_model_dir), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "agentkv", *words],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["url"], found["model"], found["ok"]) == (vllm_server.url, vllm_server.model, True)
