"""The tables of the splice benchmarks, from their raw rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu_splice import ARMS
from benchmarks.gpu_splice import summed as gpu_summed
from benchmarks.splice import tables
from benchmarks.splice.measure import summed
from benchmarks.splice.window import summed as window_summed

Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def ttft(result: Mapping[str, Any]) -> Table:
    """Return times to the first token by the skill's tokens."""
    return tables.times(_anew(result), "ttft")


def skills(result: Mapping[str, Any]) -> Table:
    """Return times to the first token by the number of skills in a prompt."""
    return tables.times(_anew(result), "skills")


def append(result: Mapping[str, Any]) -> Table:
    """Return what a skill added in mid-conversation takes."""
    return tables.append(_anew(result))


def fidelity(result: Mapping[str, Any]) -> Table:
    """Return what the probes say of each anchor and seam."""
    return tables.fidelity(_anew(result))


def stored(result: Mapping[str, Any]) -> Table:
    """Return what artifacts take on disk."""
    found = _anew(result)["stored"]
    head = ["number format", "artifacts", "tokens", "bytes for each token"]
    if found is None:
        return head, []
    dtype = result["environment"].get("dtype", "–")
    return head, [
        [dtype, str(found["artifacts"]), f"{found['tokens']:,}", f"{found['bytes_per_token']:,.0f}"]
    ]


def window(result: Mapping[str, Any]) -> Table:
    """Return what a splice longer than the attention window changes."""
    head = ["way", "probes", "top-1 agreement", "KL, median", "KL, largest"]
    return head, [
        [
            way,
            str(sums["probes"]),
            f"{sums['top1_agreement']:.1%}",
            f"{sums['kl_median']:.4f}",
            f"{sums['kl_max']:.3f}",
        ]
        for way, sums in window_summed(result["rows"]).items()
    ]


def gpu(result: Mapping[str, Any]) -> Table:
    """Return the times of the GPU script."""
    head = ["tokens", "full prefill", "splice", "splice, disk-cold", "prefix hit", "full ÷ splice"]
    rows = []
    for row in gpu_summed(result["rows"]):
        times = [f"{row[f'{arm}_s'] * 1000:.1f} ms" for arm in ARMS]
        rows.append([f"{row['tokens']:,}", *times, f"{row['full_s'] / row['splice_s']:.1f}×"])
    return head, rows


def _anew(result: Mapping[str, Any]) -> dict[str, Any]:
    return summed(result["environment"], result["rows"])
