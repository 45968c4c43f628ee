"""The command line of `scripts.vllm_server`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from scripts.vllm_server.lifecycle import running, start, stop
from scripts.vllm_server.options import DType, Endpoints, Execution, Options, ServerError
from scripts.vllm_server.server import LocalServer, forget

_DEFAULT: Final = Options()
_LINE_EVERY_S: Final = 10


class _ProgressLine:
    """Keeps one line up to date on a terminal; elsewhere prints one every ten seconds."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def __call__(self, server: LocalServer, elapsed_s: float) -> None:
        text = f"agentkv: process {server.pid} loads {server.model}, {elapsed_s:.0f} s"
        if sys.stdout.isatty():
            print(f"\r{text}", end="", flush=True)
        elif elapsed_s >= self._next_s:
            print(text, flush=True)
            self._next_s = elapsed_s + _LINE_EVERY_S

    def close(self) -> None:
        """Leave the line."""
        if sys.stdout.isatty():
            print()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command; return its exit code."""
    given = _parser().parse_args(arguments)
    verbs = {"start": _start, "status": _status, "stop": _stop}
    try:
        return verbs[given.verb](given)
    except ServerError as problem:
        print(f"agentkv: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("agentkv: interrupted; what this command started was ended", file=sys.stderr)
        return 130


def _start(given: argparse.Namespace) -> int:
    options = Options(
        model=given.model,
        served_name=given.served_name,
        port=given.port,
        dtype=given.dtype,
        block_size=given.block_size,
        kv_gib=given.kv_gib,
        max_model_len=given.max_model_len,
        execution=given.execution,
        endpoints=given.endpoints,
        connector=None if given.splice_store is None else _connector(given.splice_store),
        extra=tuple(given.extra),
        python=given.python,
        state_dir=given.state_dir,
        limit_s=given.limit_s,
    )
    before = running(options.state_dir)
    line = _ProgressLine()
    try:
        server = start(options, line)
    finally:
        line.close()
    print("agentkv: " + ("a vLLM server runs already" if server == before else "the vLLM server is ready"))
    _describe(server)
    return 0


def _connector(store: Path) -> dict[str, str]:
    return {"store": str(store.expanduser().absolute()), "compile": "on"}


def _status(given: argparse.Namespace) -> int:
    server = running(given.state_dir)
    if server is None:
        print("agentkv: no vLLM server runs")
        return 1
    print(f"agentkv: a vLLM server {'runs' if server.healthy() else 'does not answer yet'}")
    _describe(server)
    return 0


def _stop(given: argparse.Namespace) -> int:
    server = running(given.state_dir)
    if server is None:
        forget(given.state_dir)
        print("agentkv: no vLLM server runs")
        return 0
    stop(server)
    print(f"agentkv: the vLLM server at {server.url} (process {server.pid}) was ended")
    return 0


def _describe(server: LocalServer) -> None:
    ending = "make vllm-stop"
    if server.log.parent != _DEFAULT.state_dir:
        ending = f"python -m scripts.vllm_server stop --state-dir {server.log.parent}"
    print(f"  address   {server.url}\n  model     {server.model}\n  process   {server.pid}")
    print(f"  log       {server.log}\n  to end it {ending}")


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--state-dir",
        type=Path,
        default=_DEFAULT.state_dir,
        metavar="DIR",
        help="its state and log (%(default)s)",
    )
    parser = argparse.ArgumentParser(
        prog="python -m scripts.vllm_server", description="Runs a vLLM server on the CPU of this machine."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    begin = verbs.add_parser(
        "start",
        parents=[shared],
        help="start a server and wait until it is healthy",
    )
    _add_options(begin)
    for verb, does in (("status", "say whether one runs; exit code 1 if none does"), ("stop", "end it")):
        verbs.add_parser(verb, parents=[shared], help=does)
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=_DEFAULT.model, help="folder, known model or hub id (%(default)s)")
    add("--served-name", metavar="NAME", help="what requests call the model, if not the name of its folder")
    add("--port", type=int, help="loopback port, if not a free one")
    add(
        "--dtype", type=DType, choices=list(DType), default=_DEFAULT.dtype, help="number format (%(default)s)"
    )
    add(
        "--block-size",
        type=int,
        default=_DEFAULT.block_size,
        metavar="TOKENS",
        help="tokens per KV block (%(default)s)",
    )
    add("--kv-gib", type=int, default=_DEFAULT.kv_gib, metavar="GIB", help="memory for KV (%(default)s)")
    add(
        "--max-model-len",
        type=int,
        default=_DEFAULT.max_model_len,
        metavar="TOKENS",
        help="context length (%(default)s)",
    )
    execution = parser.add_mutually_exclusive_group()
    for flag, value, does in (
        ("--eager", Execution.EAGER, "run the model as it is, ready sooner (default)"),
        ("--compile", Execution.COMPILED, "compile the model first"),
    ):
        execution.add_argument(
            flag, dest="execution", action="store_const", const=value, default=_DEFAULT.execution, help=does
        )
    add(
        "--dev-mode",
        dest="endpoints",
        action="store_const",
        const=Endpoints.DEVELOPMENT,
        default=_DEFAULT.endpoints,
        help="offer vLLM's development endpoints too, such as /reset_prefix_cache",
    )
    add(
        "--splice-store",
        type=Path,
        metavar="DIR",
        help="run agentkv's KV connector, with this folder of artifacts, and let requests compile",
    )
    add(
        "--python",
        type=Path,
        default=_DEFAULT.python,
        metavar="PATH",
        help="interpreter that has vLLM (%(default)s)",
    )
    add(
        "--limit-s",
        type=float,
        default=_DEFAULT.limit_s,
        metavar="SECONDS",
        help="longest wait (%(default)s)",
    )
    add("--extra", nargs=argparse.REMAINDER, default=[], metavar="...", help="all that follows goes to vLLM")


if __name__ == "__main__":
    sys.exit(main())
