"""``python -m benchmarks._figures``: writes the tables of README.md and docs/ from the committed results.

The tables stand between ``<!-- figures: NAME -->`` and ``<!-- end -->``; the results lie in
``benchmarks/results``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks import _figures_serving, _figures_splice
from benchmarks._arms import AGENTKV, APPEND_STATE, ARMS, HOIST, REWRITE

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = Path(__file__).parent / "results"
PAGES: Final = ("README.md", "docs/benchmarks.md", "docs/splices.md")
_SHOWN: Final = ((10_000, 100), (100_000, 10))
"""Prompt sizes and numbers of fields whose overhead is shown for all lengths of the conversation."""
_Part = Callable[[Mapping[str, Any]], _figures_splice.Table]
_BLOCK: Final = re.compile(r"(<!-- figures: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _demo() -> str:
    s = _load("demo")["summary"]
    changed = s["changed_turns"]
    return _table(
        ["sums over turns 2 to 12", "agentkv", "rewrite", "append state"],
        [
            [
                "time to first tokens",
                f"{s['cumulative_ttft_s']:.2f} s",
                f"{s['cumulative_ttft_ratio']:.1f}×",
                f"{s['append_state_ttft_ratio']:.1f}×",
            ],
            [
                f"new values reported, of {changed}",
                str(s["new_values_reported"]),
                str(s["rewrite_new_values_reported"]),
                str(s["append_state_new_values_reported"]),
            ],
            ["old values reported", str(s["old_values_reported"]), "–", "–"],
            ["new tokens", str(s["new_tokens"]), "–", str(s["append_state_new_tokens"])],
            ["prompt tokens from the cache", f"{s['cached_share']:.1%}", "–", "–"],
            ["turns not as predicted", str(s["mispredicted_turns"]), "–", "–"],
        ],
    )


def _sizes(cell: Callable[[Mapping[str, Any], str], str]) -> list[list[str]]:
    rows = _load("turns")["rows"]
    return [[f"{row['prompt_tokens']:,}", *(cell(row["arms"], name) for name in ARMS)] for row in rows]


def _turns_ratios() -> str:
    def ratio(arms: Mapping[str, Any], name: str) -> str:
        return f"{arms[name]['cumulative_ttft_s'] / arms[AGENTKV]['cumulative_ttft_s']:.1f}×"

    rows = [
        [f"{row['prompt_tokens']:,}", *(ratio(row["arms"], name) for name in (REWRITE, APPEND_STATE, HOIST))]
        for row in _load("turns")["rows"]
    ]
    return _table(["prompt tokens", "rewrite", "append state", "hoist"], rows)


def _turns_ttft() -> str:
    rows = _sizes(lambda arms, name: f"{arms[name]['cumulative_ttft_s']:.2f} s")
    return _table(["prompt tokens", *ARMS], rows)


def _turns_tokens() -> str:
    return _table(["prompt tokens", *ARMS], _sizes(lambda arms, name: f"{arms[name]['new_tokens']:,.0f}"))


def _turns_cached() -> str:
    return _table(["prompt tokens", *ARMS], _sizes(lambda arms, name: f"{arms[name]['cached_share']:.1%}"))


def _overhead() -> str:
    found = _load("overhead")
    rows = [
        [
            f"{row['turns']:,}",
            f"{row['prompt_tokens']:,}",
            f"{row['fields']:,}",
            f"{row['median_ms']:.2f} ms",
            f"{row['p99_ms']:.2f} ms",
            f"{row['serialise_median_ms']:.2f} ms",
        ]
        for row in found["rows"]
        if (row["prompt_tokens"], row["fields"]) in _SHOWN or row["turns"] == 100
    ]
    head = ["turns", "prompt tokens", "fields", "median", "p99", "the request's body, apart"]
    growth = found["ratios"]["median_5000_over_100"]
    return f"{_table(head, rows)}\nMedian at 5,000 turns over that at 100: {growth:.2f}.\n"


def _machine(name: str) -> str:
    e = _load(name)["environment"]
    versions = e["versions"]
    gpu = f"{e['gpu']}, " if e.get("gpu") else ""
    return (
        f"Run on {e['date']} at commit {e['commit']}: {gpu}{e['cpu']}, {e['cores']} cores, {e['system']}, "
        f"Python {e['python']}, torch {versions['torch']}, transformers {versions['transformers']}.\n"
    )


def _splice_figures() -> dict[str, Callable[[], str]]:
    """The blocks of the splice benchmarks whose results are there; each runs where its hardware is."""
    made: dict[str, Callable[[], str]] = {}
    parts: dict[str, _Part] = {
        "ttft": _figures_splice.ttft,
        "skills": _figures_splice.skills,
        "append": _figures_splice.append,
        "stored": _figures_splice.stored,
    }
    wanted: dict[str, dict[str, _Part]] = {
        "splice-window": {"fidelity": _figures_splice.window},
        "splice-vllm": parts,
        "splice-transformers": parts,
        "splice-fidelity": {"probes": _figures_splice.fidelity},
        "splice-gpu": {"ttft": _figures_splice.gpu},
    }
    for name, tables in wanted.items():
        if not (RESULTS / f"{name}.json").exists():
            continue
        for part, table in tables.items():
            made[f"{name}-{part}"] = partial(lambda name, table: _table(*table(_load(name))), name, table)
        made[f"{name}-machine"] = partial(_machine, name)
    return made


FIGURES: Final[Mapping[str, Callable[[], str]]] = {
    "demo": _demo,
    "demo-machine": lambda: _machine("demo"),
    "turns-ratios": _turns_ratios,
    "turns-ttft": _turns_ttft,
    "turns-tokens": _turns_tokens,
    "turns-cached": _turns_cached,
    "turns-machine": lambda: _machine("turns"),
    "serving-unloaded": lambda: _table(*_figures_serving.unloaded(_load("serving"))),
    "serving-loads": lambda: _table(*_figures_serving.loads(_load("serving"))),
    "serving-saturated": lambda: _table(*_figures_serving.saturated(_load("serving"))),
    "serving-conversations": lambda: _table(*_figures_serving.conversations(_load("serving-conversations"))),
    "serving-machine": lambda: _machine("serving"),
    "serving-conversations-machine": lambda: _machine("serving-conversations"),
    "overhead": _overhead,
    "overhead-machine": lambda: _machine("overhead"),
    **_splice_figures(),
}
"""Name of each block to what fills it."""


def filled(text: str) -> str:
    """Return a page with its figures written anew."""
    return _BLOCK.sub(lambda m: f"{m[1]}\n{FIGURES[m['name']]()}\n{m[3]}", text)


def main() -> None:
    """Write all pages."""
    for name in PAGES:
        page = ROOT / name
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"figures of {name} written")


if __name__ == "__main__":
    main()
