"""`make vllm` and `make vllm-stop`: the script behind them, with a stand-in for vLLM, and once with vLLM."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.vllm_server import (
    DType,
    Endpoints,
    Execution,
    LocalServer,
    Options,
    Server,
    ServerError,
    running,
    serving,
    start,
    stop,
)
from scripts.vllm_server.__main__ import main
from scripts.vllm_server.options import chosen_dtype, command, environment
from scripts.vllm_server.processes import birth, group
from scripts.vllm_server.server import read_state, write_state

if sys.platform != "linux":
    pytestmark = [pytest.mark.optional("Linux only"), pytest.mark.skip("servers are started on Linux only")]

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).with_name("stand_in.py")


class InterruptedWaitError(Exception):
    """Stands for whatever ends a wait."""


@pytest.fixture
def options(tmp_path: Path) -> Iterator[Options]:
    """Options that start the stand-in on a model folder; what a test leaves running is ended."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN}" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text("{}", encoding="utf-8")
    made = Options(
        model=str(model),
        python=python,
        state_dir=tmp_path / "state",
        environment={"AGENTKV_STAND_IN": "well"},
    )
    yield made
    left = running(made.state_dir)
    if left is not None:
        stop(left)


def behaving(options: Options, behaviour: str) -> Options:
    """Let the stand-in behave in another way."""
    return replace(options, environment={"AGENTKV_STAND_IN": behaviour})


def words(options: Options, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the same options for the command line, `start` included."""
    monkeypatch.setenv("AGENTKV_STAND_IN", options.environment["AGENTKV_STAND_IN"])
    given = ["--python", str(options.python), "--model", options.model]
    return ["start", "--state-dir", str(options.state_dir), *given]


def test_start_waits_until_the_server_is_healthy(options: Options) -> None:
    """It asks on while the server says that it is not ready, and reports each time."""
    seen: list[int] = []
    server = start(behaving(options, "slow"), lambda server, _: seen.append(server.pid))
    assert len(seen) >= 2
    assert set(seen) == {server.pid}
    assert server.healthy()
    assert server.log.read_text(encoding="utf-8").count('"GET /health HTTP/1.1" 503') == 2


def test_the_state_says_what_runs(options: Options) -> None:
    """Address, process, log, model and time stand in server.json."""
    server = start(options)
    state = json.loads((options.state_dir / "server.json").read_text(encoding="utf-8"))
    assert (state["url"], state["pid"], state["model"]) == (server.url, server.pid, "tiny")
    assert state["log"] == str(options.state_dir / "server.log")
    assert state["started"] == server.started
    assert running(options.state_dir) == server


def test_a_second_start_returns_the_running_server(options: Options) -> None:
    """There is one server per folder, whatever the second call asks for."""
    first = start(options)
    assert start(replace(options, dtype=DType.FLOAT32)) == first


def test_two_folders_have_two_servers(options: Options, tmp_path: Path) -> None:
    """Servers of different folders run side by side, and ending one leaves the other."""
    first = start(options)
    with serving(replace(options, state_dir=tmp_path / "other")) as second:
        assert second.pid != first.pid
        assert second.url != first.url
    assert not second.is_running()
    assert first.healthy()


def test_serving_leaves_a_server_that_ran_before(options: Options) -> None:
    """Only what the block started is ended after it."""
    first = start(options)
    with serving(options) as same:
        assert same == first
    assert first.is_running()


def test_stop_ends_the_server_and_its_children(options: Options) -> None:
    """The process that the server started beside it is gone too, and so is the state."""
    server = start(options)
    assert len(group(server.pid)) == 2
    stop(server)
    assert group(server.pid) == []
    assert running(options.state_dir) is None
    assert not (options.state_dir / "server.json").exists()


def test_stop_kills_a_server_that_does_not_end(options: Options) -> None:
    """After the grace period SIGTERM is not asked again."""
    server = start(behaving(options, "stubborn"))
    stop(server, grace_s=0)
    assert group(server.pid) == []


def test_stop_leaves_another_program_with_the_number_alone(options: Options) -> None:
    """A state that outlived its server may name a process of somebody else."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        stale = LocalServer(
            url="http://127.0.0.1:9",
            model="tiny",
            pid=other.pid,
            birth=f"{birth(other.pid)}0",
            log=options.state_dir / "server.log",
            started="2025-01-01T00:00:00+00:00",
        )
        options.state_dir.mkdir()
        write_state(stale)
        assert running(options.state_dir) is None
        stop(stale)
        assert other.poll() is None
        assert not (options.state_dir / "server.json").exists()
        other.communicate(b"\n")
    assert other.returncode == 0


