"""The result as one figure; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.splice.plan import Anchoring
from benchmarks.splice.thresholds import KL

_ARMS: Final = {
    "full_s": ("full prefill", "#a23b3b"),
    "disk_cold_s": ("splice, disk-cold", "#c08a2d"),
    "splice_s": ("splice", "#2f7d4f"),
    "hit_s": ("prefix hit", "#4a6fa5"),
}
_ANCHORS: Final = {
    Anchoring.NONE: "#a23b3b",
    Anchoring.GENERIC: "#2f7d4f",
    Anchoring.OWN: "#4a6fa5",
}


def write_plots(result: Mapping[str, Any], file: Path) -> list[Path]:
    """Write the figure beside the JSON file, as SVG and PNG; returns the files, none without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    drawn = {
        _times: bool(result["ttft"]),
        _skills: bool(result["skills"]),
        _fidelity: bool(result["fidelity"]),
    }
    parts = [draw for draw, there in drawn.items() if there]
    if not parts:
        return []
    figure = Figure(figsize=(4.6 * len(parts), 4.2), layout="constrained")
    for axes, draw in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        draw(axes, result)
        axes.grid(visible=True, axis="y", which="major", alpha=0.25)
    made = [file.with_suffix(".svg"), file.with_suffix(".png")]
    for path in made:
        figure.savefig(path, dpi=150)
    return made


def _times(axes: Any, result: Mapping[str, Any]) -> None:
    _lines(axes, result["ttft"], "tokens")
    axes.set_xscale("log", base=2)
    tokens = [row["tokens"] for row in result["ttft"]]
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    axes.set_xlabel("tokens of the skill")
    axes.set_title(f"Time to first token, {result['environment']['backend']}")
    axes.legend()


def _skills(axes: Any, result: Mapping[str, Any]) -> None:
    _lines(axes, result["skills"], "skills")
    axes.set_xticks([row["skills"] for row in result["skills"]])
    axes.set_xlabel("skills in one prompt")
    axes.set_title("Several skills at once")
    axes.legend()


def _lines(axes: Any, rows: Any, by: str) -> None:
    for column, (label, colour) in _ARMS.items():
        points = [(row[by], row[column]) for row in rows if row[column] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=label, color=colour)
    axes.set_yscale("log")
    axes.set_ylabel("seconds")


def _fidelity(axes: Any, result: Mapping[str, Any]) -> None:
    seams = sorted({row["seam"] for row in result["fidelity"]})
    for anchoring, colour in _ANCHORS.items():
        rows = [row for row in result["fidelity"] if row["anchor"] == anchoring]
        points = [(seams.index(row["seam"]), row["kl_median"]) for row in rows]
        if points:
            label = f"anchor: {anchoring}"
            axes.plot(*zip(*points, strict=True), marker="o", label=label, color=colour)
    if result["control"] is not None:
        axes.axhline(result["control"]["kl_median"], color="#8a8a8a", linestyle=":", label="not re-rotated")
    axes.axhline(KL, color="#8a8a8a", linestyle="--", label=f"threshold, {KL:g}")
    axes.set_xticks(range(len(seams)), [str(seam) for seam in seams])
    axes.set_xlabel("tokens of the seam")
    axes.set_yscale("log")
    axes.set_ylabel("median KL from a full prefill")
    axes.set_title("Fidelity")
    axes.legend()
