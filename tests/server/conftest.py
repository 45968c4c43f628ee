"""A real vLLM server for the tests that need one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from scripts.vllm_server import Endpoints, Options, Server, serving
from tests.conftest import require

_START_LIMIT_S: Final = 400
"""A minute is enough on a machine that does nothing else."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give whichever test comes first the time that the server takes to start, beside its own."""
    for item in items:
        if "vllm_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(_START_LIMIT_S + 300))


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter that has vLLM, for a test that starts a server of its own."""
    python = Options().python
    require((python.parents[1] / ".installed").is_file(), "vLLM is missing: run `make vllm-venv`")
    return python


@pytest.fixture(scope="session")
def vllm_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the small model: that at ``AGENTKV_TEST_VLLM`` if it is set, or one for the session.

    The session's own has vLLM's development endpoints. It is shared: a test that counts cached tokens takes a
    cache salt or a text of its own.
    """
    address = os.environ.get("AGENTKV_TEST_VLLM")
    if address:
        yield Server.at(address)
        return
    options = Options(
        python=request.getfixturevalue("vllm_python"),
        model=str(request.getfixturevalue("small_model_dir")),
        kv_gib=2,
        endpoints=Endpoints.DEVELOPMENT,
        state_dir=tmp_path_factory.mktemp("vllm"),
        limit_s=_START_LIMIT_S,
    )
    with serving(options) as server:
        yield server
