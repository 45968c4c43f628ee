"""The result as one figure; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks._arms import AGENTKV, APPEND_STATE, ARMS, HOIST, REWRITE

_COLOURS: Final = {REWRITE: "#a23b3b", APPEND_STATE: "#8a8a8a", HOIST: "#4a6fa5", AGENTKV: "#2f7d4f"}


def write_plots(result: Mapping[str, Any], file: Path) -> list[Path]:
    """Write the figure beside the JSON file, as SVG and PNG; returns the files, none without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    if "saturated" not in result:
        return []
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    loads, saturated, talks = figure.subplots(1, 3)
    _loads(loads, result)
    _saturated(saturated, result["saturated"])
    _talks(talks, result["conversations"])
    figure.suptitle(f"Prompts of about {result['asked_tokens']:,} tokens of which one early field changes")
    handles, labels = loads.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(ARMS))
    made = [file.with_suffix(".svg"), file.with_suffix(".png")]
    for path in made:
        figure.savefig(path, dpi=150)
    return made


def _loads(axes: Any, result: Mapping[str, Any]) -> None:
    groups = [("unloaded", result["unloaded"]["arms"])]
    groups += [(f"{load['rate']:g}/s", load["arms"]) for load in result["loads"]]
    for group, (_, arms) in enumerate(groups):
        for index, name in enumerate(ARMS):
            if name in arms:
                _times(axes, group + (index - 1.5) * 0.18, arms[name], name, first=group == 0)
    axes.set_xticks(range(len(groups)), [title for title, _ in groups])
    axes.set_title("TTFT: p50 as a dot, p90 as a bar")


def _times(axes: Any, place: float, arm: Mapping[str, Any], name: str, *, first: bool = False) -> None:
    """Draw a median and its 90th percentile; bars would have no foot on a logarithmic axis."""
    axes.vlines(place, arm["ttft_p50"], arm["ttft_p90"], color=_COLOURS[name])
    axes.scatter([place], [arm["ttft_p90"]], marker="_", s=90, color=_COLOURS[name])
    label = name if first else None
    axes.scatter([place], [arm["ttft_p50"]], s=40, color=_COLOURS[name], label=label, zorder=3)
    axes.set_yscale("log")
    axes.set_ylabel("seconds")
    axes.grid(visible=True, axis="y", which="both", alpha=0.25)


def _saturated(axes: Any, part: Mapping[str, Any]) -> None:
    names = [name for name in ARMS if name in part["throughput"]]
    axes.bar(names, [part["throughput"][name] for name in names], color=[_COLOURS[n] for n in names])
    axes.set_ylabel("requests a second")
    axes.set_title(f"Throughput of {part['clients']} clients in a closed loop")


def _talks(axes: Any, part: Mapping[str, Any]) -> None:
    names = [name for name in ARMS if name in part["arms"]]
    for place, name in enumerate(names):
        _times(axes, place, part["arms"][name], name)
    axes.set_xticks(range(len(names)), names)
    axes.margins(x=0.2)
    axes.set_title(f"TTFT in conversations of {part['agents']} agents")
