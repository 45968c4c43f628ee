"""Numbers that are computed from raw rows alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.serving.measure import percentile
from benchmarks.splice.plan import DEFAULT_ANCHORING, DEFAULT_SEAM, SEAMS, Anchoring, Part
from benchmarks.splice.times import APPEND, DISK_COLD, FULL, HIT, PRIME, SPLICE

Row = Mapping[str, Any]


def summed(environment: Mapping[str, Any], rows: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Return a result: what the raw rows come to, and the rows. What was not measured is None or empty."""
    probes = rows[Part.FIDELITY]
    return {
        "environment": dict(environment),
        "ttft": series(rows[Part.TTFT], "tokens"),
        "skills": series(rows[Part.SKILLS], "skills"),
        "append_after_4000": appended(rows[Part.APPEND]),
        "fidelity": list(_fidelity(probes)),
        "default": _short(variant(probes, DEFAULT_ANCHORING, DEFAULT_SEAM), named=True),
        "control": _short(variant(probes, DEFAULT_ANCHORING, DEFAULT_SEAM, rotated=False), named=False),
        "priming": {str(tokens): median(of(rows[Part.TTFT], PRIME, tokens)) for tokens in sizes(rows)},
        "linearity": linearity(rows[Part.TTFT]),
        "stored": stored(rows["artifacts"]),
        "rows": {name: list(found) for name, found in rows.items()},
    }


def series(rows: Sequence[Row], by: str) -> list[dict[str, Any]]:
    """Return the medians of each arm for each value of a column."""
    made = []
    for value in sorted({row[by] for row in rows}):
        own = [row for row in rows if row[by] == value]
        made.append(
            ({"skills": value} if by == "skills" else {})
            | {"tokens": own[0]["tokens"]}
            | {f"{arm}_s": median(of(own, arm)) for arm in (FULL, SPLICE, DISK_COLD, HIT)}
            | {"samples": len(of(own, SPLICE))}
        )
    return made


def of(rows: Iterable[Row], arm: str, tokens: int | None = None) -> list[Row]:
    """Return the rows of an arm, and of a size; of cold ones only those that were read from disk."""
    return [
        row
        for row in rows
        if row["arm"] == arm
        and tokens in (None, row["tokens"])
        and (arm != DISK_COLD or row["tier"] in (None, "disk"))
    ]


def median(rows: Sequence[Row], column: str = "ttft_s") -> float | None:
    """Return the median of a column; None without rows."""
    return statistics.median(row[column] for row in rows) if rows else None


def sizes(rows: Mapping[str, Sequence[Row]]) -> list[int]:
    """Return the sizes that were measured."""
    return sorted({row["tokens"] for row in rows[Part.TTFT]})


def appended(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return what adding a skill takes, and the most tokens of the old ones that were computed again."""
    spliced, plain = of(rows, SPLICE), of(rows, APPEND)
    if not spliced or not plain:
        return None
    return {
        "splice_s": median(spliced),
        "append_s": median(plain),
        "recomputed_tokens": max(row["recomputed_tokens"] for row in spliced),
    }


def linearity(rows: Sequence[Row]) -> dict[str, float] | None:
    """Fit a line to splice times over skill sizes, by least squares; None with fewer than three sizes.

    ``worst`` is the largest distance of a median from the line, as a part of the line's value there.
    """
    points = [
        (float(row["tokens"]), float(row["splice_s"])) for row in series(rows, "tokens") if row["splice_s"]
    ]
    if len(points) < 3:
        return None
    slope, start = statistics.linear_regression(*zip(*points, strict=True))
    worst = max(abs(y / (start + slope * x) - 1) for x, y in points)
    return {"s_per_token": slope, "start_s": start, "worst": worst}


def stored(rows: Sequence[Row]) -> dict[str, float] | None:
    """Return what artifacts take on disk; None if they lie elsewhere."""
    known = [row for row in rows if row["nbytes"]]
    if not known:
        return None
    tokens, nbytes = sum(row["tokens"] for row in known), sum(row["nbytes"] for row in known)
    return {"artifacts": len(known), "tokens": tokens, "bytes_per_token": nbytes / tokens}


def variant(rows: Sequence[Row], anchoring: str, seam: int, *, rotated: bool = True) -> dict[str, Any] | None:
    """Return what the probes of one way to splice come to; None without probes."""
    found = [
        row for row in rows if (row["anchor"], row["seam"], row["rotated"]) == (str(anchoring), seam, rotated)
    ]
    if not found:
        return None
    top1 = [same for row in found for same in row["top1"]]
    kl = [value for row in found for value in row["kl"]]
    return {
        "anchor": str(anchoring),
        "seam": seam,
        "top1_agreement": sum(top1) / len(top1),
        "kl_median": statistics.median(kl),
        "kl_p99": percentile(kl, 0.99),
        "greedy16_agreement": sum(all(row["top1"]) for row in found) / len(found),
        "cosine_median": statistics.median(value for row in found for value in row["cosine"]),
        "probes": len(found),
        "positions": len(top1),
        "reference_names_fact": sum(row["reference_names_fact"] for row in found),
        "spliced_names_fact": _counted([row["spliced_names_fact"] for row in found]),
    }


def _fidelity(rows: Sequence[Row]) -> Iterable[dict[str, Any]]:
    for anchoring in Anchoring:
        for seam in SEAMS:
            found = variant(rows, anchoring, seam)
            if found is not None:
                yield found


def _short(found: Mapping[str, Any] | None, *, named: bool) -> dict[str, Any] | None:
    if found is None:
        return None
    columns = (("anchor", "seam") if named else ()) + ("top1_agreement", "kl_median")
    return {column: found[column] for column in columns}


def _counted(named: Sequence[bool | None]) -> int | None:
    """Count the answers that name a fact; None where none was read."""
    return None if None in named else sum(map(bool, named))