def test_a_stale_state_does_not_hinder_a_start(options: Options) -> None:
    """A server that ended without `stop`, for example by a restart of the machine, is replaced."""
    first = start(options)
    stop(first)
    write_state(first)
    assert start(options).pid != first.pid


def test_a_server_that_dies_at_once_is_reported_with_its_log(options: Options) -> None:
    """The message has the exit code and what the server said; nothing is left behind."""
    with pytest.raises(
        ServerError, match=r"exit code 1 while it started(.|\n)*no such quantization: made-up"
    ):
        start(behaving(options, "dies"))
    assert read_state(options.state_dir) is None


def test_a_server_that_is_never_healthy_is_ended(options: Options) -> None:
    """After the limit it is ended, and the log is shown."""
    pids: list[int] = []

    impatient = replace(behaving(options, "never"), limit_s=0)
    with pytest.raises(ServerError, match="not healthy after 0 s; its log ends:"):
        start(impatient, lambda server, _: pids.append(server.pid))
    assert group(pids[0]) == []
    assert read_state(options.state_dir) is None


def test_an_interrupted_wait_ends_the_server(options: Options) -> None:
    """Ctrl-C, or anything else that comes while waiting, leaves no server behind."""
    pids: list[int] = []

    def interrupt(server: LocalServer, _: float) -> None:
        pids.append(server.pid)
        raise InterruptedWaitError

    with pytest.raises(InterruptedWaitError):
        start(behaving(options, "never"), interrupt)
    assert group(pids[0]) == []
    assert read_state(options.state_dir) is None


def test_a_port_in_use_is_refused(options: Options) -> None:
    """The message names the port, before any model is loaded."""
    port = int(start(options).url.rpartition(":")[2])
    with pytest.raises(ServerError, match=f"port {port} cannot be used"):
        start(replace(options, port=port, state_dir=options.state_dir / "other"))


def test_a_missing_interpreter_says_how_to_build_it(options: Options) -> None:
    """Without the environment of vLLM, the make target is named."""
    with pytest.raises(ServerError, match="make vllm-venv"):
        start(replace(options, python=options.state_dir / "nowhere"))


def test_an_unknown_model_is_refused(options: Options) -> None:
    """What is neither folder, known model nor hub id is named."""
    with pytest.raises(ServerError, match="no model 'no-such-model'"):
        start(replace(options, model="no-such-model"))


def test_a_state_that_cannot_be_read_is_named(options: Options) -> None:
    """A damaged file is not taken for "none runs"."""
    options.state_dir.mkdir()
    (options.state_dir / "server.json").write_text('{"url": 1', encoding="utf-8")
    with pytest.raises(ServerError, match=r"server\.json cannot be read"):
        running(options.state_dir)
    (options.state_dir / "server.json").unlink()


