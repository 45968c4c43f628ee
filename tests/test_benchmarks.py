"""The benchmarks' own arithmetic: what passes passes, and what is switched off fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from agentkv import Mode
from agentkv.testing import ScriptedBackend
from benchmarks import overhead, turns


def test_turns_rows_carry_the_samples_they_are_computed_from() -> None:
    """Sums can be computed again from the raw turns, and agentkv adds the fewest new tokens."""
    (row,) = turns.run(ScriptedBackend(["Yes."], prefill_s=0.001), [1000], 2, Mode.ON, Console(quiet=True))
    for arm in row["arms"].values():
        assert len(arm["samples"]) == 2
        sums = sorted(sum(turn["new_tokens"] for turn in taken[1:]) for taken in arm["samples"])
        assert arm["new_tokens"] == sum(sums) / 2
    tokens = {name: arm["new_tokens"] for name, arm in row["arms"].items()}
    assert min(tokens, key=lambda name: tokens[name]) == "agentkv"
    assert 900 < row["prompt_tokens"] < 1300


def test_turns_fall_short_when_agentkv_is_off() -> None:
    """The same run in mode off misses the thresholds that the run in mode on meets."""
    backend = ScriptedBackend(["Yes."], prefill_s=0.001)
    modes = (Mode.ON, Mode.OFF)
    found = {mode: turns.failures(turns.run(backend, [2000], 1, mode, Console(quiet=True))) for mode in modes}
    assert found[Mode.ON] == []
    assert any("times sooner than rewriting" in line for line in found[Mode.OFF])
    assert any("new tokens" in line for line in found[Mode.OFF])


def test_overhead_rows_carry_their_samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command writes rows, ratios and the machine; the median is that of the raw samples."""
    monkeypatch.setattr(overhead, "combinations", lambda _: [(t, 1000, 2) for t in (100, 5000)])
    monkeypatch.setattr(overhead, "measure", _row)
    file = tmp_path / "overhead.json"
    result = CliRunner().invoke(overhead.app, ["--profile", "quick", "--json", str(file)])
    assert result.exit_code == 0, result.output
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["ratios"]["median_5000_over_100"] == 1.0
    assert written["environment"]["cores"]
    assert [row["turns"] for row in written["rows"]] == [100, 5000]


def test_a_row_is_measured_from_real_turns() -> None:
    """A short conversation gives as many samples as asked for, and their median."""
    row = overhead.measure(20, 500, 3, 10, Mode.ON)
    assert len(row["samples_ms"]) == 10
    assert min(row["samples_ms"]) <= row["median_ms"] <= row["p99_ms"]
    assert min(row["samples_ms"]) > 0


@pytest.mark.parametrize(
    ("medians", "expected"),
    [((0.5, 0.6), 0), ((0.5, 0.8), 1), ((1.2, 1.2), 2), ((1.2, 2.0), 3)],
)
def test_overhead_falls_short_by_median_or_growth(medians: tuple[float, float], expected: int) -> None:
    """More than a millisecond, or more than half again as much at 5,000 turns, is named."""
    rows = [
        {"turns": turn, "prompt_tokens": 1, "fields": 1, "median_ms": median}
        for turn, median in zip((100, 5000), medians, strict=True)
    ]
    assert len(overhead.failures(rows)) == expected


def _row(turn: int, prompt_tokens: int, fields: int, samples: int, mode: Mode) -> dict[str, Any]:
    return {
        "turns": turn,
        "prompt_tokens": prompt_tokens,
        "fields": fields,
        "median_ms": 0.5,
        "p99_ms": 0.5,
        "serialise_median_ms": 0.1,
        "samples_ms": [0.5] * samples,
    }
