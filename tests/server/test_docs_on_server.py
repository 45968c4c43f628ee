"""The pages whose code needs a vLLM server are run on one."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

import agentkv.models
from scripts.vllm_server import Server
from tests.test_docs import ON_SERVER, PAGES, run_page

ADDRESS = "http://127.0.0.1:8000"
"""What the pages show."""
ON_SERVER_PAGES = [page for page in PAGES if ON_SERVER in page.read_text(encoding="utf-8")]


def test_there_are_such_pages() -> None:
    """The list is not empty by mistake."""
    assert [page.name for page in ON_SERVER_PAGES] == ["vllm.md"]


@pytest.mark.parametrize("page", ON_SERVER_PAGES, ids=lambda page: page.name)
def test_every_python_block_runs_on_a_server(
    page: Path, vllm_server: Server, small_model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Blocks run in order, with the address of the tests' server, and print what is shown."""
    module = types.ModuleType("page_on_a_server")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    resolve = agentkv.models.resolve
    monkeypatch.setattr("agentkv.models.resolve", lambda _: resolve(small_model_dir))
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    assert ADDRESS in text
    assert run_page(text.replace(ADDRESS, vllm_server.url), page.name, vars(module)) > 0