def test_options_become_arguments(options: Options) -> None:
    """Each option has its flag, and what is extra comes last."""
    eager = command(options, "/model", 8000)
    assert eager[0] == str(options.python)
    assert "--enforce-eager" in eager
    given = replace(
        options,
        served_name="mine",
        dtype=DType.FLOAT32,
        block_size=64,
        max_model_len=512,
        execution=Execution.COMPILED,
        extra=("--seed", "7"),
    )
    made = command(given, "/model", 8000)
    assert "--enforce-eager" not in made
    assert made[-2:] == ["--seed", "7"]
    pairs = dict(itertools.pairwise(made))
    assert pairs["--model"] == "/model"
    assert pairs["--served-model-name"] == "mine"
    assert pairs["--port"] == "8000"
    assert pairs["--host"] == "127.0.0.1"
    assert (pairs["--dtype"], pairs["--block-size"], pairs["--max-model-len"]) == ("float32", "64", "512")


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [("avx2 avx512_bf16", DType.BFLOAT16), ("amx_bf16", DType.BFLOAT16), ("avx2", DType.FLOAT32)],
)
def test_the_number_format_follows_the_processor(tmp_path: Path, flags: str, dtype: DType) -> None:
    """bfloat16 without instructions for it is tens of times slower than float32."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags\t: fpu {flags}\n")
    assert chosen_dtype(DType.AUTO, cpuinfo) is dtype
    assert chosen_dtype(DType.BFLOAT16, cpuinfo) is DType.BFLOAT16


def test_options_become_environment_variables(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory, development endpoints and no hub for a folder; the caller's choice of cores stays."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    made = environment(replace(options, kv_gib=7, endpoints=Endpoints.DEVELOPMENT), options.model)
    assert made["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert made["VLLM_SERVER_DEV_MODE"] == "1"
    assert made["HF_HUB_OFFLINE"] == "1"
    assert made["VLLM_CPU_OMP_THREADS_BIND"] == "0"
    assert made["AGENTKV_STAND_IN"] == "well"
    hub = environment(options, "somebody/some-model")
    assert hub["VLLM_SERVER_DEV_MODE"] == "0"
    assert "HF_HUB_OFFLINE" not in hub


def test_the_command_line_starts_shows_and_ends_a_server(
    options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Start prints where it answers and how to end it, again for one that runs; stop ends it."""
    here = ["--state-dir", str(options.state_dir)]
    assert main(words(options, monkeypatch)) == 0
    server = running(options.state_dir)
    assert server is not None
    said = capsys.readouterr().out
    for part in (server.url, str(server.pid), str(server.log), f"stop --state-dir {options.state_dir}"):
        assert part in said

    assert main(words(options, monkeypatch)) == 0
    again = capsys.readouterr().out
    assert "runs already" in again
    assert server.url in again

    assert main(["status", *here]) == 0
    assert server.url in capsys.readouterr().out

    assert main(["stop", *here]) == 0
    assert f"process {server.pid}" in capsys.readouterr().out
    assert not server.is_running()

    assert main(["stop", *here]) == 0
    assert "no vLLM server runs" in capsys.readouterr().out
    assert main(["status", *here]) == 1


def test_the_command_line_passes_the_rest_on(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows ``--extra`` reaches the server, flags included."""
    assert main([*words(options, monkeypatch), "--extra", "--seed", "7"]) == 0
    server = running(options.state_dir)
    assert server is not None
    assert "--seed 7\n" in server.log.read_text(encoding="utf-8")


def test_the_command_line_fails_with_the_log(
    options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that dies gives exit code 1 and its log on standard error."""
    assert main(words(behaving(options, "dies"), monkeypatch)) == 1
    assert "no such quantization: made-up" in capsys.readouterr().err


def test_a_server_outlives_the_command_that_started_it(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ends, the server goes on; neither needs a package beside the standard library."""
    bare = [sys.executable, "-S", "-m", "scripts.vllm_server", *words(options, monkeypatch)]
    subprocess.run(bare, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    server = running(options.state_dir)
    assert server is not None
    assert server.healthy()
    stop(server)
    assert not server.is_running()


def test_an_address_without_a_server_is_named() -> None:
    """A wrong ``AGENTKV_TEST_VLLM`` is said, not skipped."""
    with pytest.raises(ServerError, match=r"no server that lists its models at 'http://127\.0\.0\.1:9'"):
        Server.at("http://127.0.0.1:9/")


def test_a_real_server_is_healthy_and_lists_its_model(vllm_server: Server) -> None:
    """The address of the tests' server answers for the model that it names."""
    assert vllm_server.healthy()
    with urllib.request.urlopen(f"{vllm_server.url}/v1/models", timeout=30) as answer:
        listed = json.load(answer)["data"]
    assert [model["id"] for model in listed] == [vllm_server.model]
    assert Server.at(vllm_server.url) == Server(vllm_server.url, vllm_server.model)
