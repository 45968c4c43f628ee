"""``python -m benchmarks.turns``: a 12-turn conversation, one of eight fields changing each turn, four arms.

Time to first token is summed over turns 2 to 12, as the first is cold in every arm. The arms take turns
within each turn, so that the machine's moods hit all of them.
"""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from agentkv import Mode
from agentkv.backends.base import Backend
from benchmarks._arms import AGENTKV, APPEND_STATE, ARMS, REWRITE, ArmTurn, make_arm
from benchmarks._environment import environment, write_results
from benchmarks._workload import make_case, make_turns

TURNS = 12
SIZES = (1000, 2000, 4000)
ANSWER_TOKENS = 24
LEAST_TTFT_RATIO = 6.0
"""Rewriting's cumulative time to first token over agentkv's, at 2,000 tokens and more."""


class Profile(StrEnum):
    """How long to measure."""

    QUICK = "quick"
    """One conversation of each size."""
    FULL = "full"
    """Three of each size."""


def run(
    backend: Backend, sizes: Sequence[int], repetitions: int, mode: Mode, console: Console
) -> list[dict[str, Any]]:
    """Run all arms; returns a row for each prompt size, with raw samples."""
    rows = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("turns", total=len(sizes) * repetitions * TURNS * len(ARMS))
        for size in sizes:
            case = make_case(backend.tokenizer, size, ANSWER_TOKENS)
            samples: dict[str, list[list[ArmTurn]]] = {name: [] for name in ARMS}
            for repetition in range(repetitions):
                token = uuid.uuid4().hex
                arms = {name: make_arm(name, backend, case, run=token, mode=mode) for name in ARMS}
                taken: dict[str, list[ArmTurn]] = {name: [] for name in ARMS}
                for turn in make_turns(TURNS, seed=repetition):
                    for name, arm in arms.items():
                        taken[name].append(arm.turn(turn.values, turn.question))
                        progress.advance(task)
                for name, arm in arms.items():
                    arm.close()
                    samples[name].append(taken[name])
            rows.append(_row(size, samples))
    return rows


def _row(size: int, samples: dict[str, list[list[ArmTurn]]]) -> dict[str, Any]:
    arms = {}
    for name, conversations in samples.items():
        later = [turns[1:] for turns in conversations]
        flat = [turn for turns in later for turn in turns]
        arms[name] = {
            "cumulative_ttft_s": statistics.median(sum(turn.ttft_s for turn in turns) for turns in later),
            "cached_share": sum(t.cached_tokens for t in flat) / sum(t.prompt_tokens for t in flat),
            "new_tokens": statistics.median(sum(turn.new_tokens for turn in turns) for turns in later),
            "mispredicted": sum(
                t.predicted_cached_tokens is not None and t.predicted_cached_tokens != t.cached_tokens
                for t in flat
            ),
            "samples": [[asdict(turn) for turn in turns] for turns in conversations],
        }
    return {
        "prompt_tokens": samples[AGENTKV][0][0].prompt_tokens,
        "asked_tokens": size,
        "arms": arms,
    }


def failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return what falls short of what agentkv promises; empty if nothing does."""
    found = []
    for row in rows:
        arms, size = row["arms"], row["prompt_tokens"]
        ratio = arms[REWRITE]["cumulative_ttft_s"] / arms[AGENTKV]["cumulative_ttft_s"]
        if row["asked_tokens"] >= 2000 and ratio < LEAST_TTFT_RATIO:
            found.append(f"{size} tokens: first tokens only {ratio:.1f} times sooner than rewriting")
        if arms[AGENTKV]["new_tokens"] >= arms[APPEND_STATE]["new_tokens"]:
            found.append(
                f"{size} tokens: {arms[AGENTKV]['new_tokens']} new tokens, not fewer than append_state's "
                f"{arms[APPEND_STATE]['new_tokens']}"
            )
        pairs = zip(arms[AGENTKV]["samples"], arms[APPEND_STATE]["samples"], strict=True)
        for ours, theirs in pairs:
            for turn, (mine, other) in enumerate(zip(ours[1:], theirs[1:], strict=True), start=2):
                if mine["new_tokens"] > other["new_tokens"]:
                    found.append(f"{size} tokens, turn {turn}: more new tokens than append_state")
        if arms[AGENTKV]["mispredicted"]:
            found.append(f"{size} tokens: {arms[AGENTKV]['mispredicted']} turns mispredicted")
    return found


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    profile: Annotated[Profile, typer.Option(help="How long to measure.")] = Profile.QUICK,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
    model: Annotated[str, typer.Option(help="A pulled model's name, a folder or a hub id.")] = "smollm2-135m",
    mode: Annotated[
        Mode, typer.Option(help="Mode of the agentkv arm; with off it must fall short.")
    ] = Mode.ON,
) -> None:
    """Compare four ways to keep a model informed over 12 turns; exits 1 if agentkv falls short."""
    from agentkv.backends import TransformersBackend
    from agentkv.models import resolve

    console = Console()
    backend = TransformersBackend.from_pretrained(str(resolve(model)))
    rows = run(backend, SIZES, 1 if profile is Profile.QUICK else 3, mode, console)
    missed = failures(rows)
    result = {
        "environment": environment(model=model, profile=str(profile), mode=str(mode), turns=TURNS),
        "rows": rows,
        "failures": missed,
    }
    write_results(json_file, result)
    for row in rows:
        table = Table(
            "arm",
            "first tokens",
            "against agentkv",
            "cached",
            "new tokens",
            title=f"{row['prompt_tokens']} tokens",
        )
        own = row["arms"][AGENTKV]["cumulative_ttft_s"]
        for name, arm in row["arms"].items():
            seconds = arm["cumulative_ttft_s"]
            table.add_row(
                name,
                f"{seconds:.2f} s",
                f"{seconds / own:.1f}×",
                f"{arm['cached_share']:.1%}",
                f"{arm['new_tokens']:.0f}",
            )
        console.print(table)
    for line in missed:
        console.print(f"falls short: {line}", markup=False)
    if missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
