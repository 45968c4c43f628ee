"""``python -m benchmarks.gpu_splice``: time to first token with and without splices, on a GPU.

A Llama of the 8B shape with random weights in bfloat16: what a splice costs depends on shapes, not on what
the weights say. Without a CUDA device a tiny shape runs on the CPU, to show that the script works; its times
say nothing. Everything goes through `TransformersBackend`: chunks are compiled, stored, loaded and moved.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from agentkv.backends.base import Request, SamplingOptions, SpliceSpec, complete
from agentkv.salts import Namespace, process_key, salt
from agentkv.testing import ByteTokenizer
from agentkv.tokens import TokenIds
from benchmarks._environment import environment, write_results

_TENANT: Final = "default"
_BEFORE: Final = 48
"""Prompt tokens before the chunk."""
_BEHIND: Final = 24
_SEAM: Final = 16
_WORDS: Final = 256
"""Ids that prompts are made of: the bytes of the tokenizer."""
ARMS: Final = ("full", "splice", "disk_cold", "hit")


class Profile(StrEnum):
    """How long to measure."""

    QUICK = "quick"
    """Two samples of each time."""
    FULL = "full"
    """Five samples."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's shape, and the chunks that are spliced into its prompts."""

    name: str
    config: dict[str, Any]
    sizes: tuple[int, ...]
    """Tokens of the chunk."""
    dtype: str


LARGE: Final = Shape(
    name="8B",
    config={
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 40_960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    },
    sizes=(2048, 4096, 8192, 16_384, 32_768),
    dtype="bfloat16",
)
TINY: Final = Shape(
    name="tiny",
    config={
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
    sizes=(256, 512, 1024),
    dtype="float32",
)


def make_model(shape: Shape, device: str) -> Any:
    """Make a model of a shape, with random weights, where it is to run."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**shape.config, bos_token_id=0, eos_token_id=0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, shape.dtype))
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def measure(shape: Shape, device: str, samples: int, progress: Progress) -> list[dict[str, Any]]:
    """Return a row for each size, arm and sample."""
    from agentkv.backends import TransformersBackend

    model = make_model(shape, device)
    task = progress.add_task(f"{shape.name} on {device}", total=len(shape.sizes) * samples)
    chance = random.Random(0)  # noqa: S311 - tokens, not a secret
    rows: list[dict[str, Any]] = []

    def fresh(store: str) -> TransformersBackend:
        return TransformersBackend(
            model,
            ByteTokenizer(),
            artifacts=store,
            anchor="",
            seam=_SEAM,
            prefill_chunk=8192,
            memory_limit_bytes=64 << 30,
            artifact_memory_bytes=16 << 30,
        )

    for tokens in shape.sizes:
        # Artifacts of long chunks take gigabytes: each size has a folder of its own.
        with tempfile.TemporaryDirectory(prefix="agentkv-gpu-") as store:
            backend = fresh(store)
            chunk, before, behind = (
                chance.choices(range(1, _WORDS), k=count) for count in (tokens, _BEFORE, _BEHIND)
            )
            name = backend.compile_chunk(_TENANT, chunk)
            ids = TokenIds([*before, *chunk, *behind])
            splice = SpliceSpec(name, _BEFORE + _SEAM, _BEFORE + tokens, _SEAM)
            # The first pass of a shape chooses kernels.
            _call(backend, ids, "warm-up", ())
            for sample in range(samples):
                cold = fresh(store)
                taken = {"disk_cold": _call(cold, ids, f"cold {sample}", (splice,))}
                _call(backend, ids, f"load {sample}", (splice,))
                taken["splice"] = _call(backend, ids, f"splice {sample}", (splice,))
                taken["hit"] = _call(backend, ids, f"splice {sample}", (), keep=False)
                taken["full"] = _call(backend, ids, f"full {sample}", ())
                rows += [{"tokens": tokens, "sample": sample, "arm": arm, **taken[arm]} for arm in ARMS]
                backend.reset()
                cold.close()
                progress.advance(task)
    progress.remove_task(task)
    return rows


def _call(
    backend: Any, ids: TokenIds, conversation: str, splices: tuple[SpliceSpec, ...], *, keep: bool = True
) -> dict[str, Any]:
    """Time one token; each conversation has a cache of its own."""
    own = salt(process_key(), tenant=f"{_TENANT}/{conversation}", namespace=Namespace.APPROXIMATE)
    request = Request(ids, conversation, own, SamplingOptions(max_tokens=1), splices=splices)
    started = perf_counter()
    # The first token's id is read on the host, so the device has done its work by then.
    completion = complete(backend, request)
    seconds = perf_counter() - started
    if not keep:
        backend.release(conversation)
    usage = completion.usage
    return {
        "ttft_s": seconds,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "spliced_tokens": usage.spliced_tokens,
        "computed_tokens": usage.computed_tokens,
    }


def summed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the medians of each size."""
    made = []
    for tokens in sorted({row["tokens"] for row in rows}):
        times = {
            arm: [row["ttft_s"] for row in rows if row["tokens"] == tokens and row["arm"] == arm]
            for arm in ARMS
        }
        medians = {f"{arm}_s": statistics.median(found) for arm, found in times.items()}
        made.append({"tokens": tokens, **medians, "samples": len(times["full"])})
    return made


def failures(rows: Sequence[dict[str, Any]], *, timed: bool) -> list[str]:
    """Return calls that were not as their arm is called, and where times count, splices that cost more."""
    found = []
    for row in rows:
        loaded = row["tokens"] - _SEAM if row["arm"] in ("splice", "disk_cold") else 0
        held = row["prompt_tokens"] - 1 if row["arm"] == "hit" else 0
        if (row["spliced_tokens"], row["cached_tokens"]) != (loaded, held):
            found.append(
                f"{row['tokens']} tokens, {row['arm']}: {row['spliced_tokens']} spliced, not {loaded}"
            )
    if timed:
        slow = [row["tokens"] for row in summed(rows) if not row["splice_s"] < row["full_s"]]
        found += [f"{tokens} tokens: a splice takes as long as a full prefill" for tokens in slow]
    return found


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    profile: Annotated[Profile, typer.Option(help="How long to measure.")] = Profile.QUICK,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
) -> None:
    """Measure splices on a GPU; exits 1 if a call did not load what it was asked to."""
    import torch

    console = Console()
    there = torch.cuda.is_available()
    device = "cuda" if there else "cpu"
    shape = LARGE if there else TINY
    if not there:
        console.print("no CUDA device: a tiny shape runs on the CPU, and its times say nothing of a GPU")
    with Progress(console=console, transient=True) as progress:
        rows = measure(shape, device, 5 if profile is Profile.FULL else 2, progress)
    missed = failures(rows, timed=there)
    made_of = environment(
        profile=str(profile),
        gpu=torch.cuda.get_device_name(0) if there else None,
        shape=shape.name,
        dtype=shape.dtype,
        config=shape.config,
    )
    table = Table("tokens", "full prefill", "splice", "splice, disk-cold", "prefix hit", "full ÷ splice")
    result = {"environment": made_of, "ttft": summed(rows), "rows": rows, "failures": missed}
    for row in summed(rows):
        times = [f"{row[f'{arm}_s'] * 1000:.1f} ms" for arm in ARMS]
        table.add_row(f"{row['tokens']:,}", *times, f"{row['full_s'] / row['splice_s']:.1f}×")
    write_results(json_file, result)
    console.print(table)
    for line in missed:
        console.print(f"falls short: {line}", markup=False)
    if missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
