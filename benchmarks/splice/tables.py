"""What was measured, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

Columns = tuple[Sequence[str], Sequence[Sequence[str]]]


def tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Yield a table for each part that was measured."""
    titles = {
        "time to first token": times(result, "ttft"),
        "several skills in one prompt": times(result, "skills"),
        "a skill added after 4,000 cached tokens": append(result),
        "fidelity against a full prefill": fidelity(result),
    }
    for title, (head, rows) in titles.items():
        if rows:
            table = Table(*head, title=title)
            for row in rows:
                table.add_row(*row)
            yield table


def times(result: Mapping[str, Any], part: str) -> Columns:
    """Return the times of single skills (``"ttft"``) or of several (``"skills"``)."""
    rows = []
    for row in result[part]:
        first = [f"{row['skills']}"] if part == "skills" else []
        priming = [_s(result["priming"].get(str(row["tokens"])))] if part == "ttft" else []
        cells = [_s(row[name]) for name in ("full_s", "splice_s", "disk_cold_s", "hit_s")]
        rows.append([*first, f"{row['tokens']:,}", *cells, *priming, _times(row["full_s"], row["splice_s"])])
    head = ["tokens", "full prefill", "splice", "splice, disk-cold", "prefix hit"]
    more = ["priming"] if part == "ttft" else []
    return [*(["skills"] if part == "skills" else []), *head, *more, "full ÷ splice"], rows


def append(result: Mapping[str, Any]) -> Columns:
    """Return what adding a skill takes."""
    found = result["append_after_4000"]
    head = ["spliced", "appended and computed", "append ÷ splice", "old tokens computed again"]
    if found is None:
        return head, []
    ratio = _times(found["append_s"], found["splice_s"])
    return head, [[_s(found["splice_s"]), _s(found["append_s"]), ratio, str(found["recomputed_tokens"])]]


def fidelity(result: Mapping[str, Any]) -> Columns:
    """Return what the probes of each anchor and seam come to, and of the control."""
    head = [
        "compiled behind",
        "seam",
        "top-1 agreement",
        "KL, median",
        "KL, p99",
        "same 16 tokens",
        "cosine, median",
        "fact named",
        "probes",
    ]
    return head, [
        [
            found["anchor"],
            f"{found['seam']}{'' if found['rotated'] else ', not re-rotated (control)'}",
            f"{found['top1_agreement']:.1%}",
            f"{found['kl_median']:.4f}",
            f"{found['kl_p99']:.3f}",
            f"{found['greedy16_agreement']:.1%}",
            f"{found['cosine_median']:.5f}",
            "–"
            if found["spliced_names_fact"] is None
            else f"{found['spliced_names_fact']} ({found['reference_names_fact']})",
            str(found["probes"]),
        ]
        for found in _variants(result)
    ]


def _variants(result: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    from benchmarks.splice.measure import variant
    from benchmarks.splice.plan import DEFAULT_ANCHORING, DEFAULT_SEAM

    for found in result["fidelity"]:
        yield {**found, "rotated": True}
    control = variant(result["rows"]["fidelity"], DEFAULT_ANCHORING, DEFAULT_SEAM, rotated=False)
    if control is not None:
        yield {**control, "rotated": False}


def _s(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.2f} s"


def _times(slow: float | None, fast: float | None) -> str:
    return f"{slow / fast:.1f}×" if slow and fast else "–"
