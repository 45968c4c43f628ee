"""No figure in the docs but those of the committed results."""

from __future__ import annotations

import json
import statistics

import pytest

from benchmarks import overhead, turns
from benchmarks._figures import FIGURES, PAGES, RESULTS, ROOT, filled


@pytest.mark.parametrize("page", PAGES)
def test_figures_are_those_of_the_committed_results(page: str) -> None:
    """Writing the figures anew changes nothing; `python -m benchmarks._figures` does it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert filled(text) == text
    assert "<!-- figures: " in text


def test_every_figure_is_shown() -> None:
    """No table is computed for nothing."""
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    assert all(f"<!-- figures: {name} -->" in text for name in FIGURES)


def test_committed_sums_follow_from_the_raw_turns() -> None:
    """Medians, shares and thresholds of the committed run can be computed again from its samples."""
    result = json.loads((RESULTS / "turns.json").read_text(encoding="utf-8"))
    for row in result["rows"]:
        for arm in row["arms"].values():
            sums = [sum(turn["ttft_s"] for turn in taken[1:]) for taken in arm["samples"]]
            assert arm["cumulative_ttft_s"] == pytest.approx(statistics.median(sums))
            flat = [turn for taken in arm["samples"] for turn in taken[1:]]
            share = sum(t["cached_tokens"] for t in flat) / sum(t["prompt_tokens"] for t in flat)
            assert arm["cached_share"] == pytest.approx(share)
    assert turns.failures(result["rows"]) == result["failures"]


def test_committed_medians_follow_from_the_raw_samples() -> None:
    """The same for the overhead."""
    result = json.loads((RESULTS / "overhead.json").read_text(encoding="utf-8"))
    for row in result["rows"]:
        assert row["median_ms"] == pytest.approx(statistics.median(row["samples_ms"]))
    assert result["ratios"]["median_5000_over_100"] == pytest.approx(overhead.growth(result["rows"]))
    assert overhead.failures(result["rows"]) == result["failures"]


def test_committed_demo_follows_from_its_turns() -> None:
    """Ratios and counts of the demo's summary are those of its turns 2 to 12."""
    result = json.loads((RESULTS / "demo.json").read_text(encoding="utf-8"))
    later, summary = result["turns"][1:], result["summary"]
    ttft = sum(turn["ttft_s"] for turn in later)
    assert summary["cumulative_ttft_ratio"] == pytest.approx(sum(t["rewrite_ttft_s"] for t in later) / ttft)
    assert summary["new_values_reported"] == sum(bool(t["reports_new"]) for t in later)
    assert summary["changed_turns"] == sum(t["field"] is not None for t in later)
