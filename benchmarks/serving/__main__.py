"""``python -m benchmarks.serving``: a vLLM server's clients with four ways to keep a model informed.

One policy; eight fields near its top, of which the first has another value in every request. Each arm runs
one turn, and every single request goes on from it: one at a time, at Poisson arrivals of several rates, and
from clients in a closed loop. Then agents hold conversations at once, whose fields change at random.

All arms send token ids through the same client and are given the same values, questions and arrivals; a salt
keeps their caches apart. Time to first token counts from the moment a request arrives.
"""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import httpx2
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from agentkv import Mode
from agentkv.errors import AgentKVError
from benchmarks._environment import environment, write_results
from benchmarks.serving.counters import CounterReader
from benchmarks.serving.measure import all_sizes, recomputed, without_rows
from benchmarks.serving.plan import PLANS, Profile, SizePlan
from benchmarks.serving.plot import write_plots
from benchmarks.serving.record import Recorder
from benchmarks.serving.suite import ReadCounters, Suite
from benchmarks.serving.tables import tables
from benchmarks.serving.thresholds import failures, promised
from scripts.vllm_server import Execution, Options, Server, ServerError, serving

LONGEST_S = 3600.0
"""Longest wait for an answer: what queues behind rewritten prompts waits for minutes."""
KV_GIB = 6


async def run(
    backend: Recorder,
    plans: tuple[SizePlan, ...],
    read_counters: ReadCounters,
    progress: Progress,
    mode: Mode,
    seed: int,
) -> dict[str, Any]:
    """Measure all sizes; the first one's result, and all of them under ``sizes`` if there are several."""
    sizes = [await Suite(backend, plan, read_counters, progress, mode, seed).run() for plan in plans]
    if len(sizes) == 1:
        return sizes[0]
    return {**sizes[0], "sizes": [without_rows(sizes[0]), *sizes[1:]]}


@contextmanager
def _server(
    url: str | None, model: str, python: Path | None, execution: Execution, console: Console
) -> Iterator[Server]:
    """Give the server at an address, or one that is started and ended here."""
    if url is not None:
        yield Server.at(url)
        return
    with tempfile.TemporaryDirectory(prefix="agentkv-serving-") as folder:
        options = Options(
            model=model, kv_gib=KV_GIB, execution=execution, state_dir=Path(folder), limit_s=600.0
        )
        options = options if python is None else replace(options, python=python)
        # Ended by `kill` or a time limit too, the server goes first.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with ExitStack() as stack:
            with console.status("a vLLM server starts"):
                server = stack.enter_context(serving(options))
            yield server


async def _measured(
    server: Server, profile: Profile, mode: Mode, seed: int, progress: Progress
) -> dict[str, Any]:
    from agentkv.backends import VLLMBackend

    # A call that is sent twice would count as one that is late: better that it fails.
    backend = VLLMBackend(server.url, server.model, stall_s=LONGEST_S, deadline_s=LONGEST_S, attempts=1)
    async with backend:
        return await run(Recorder(backend), PLANS[profile], CounterReader(server.url), progress, mode, seed)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    profile: Annotated[Profile, typer.Option(help="How long to measure.")] = Profile.QUICK,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results here, and a plot beside it.")
    ] = None,
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
    seed: Annotated[int, typer.Option(help="Of arrivals, values and changes.")] = 0,
    again: Annotated[
        Path | None,
        typer.Option(help="Measure nothing: compute the sums of this earlier result anew from its raw rows."),
    ] = None,
    vllm_python: Annotated[
        Path | None, typer.Option(help="Interpreter that has vLLM; by default that of .venv-vllm.")
    ] = None,
) -> None:
    """Compare four ways to keep a model informed on a vLLM server; exits 1 if agentkv falls short."""
    console = Console()
    if again is not None:
        earlier = recomputed(json.loads(again.read_text(encoding="utf-8")))
        _show(earlier, json_file, console)
        return
    begun = perf_counter()
    # Compiled as in production; a quick look is not worth the minutes that it takes.
    execution = Execution.EAGER if profile is Profile.QUICK else Execution.COMPILED
    try:
        with _server(url, model, vllm_python, execution, console) as server:
            started = perf_counter()
            with _progress(console) as progress:
                result = asyncio.run(_measured(server, profile, mode, seed, progress))
                version = httpx2.get(f"{server.url}/version").json().get("version")
            measured_s = perf_counter() - started
    except (ServerError, AgentKVError) as problem:
        console.print(f"nothing was measured: {problem}", markup=False)
        raise typer.Exit(1) from problem
    made_of = environment(
        model=server.model,
        profile=str(profile),
        mode=str(mode),
        seed=seed,
        own_server=url is None,
        vllm=version,
        start_s=started - begun,
        measured_s=measured_s,
    )
    result = {"environment": made_of, "promised": promised(profile), **result}
    console.print(f"measured in {measured_s:.0f} s")
    _show(result, json_file, console)


def _show(result: dict[str, Any], json_file: Path | None, console: Console) -> None:
    """Write and print a result; exits 1 if it falls short."""
    result["failures"] = missed = failures(result)
    write_results(json_file, result)
    for size in all_sizes(result):
        for table in tables(size):
            console.print(table)
    if json_file is not None and not write_plots(result, json_file):
        console.print("no plot: there is nothing to draw, or matplotlib is missing (pip install matplotlib)")
    for line in missed:
        console.print(f"falls short: {line}", markup=False)
    if missed:
        raise typer.Exit(1)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


if __name__ == "__main__":
    app()
