"""``python -m benchmarks.agent``: a LangChain agent on a vLLM server, kept informed in three ways.

One policy with eight fields near its top, of which one changes in every other turn: half of the changes
happen in the world, half are made by the tool that the agent calls. The small model is held to call it, alike
in all arms.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import httpx2
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from agentkv import Mode
from agentkv.backends import VLLMBackend
from agentkv.errors import AgentKVError
from benchmarks._environment import environment, write_results
from benchmarks.agent.measure import summary
from benchmarks.agent.plan import PLANS, Profile
from benchmarks.agent.suite import run
from benchmarks.agent.tables import table
from benchmarks.agent.thresholds import failures, promised
from scripts.vllm_server import Options, Server, ServerError, serving

KV_GIB = 2
_PACKAGES = ("langchain", "langchain-core", "langgraph", "langchain-agentkv")


@contextmanager
def _server(url: str | None, model: str, python: Path | None, console: Console) -> Iterator[Server]:
    """Give the server at an address, or one that is started and ended here."""
    if url is not None:
        yield Server.at(url)
        return
    with tempfile.TemporaryDirectory(prefix="agentkv-agent-") as folder:
        options = Options(model=model, kv_gib=KV_GIB, state_dir=Path(folder), limit_s=600.0)
        options = options if python is None else replace(options, python=python)
        # Ended by `kill` or a time limit too, the server goes first.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with ExitStack() as stack:
            with console.status("a vLLM server starts"):
                server = stack.enter_context(serving(options))
            yield server


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    profile: Annotated[Profile, typer.Option(help="How long to measure.")] = Profile.QUICK,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Address of a server that nothing else uses; by default one is started."),
    ] = None,
    model: Annotated[
        str, typer.Option(help="What a server is started with: a pulled name or a folder.")
    ] = "smollm2-135m",
    mode: Annotated[
        Mode, typer.Option(help="Mode of the agentkv arm; with off it must fall short.")
    ] = Mode.ON,
    seed: Annotated[int, typer.Option(help="Of values and changes.")] = 0,
    vllm_python: Annotated[
        Path | None, typer.Option(help="Interpreter that has vLLM; by default that of .venv-vllm.")
    ] = None,
) -> None:
    """Compare three ways to keep a LangChain agent informed; exits 1 if agentkv falls short."""
    console = Console()
    try:
        with _server(url, model, vllm_python, console) as server:
            version = httpx2.get(f"{server.url}/version", timeout=60).json().get("version")
            start = perf_counter()
            # A call that is sent twice would count as one that is late: better that it fails.
            with VLLMBackend(server.url, server.model, attempts=1) as backend:
                block = backend.capabilities.block_size
                with _progress(console) as progress:
                    rows = run(backend, PLANS[profile], mode, seed, progress)
            measured_s = perf_counter() - start
    except (ServerError, AgentKVError) as problem:
        console.print(f"nothing was measured: {problem}", markup=False)
        raise typer.Exit(1) from problem
    result: dict[str, Any] = {
        "environment": environment(
            model=server.model,
            profile=str(profile),
            mode=str(mode),
            seed=seed,
            own_server=url is None,
            vllm=version,
            block_size=block,
            measured_s=measured_s,
            packages={name: metadata.version(name) for name in _PACKAGES},
        ),
        "promised": promised(profile),
        **summary(rows),
        "rows": rows,
    }
    result["failures"] = missed = failures(result)
    write_results(json_file, result)
    console.print(table(result))
    console.print(f"measured in {measured_s:.0f} s")
    for line in missed:
        console.print(f"falls short: {line}", markup=False)
    if missed:
        raise typer.Exit(1)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


if __name__ == "__main__":
    app()
