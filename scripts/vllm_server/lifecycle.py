"""Starting a server, awaiting it and ending it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from scripts.vllm_server.options import HOST, Options, ServerError, command, environment, find_model
from scripts.vllm_server.processes import birth, group, wait_until
from scripts.vllm_server.server import LocalServer, forget, read_state, write_state

_LOG: Final = "server.log"
_PAUSE_S: Final = 0.2
_TAIL_LINES: Final = 30
_KILL_LIMIT_S: Final = 120.0
"""A killed process goes on until its memory is freed: half a minute for gigabytes on a busy machine."""
_CHILDREN: Final[dict[int, subprocess.Popen[bytes]]] = {}
"""Servers that this process started and has not ended: only their parent can reap them."""

Progress = Callable[[LocalServer, float], None]
"""Called again and again while a server is awaited, with the seconds that passed."""


def _silent(_server: LocalServer, _elapsed_s: float) -> None:
    """Report nothing."""


def start(options: Options, progress: Progress = _silent) -> LocalServer:
    """Start a server and wait until it is healthy; one that runs already is awaited and returned as it is.

    Whatever interrupts the wait, Ctrl-C or an exception of `progress`, ends the server that was started.

    Raises
    ------
    ServerError
        vLLM or the model is missing, the port is taken, the server ended, or it took too long.
    """
    with _locked(options.state_dir):
        found = running(options.state_dir)
        server = found or _spawn(options)
    try:
        _await_health(server, options.limit_s, progress)
    except BaseException:
        if found is None:
            stop(server)
        raise
    return server


def running(state_dir: Path) -> LocalServer | None:
    """Return the server that was started with this folder, healthy or not yet; None if none runs."""
    server = read_state(state_dir)
    return server if server is not None and server.is_running() else None


def stop(server: LocalServer, grace_s: float = 15.0) -> None:
    """End a server with all its processes and forget it; another program that has its number is left alone.

    Parameters
    ----------
    server
        What `start` or `running` returned.
    grace_s
        Seconds that it gets to end by itself before it is killed.

    Raises
    ------
    ServerError
        It could not be killed.
    """
    child = _CHILDREN.pop(server.pid, None)
    alive = server.is_running()
    if alive:
        os.kill(server.pid, signal.SIGTERM)
        wait_until(lambda: not server.is_running(), grace_s)
    if alive or child is not None:
        _kill_group(server)  # vLLM's engine is a process of its own, and may be left behind
    if child is not None:
        child.wait()
    if read_state(server.log.parent) == server:
        forget(server.log.parent)


@contextlib.contextmanager
def serving(options: Options, progress: Progress = _silent) -> Iterator[LocalServer]:
    """Run a server for the length of a block; one that ran already goes on running after it."""
    before = running(options.state_dir)
    server = start(options, progress)
    try:
        yield server
    finally:
        if server != before:
            stop(server)


def _spawn(options: Options) -> LocalServer:
    """Start the process and write down which one it is."""
    if platform.system() != "Linux":
        raise ServerError(
            f"servers are started on Linux only, not on {platform.system()}; run vLLM elsewhere and give its "
            f"address"
        )
    if not os.access(options.python, os.X_OK):
        raise ServerError(
            f"there is no interpreter {str(options.python)!r}; build it with 'make vllm-venv', or name that "
            f"of an environment that has vLLM with --python"
        )
    model = find_model(options.model)
    port = _free_port(options.port)
    log = options.state_dir.absolute() / _LOG
    with log.open("wb") as sink:
        child = subprocess.Popen(
            command(options, model, port),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment(options, model),
            start_new_session=True,
        )
    _CHILDREN[child.pid] = child
    server = LocalServer(
        url=f"http://{HOST}:{port}",
        model=options.model_name,
        pid=child.pid,
        birth=birth(child.pid) or "",
        log=log,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_state(server)
    return server


def _free_port(wanted: int | None) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted or 0))
        except (OSError, OverflowError) as problem:
            raise ServerError(
                f"port {wanted} cannot be used ({problem}); name another, or none to take a free one"
            ) from problem
        return int(probe.getsockname()[1])


def _await_health(server: LocalServer, limit_s: float, progress: Progress) -> None:
    began = time.monotonic()
    while not server.healthy():
        elapsed_s = time.monotonic() - began
        if not server.is_running():
            child = _CHILDREN.get(server.pid)
            code = "" if child is None else f" with exit code {child.wait()}"
            raise ServerError(f"the server ended{code} while it started; its log ends:\n{_tail(server.log)}")
        progress(server, elapsed_s)
        if elapsed_s > limit_s:
            raise ServerError(
                f"the server was not healthy after {limit_s:g} s; its log ends:\n{_tail(server.log)}"
            )
        time.sleep(_PAUSE_S)


def _tail(log: Path) -> str:
    with log.open("rb") as source:
        source.seek(max(0, log.stat().st_size - (1 << 16)))
        lines = source.read().decode("utf-8", "replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:]) or "  (nothing)"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep two starts at once from starting two servers."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _kill_group(server: LocalServer) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    if not wait_until(lambda: not group(server.pid), _KILL_LIMIT_S):
        raise ServerError(f"processes {group(server.pid)} of the server do not end; look at them with ps")
