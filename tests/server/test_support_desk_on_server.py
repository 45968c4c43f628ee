"""The support desk runs on a vLLM server as it does on the embedded model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts.vllm_server import Server

ROOT = Path(__file__).parents[2]
SAID = """What is the status of my order?
/set order.status delivered
What is the status of my order?
/report
/quit
"""


def test_the_support_desk_chats_on_a_server(vllm_server: Server, small_model_dir: Path) -> None:
    """Same code, another backend: the row that changes is told as an erratum and the prefix stays hot."""
    command = [sys.executable, "-m", "examples.support_desk", "--interactive", "--backend", "vllm"]
    done = subprocess.run(
        [*command, "--url", vllm_server.url, "--tokenizer", str(small_model_dir)],
        input=SAID,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        check=True,
    )
    assert f"{vllm_server.model} on {vllm_server.url}" in done.stdout
    assert "erratum(order.status)" in done.stdout
    assert "2 turns, 1 errata" in done.stdout


def test_a_server_that_is_not_there_is_one_line(small_model_dir: Path) -> None:
    """No traceback, the address, and a status that says so."""
    command = [sys.executable, "-m", "examples.support_desk", "--backend", "vllm"]
    done = subprocess.run(
        [*command, "--url", "http://127.0.0.1:9", "--tokenizer", str(small_model_dir)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "127.0.0.1:9" in done.stderr
