"""``python -m benchmarks.overhead``: agentkv's own time in a turn, without model and tokenizer.

A turn is timed from setting a field to the recorded answer. Taken off are the calls of the tokenizer; the
model is scripted and not timed. Turning the prompt into the request's body is timed apart, after the turns:
copying a long prompt empties the processor's caches, which is not what a turn costs.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from agentkv import AgentKVContext, Mode, Policy, mutable, mutable_fields
from agentkv.backends.base import Capabilities, Completion, Event, FinishReason, Request, Usage
from agentkv.testing import ByteTokenizer
from agentkv.tokenizer import WireMessage
from benchmarks._environment import environment, write_results

TURN_COUNTS = (10, 100, 1000, 5000)
PROMPT_TOKENS = (1_000, 10_000, 100_000)
FIELD_COUNTS = (1, 10, 100, 1000)
MEDIAN_LIMIT_MS = 1.0
"""With up to 100 fields."""
GROWTH_LIMIT = 1.5
"""Median of turns around the 5,000th over that of turns around the 100th."""
ANSWER_TEXT = "It is noted, and I will keep it in mind."
ANSWER = (*ANSWER_TEXT.encode(), 257)


class Profile(StrEnum):
    """How long to measure."""

    QUICK = "quick"
    """50 samples a row."""
    FULL = "full"
    """200 samples a row, and all combinations."""


class TimedTokenizer(ByteTokenizer):
    """The byte tokenizer, with a clock that runs inside its calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def encode(self, text: str) -> list[int]:
        """Encode text."""
        start = time.perf_counter()
        try:
            return super().encode(text)
        finally:
            self.seconds += time.perf_counter() - start

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids."""
        start = time.perf_counter()
        try:
            return super().decode(ids)
        finally:
            self.seconds += time.perf_counter() - start

    def render(
        self,
        messages: Sequence[WireMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **template_arguments: Any,
    ) -> str:
        """Render messages."""
        start = time.perf_counter()
        try:
            return super().render(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_arguments
            )
        finally:
            self.seconds += time.perf_counter() - start


class InstantBackend:
    """Answers at once with the same ids, and times itself."""

    capabilities = Capabilities(name="instant", context_window=2**31, block_size=16)

    def __init__(self) -> None:
        self.tokenizer = TimedTokenizer()
        self.seconds = 0.0
        self.last: Request | None = None

    def stream(self, request: Request) -> Any:
        """Give the answer."""
        start = time.perf_counter()
        self.last = request
        length = len(request.ids)
        events: list[Event] = [
            Completion(
                text=ANSWER_TEXT,
                ids=ANSWER,
                finish_reason=FinishReason.STOP,
                usage=Usage(length, 0, length, generated_tokens=len(ANSWER)),
                ttft_s=0.0,
                duration_s=0.0,
            )
        ]
        self.seconds += time.perf_counter() - start
        return iter(events)

    def serialise_ms(self) -> float:
        """Return milliseconds to make the last request's body."""
        if self.last is None:
            raise ValueError("no request was made")
        start = time.perf_counter()
        json.dumps({"prompt": self.last.ids.tolist(), "cache_salt": self.last.salt})
        return (time.perf_counter() - start) * 1e3

    def release(self, conversation: str) -> None:
        """Keep nothing."""


def _bound_object(fields: int) -> object:
    """Return an object with so many declared fields, all of which are read in each turn."""
    names = [f"f{i}" for i in range(fields)]
    space: dict[str, Any] = {
        name: mutable(label=f"Field number {name[1:]}", default="as new") for name in names
    }
    space["__annotations__"] = dict.fromkeys(names, "str")
    declared: type[object] = type("Case", (), space)
    return mutable_fields(key="case")(declared)()


