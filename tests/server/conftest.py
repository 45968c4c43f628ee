"""A real vLLM server for the tests that need one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from scripts.vllm_server import DType, Endpoints, Options, Server, serving
from scripts.vllm_server.options import ROOT, chosen_dtype
from tests.conftest import require
from tests.server.splices import SpliceServer

# The connector's parts that need no vLLM are tested here too.
sys.path.insert(0, str(ROOT / "integrations" / "vllm"))

_SERVERS: Final = frozenset({"vllm_server", "splice_server", "exact_server"})
_START_LIMIT_S: Final = 400
"""A minute is enough on a machine that does nothing else."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give whichever test comes first the time that the server takes to start, beside its own."""
    for item in items:
        if _SERVERS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.timeout(2 * _START_LIMIT_S + 300))


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


@pytest.fixture(scope="session")
def exact_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server without the connector whose answers do not change with the batch: one that runs in float32."""
    if os.environ.get("AGENTKV_TEST_VLLM") or chosen_dtype(DType.AUTO) is DType.FLOAT32:
        yield request.getfixturevalue("vllm_server")
        return
    options = Options(
        python=request.getfixturevalue("vllm_python"),
        model=str(request.getfixturevalue("small_model_dir")),
        dtype=DType.FLOAT32,
        kv_gib=1,
        max_model_len=2048,
        state_dir=tmp_path_factory.mktemp("vllm-exact"),
        limit_s=_START_LIMIT_S,
    )
    with serving(options) as server:
        yield server


@pytest.fixture(scope="session")
def splice_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SpliceServer]:
    """A server with the connector, in float32: that at ``AGENTKV_TEST_SPLICE_VLLM`` if it is set.

    The folder of its artifacts is then ``AGENTKV_TEST_SPLICE_STORE``, on this machine.
    """
    address = os.environ.get("AGENTKV_TEST_SPLICE_VLLM")
    if address:
        given = os.environ.get("AGENTKV_TEST_SPLICE_STORE", "")
        require(given, "AGENTKV_TEST_SPLICE_STORE has to name the artifact folder of that server")
        yield SpliceServer(Server.at(address), Path(given))
        return
    folder = tmp_path_factory.mktemp("artifacts")
    options = Options(
        python=request.getfixturevalue("vllm_python"),
        model=str(request.getfixturevalue("small_model_dir")),
        dtype=DType.FLOAT32,
        kv_gib=1,
        max_model_len=4096,
        endpoints=Endpoints.DEVELOPMENT,
        connector={"store": str(folder), "compile": "on"},
        state_dir=tmp_path_factory.mktemp("vllm-splice"),
        limit_s=_START_LIMIT_S,
    )
    with serving(options) as server:
        yield SpliceServer(server, folder)
