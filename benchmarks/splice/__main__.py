"""``python -m benchmarks.splice``: what a splice costs, and how near its answers are to full prefills.

Times to the first token run from the caller's call in a context, planning and priming included, on a model
in this process or on a vLLM server. Each sample has a salt of its own, and each row holds what the backend
says it cached, loaded and computed. Fidelity is measured on a float32 model in this process in either case.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from agentkv import Mode
from agentkv.errors import AgentKVError
from benchmarks._environment import environment, write_results
from benchmarks.splice.measure import summed
from benchmarks.splice.plan import PLANS, Engine, Part, Profile
from benchmarks.splice.plot import write_plots
from benchmarks.splice.suite import (
    loaded,
    model_target,
    no_rows,
    run_fidelity,
    run_times,
    server_options,
    server_target,
    timed,
)
from benchmarks.splice.tables import tables
from benchmarks.splice.thresholds import failures, promised
from scripts.vllm_server import DType, Execution, ServerError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    backend: Annotated[Engine, typer.Option(help="What times are measured on.")] = Engine.TRANSFORMERS,
    profile: Annotated[Profile, typer.Option(help="How long to measure.")] = Profile.QUICK,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results here, and a plot beside it.")
    ] = None,
    part: Annotated[
        list[Part] | None, typer.Option(help="Measure this alone; may be given several times.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Address of a vLLM server that splices and is idle; by default one is started."),
    ] = None,
    model: Annotated[str, typer.Option(help="A pulled model's name or a folder.")] = "smollm2-135m",
    mode: Annotated[
        Mode, typer.Option(help="With off nothing is spliced, and it must fall short.")
    ] = Mode.ON,
    dtype: Annotated[DType, typer.Option(help="Number format of a server that is started.")] = DType.AUTO,
    again: Annotated[
        Path | None,
        typer.Option(help="Measure nothing: compute the sums of this earlier result anew from its raw rows."),
    ] = None,
    vllm_python: Annotated[
        Path | None, typer.Option(help="Interpreter that has vLLM; by default that of .venv-vllm.")
    ] = None,
) -> None:
    """Measure splices; exits 1 if they fall short of what is promised."""
    console = Console()
    if again is not None:
        earlier = json.loads(again.read_text(encoding="utf-8"))
        _show(earlier["environment"], earlier["rows"], json_file, console)
        return
    parts = list(dict.fromkeys(part or Part))
    facts: dict[str, Any] = {"model": model, "block_size": 1, "own_server": url is None}
    rows, begun, plan = no_rows(), perf_counter(), PLANS[profile]
    # Compiled as in production; a quick look is not worth the minutes that it takes.
    execution = Execution.EAGER if profile is Profile.QUICK else Execution.COMPILED

    def measure(progress: Progress) -> None:
        if backend is Engine.VLLM and timed(parts):
            options = server_options(model, dtype, execution, vllm_python)
            with server_target(url, options, plan, console, facts.update) as target:
                run_times(target, plan, parts, mode, rows, progress)
        own = Part.FIDELITY in parts
        if not own and (backend is Engine.VLLM or not timed(parts)):
            return
        found, tokenizer, files = loaded(model)
        if backend is Engine.TRANSFORMERS and timed(parts):
            facts["dtype"] = "float32"
            with model_target(found, tokenizer, files) as target:
                run_times(target, plan, parts, mode, rows, progress)
        if own:
            run_fidelity(found, tokenizer, plan, mode, rows, progress)

    facts["interrupted"] = not _kept(measure, console)
    made_of = environment(
        backend=str(backend),
        profile=str(profile),
        mode=str(mode),
        parts=[str(one) for one in parts],
        measured_s=round(perf_counter() - begun, 1),
        **facts,
    )
    _show(made_of, rows, json_file, console)


def _kept(measure: Callable[[Progress], None], console: Console) -> bool:
    """Measure, and return whether it came to its end; Ctrl-C ends it and keeps what there is."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            measure(progress)
    except KeyboardInterrupt:
        console.print("interrupted: what was measured so far is kept")
        return False
    except (ServerError, AgentKVError) as problem:
        console.print(f"it ended early: {problem}", markup=False)
        return False
    return True


def _show(
    made_of: dict[str, Any], rows: Mapping[str, Sequence[Any]], json_file: Path | None, console: Console
) -> None:
    """Write and print a result; exits 1 if it falls short."""
    result = summed(made_of, rows)
    missed = failures(result)
    result |= {
        "thresholds": promised(Engine(made_of["backend"])),
        "passed": not missed,
        "failures": missed,
    }
    write_results(json_file, result)
    for table in tables(result):
        console.print(table)
    if result["stored"] is not None:
        console.print(
            f"artifacts take {result['stored']['bytes_per_token']:,.0f} bytes for each token on disk"
        )
    if json_file is not None and not write_plots(result, json_file):
        console.print("no plot: there is nothing to draw, or matplotlib is missing (pip install matplotlib)")
    for line in missed:
        console.print(f"falls short: {line}", markup=False)
    if missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