def measure(turns: int, prompt_tokens: int, fields: int, samples: int, mode: Mode) -> dict[str, Any]:
    """Run a conversation up to `turns` turns; returns the row of its last `samples` turns.

    Half of the samples come before the turn that is asked for and half after it, and nothing is collected
    as garbage while they are taken.
    """
    backend = InstantBackend()
    case = _bound_object(fields)
    own: list[float] = []
    first = max(1, turns - samples // 2)
    with AgentKVContext(backend, [Policy("x" * prompt_tokens), case], mode=mode) as context:
        for turn in range(first + samples):
            if turn == first:
                gc.collect()
                gc.disable()
            backend.tokenizer.seconds = backend.seconds = 0.0
            start = time.perf_counter()
            setattr(case, f"f{turn % fields}", f"value {turn} of {fields}")
            context.ask("What is to be done about it?")
            elapsed = time.perf_counter() - start
            if turn >= first:
                own.append((elapsed - backend.tokenizer.seconds - backend.seconds) * 1e3)
        gc.enable()
    ordered = sorted(own)
    return {
        "turns": turns,
        "prompt_tokens": prompt_tokens,
        "fields": fields,
        "median_ms": statistics.median(own),
        "p99_ms": ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))],
        "serialise_median_ms": statistics.median(backend.serialise_ms() for _ in range(5)),
        "samples_ms": own,
    }


def combinations(profile: Profile) -> list[tuple[int, int, int]]:
    """Return the (turns, prompt tokens, fields) to measure."""
    if profile is Profile.FULL:
        return [(t, p, f) for p in PROMPT_TOKENS for f in FIELD_COUNTS for t in TURN_COUNTS]
    lengths = [(t, 10_000, 100) for t in TURN_COUNTS]
    prompts = [(100, p, 10) for p in PROMPT_TOKENS]
    by_fields = [(100, 10_000, f) for f in FIELD_COUNTS]
    return list(dict.fromkeys([*lengths, *prompts, *by_fields]))


def growth(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the largest median at 5,000 turns over that at 100, prompts and fields alike."""
    at = {(row["prompt_tokens"], row["fields"], row["turns"]): row["median_ms"] for row in rows}
    ratios = [
        median / at[prompt, fields, 100]
        for (prompt, fields, turns), median in at.items()
        if turns == 5000 and (prompt, fields, 100) in at
    ]
    return float(max(ratios))


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what takes longer than promised; empty if nothing does."""
    found = [
        f"{row['turns']} turns, {row['prompt_tokens']} tokens, {row['fields']} fields: "
        f"median {row['median_ms']:.2f} ms"
        for row in rows
        if row["fields"] <= 100 and row["median_ms"] > MEDIAN_LIMIT_MS
    ]
    if growth(rows) > GROWTH_LIMIT:
        found.append(f"median at 5,000 turns is {growth(rows):.2f} times that at 100")
    return found


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    profile: Annotated[Profile, typer.Option(help="How long to measure.")] = Profile.QUICK,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
    mode: Annotated[
        Mode, typer.Option(help="With off, the prompt is rewritten and this must fall short.")
    ] = Mode.ON,
) -> None:
    """Time agentkv's own work in a turn; exits 1 if it takes longer than promised."""
    console = Console()
    rows = []
    wanted = combinations(profile)
    with Progress(console=console, transient=True) as progress:
        for turns, prompt_tokens, fields in progress.track(wanted, description="overhead"):
            rows.append(measure(turns, prompt_tokens, fields, 50 if profile is Profile.QUICK else 200, mode))
    missed = failures(rows)
    result = {
        "environment": environment(profile=str(profile), mode=str(mode)),
        "rows": rows,
        "ratios": {"median_5000_over_100": growth(rows)},
        "failures": missed,
    }
    write_results(json_file, result)
    table = Table("turns", "prompt tokens", "fields", "median", "p99", "request body (apart)")
    for row in rows:
        table.add_row(
            f"{row['turns']:,}",
            f"{row['prompt_tokens']:,}",
            f"{row['fields']:,}",
            f"{row['median_ms']:.3f} ms",
            f"{row['p99_ms']:.3f} ms",
            f"{row['serialise_median_ms']:.3f} ms",
        )
    console.print(table)
    console.print(f"median at 5,000 turns over that at 100: {growth(rows):.2f}")
    for line in missed:
        console.print(f"falls short: {line}", markup=False)
    if missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
