"""What splicing promises, and what of it a result misses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from benchmarks.splice.measure import median, of
from benchmarks.splice.plan import PLANS, Engine, Part, Profile
from benchmarks.splice.times import APPEND, DISK_COLD, FULL, HIT, PRIME, SPLICE

SOONER: Final[Mapping[Engine, Mapping[int, float]]] = {
    Engine.VLLM: {2048: 20.0, 4096: 35.0},
    Engine.TRANSFORMERS: {2048: 10.0, 4096: 15.0},
}
"""Least times that a first token comes sooner than with everything computed, by tokens of the skill."""
OVER_HIT: Final = 1.3
"""Most times that a splice takes of a prefix hit and priming together, on a server."""
LINE: Final = 0.25
"""Most that a median of splice times lies off the line through all of them."""
TOP1: Final = 0.97
KL: Final = 0.01


def promised(engine: Engine) -> dict[str, Any]:
    """Return the thresholds by name."""
    return {
        "full_over_splice": {str(tokens): least for tokens, least in SOONER[engine].items()},
        "splice_over_hit_and_priming": OVER_HIT if engine is Engine.VLLM else None,
        "off_the_line": LINE,
        "recomputed_tokens": "less than a block",
        "splice_over_append": 1.0,
        "top1_agreement": TOP1,
        "kl_median": KL,
    }


def failures(result: Mapping[str, Any]) -> list[str]:
    """Return what falls short, of the parts that were asked for; empty if nothing does."""
    environment, rows = result["environment"], result["rows"]
    engine, profile = Engine(environment["backend"]), Profile(environment["profile"])
    checks = {
        Part.TTFT: lambda: [
            *_sooner(rows[Part.TTFT], engine, profile),
            *_near_a_hit(result, engine),
            *_linear(result),
            *_as_said(result, Part.TTFT),
        ],
        Part.SKILLS: lambda: [
            *_counts(result["skills"], profile),
            *_as_said(result, Part.SKILLS),
        ],
        Part.APPEND: lambda: [
            *_appended(result["append_after_4000"], environment["block_size"]),
            *_as_said(result, Part.APPEND),
        ],
        Part.FIDELITY: lambda: [*_faithful(result, profile)],
    }
    found = [line for part in environment["parts"] for line in checks[Part(part)]()]
    return [*found, "it was interrupted"] if environment.get("interrupted") else found


def _sooner(rows: Sequence[Mapping[str, Any]], engine: Engine, profile: Profile) -> Iterator[str]:
    for tokens, least in SOONER[engine].items():
        if tokens not in PLANS[profile].sizes:
            continue
        full, splice = median(of(rows, FULL, tokens)), median(of(rows, SPLICE, tokens))
        if full is None or splice is None:
            yield f"a skill of {tokens} tokens was not measured"
        elif not full / splice >= least:
            yield f"{tokens} tokens: {full / splice:.1f} times sooner than a full prefill, not {least:g}"


def _near_a_hit(result: Mapping[str, Any], engine: Engine) -> Iterator[str]:
    if engine is not Engine.VLLM:
        return
    rows = result["rows"][Part.TTFT]
    for tokens in sorted({row["tokens"] for row in rows}):
        splice, hit, prime = (median(of(rows, arm, tokens)) for arm in (SPLICE, HIT, PRIME))
        if splice is None or hit is None or prime is None:
            yield f"{tokens} tokens: a splice, a hit or priming was not measured"
        elif not splice <= OVER_HIT * (hit + prime):
            yield (
                f"{tokens} tokens: a splice takes {splice / (hit + prime):.2f} times a prefix hit and "
                f"priming, more than {OVER_HIT:g}"
            )


def _linear(result: Mapping[str, Any]) -> Iterator[str]:
    line = result["linearity"]
    if line is None:
        yield "fewer than three sizes were measured: no line can be fitted"
    elif not line["worst"] <= LINE:
        yield f"splice times lie up to {line['worst']:.0%} off a line over the skill's tokens, not {LINE:.0%}"


def _counts(found: Sequence[Mapping[str, Any]], profile: Profile) -> Iterator[str]:
    missing = set(PLANS[profile].counts) - {row["skills"] for row in found}
    if missing:
        yield f"prompts of {', '.join(map(str, sorted(missing)))} skills were not measured"
    for row in found:
        if row["splice_s"] is None or row["full_s"] is None or not row["splice_s"] < row["full_s"]:
            yield f"{row['skills']} skills: a splice takes as long as computing them"


def _appended(found: Mapping[str, Any] | None, block: int) -> Iterator[str]:
    if found is None:
        yield "a skill added in mid-conversation was not measured"
        return
    if not found["recomputed_tokens"] < block:
        yield (
            f"added after 4,000 cached tokens: {found['recomputed_tokens']} of them were computed again, a "
            f"block has {block}"
        )
    if not found["splice_s"] < found["append_s"]:
        yield (
            f"added after 4,000 cached tokens: first token after {found['splice_s']:.2f} s, and after "
            f"{found['append_s']:.2f} s if it is computed"
        )


def _as_said(result: Mapping[str, Any], part: Part) -> Iterator[str]:
    """Whether each call did what its arm is called, by what the backend says."""
    for row in result["rows"][part]:
        what = f"{part}, {row['arm']} of {row['tokens']} tokens, sample {row['sample'] + 1}"
        spliced, cached = row["spliced_tokens"], row["cached_tokens"]
        if row["arm"] in (SPLICE, DISK_COLD):
            if spliced == 0 or spliced != row["predicted_spliced_tokens"]:
                refused = "; ".join(row["refused"]) or "nothing was refused"
                planned = row["predicted_spliced_tokens"]
                yield f"{what}: {spliced} tokens spliced of {planned} planned ({refused})"
            wanted = "disk" if row["arm"] == DISK_COLD else "ram"
            # The memory of a server that somebody else started may be larger than what was put into it.
            if row["tier"] not in (None, wanted) and result["environment"]["own_server"]:
                yield f"{what}: artifacts were taken from {row['tier']}, not from {wanted}"
        elif spliced:
            yield f"{what}: {spliced} tokens were spliced"
        if row["arm"] == FULL and cached:
            yield f"{what}: {cached} tokens were cached"
        if row["arm"] in (HIT, APPEND) and cached < row["predicted_cached_tokens"]:
            yield f"{what}: {cached} tokens cached of {row['predicted_cached_tokens']} predicted"


def _faithful(result: Mapping[str, Any], profile: Profile) -> Iterator[str]:
    default, control = result["default"], result["control"]
    if default is None or control is None:
        yield "the default or the control was not measured"
        return
    for found in result["fidelity"]:
        if found["probes"] < PLANS[profile].probes.probes:
            yield f"anchor {found['anchor']}, seam {found['seam']}: only {found['probes']} probes"
    if not default["top1_agreement"] >= TOP1:
        yield f"default: the top token agrees at {default['top1_agreement']:.1%} of positions, not {TOP1:.0%}"
    if not default["kl_median"] <= KL:
        yield f"default: median KL {default['kl_median']:.4f}, above {KL:g}"
    if control["top1_agreement"] >= TOP1 and control["kl_median"] <= KL:
        yield (
            "control: without re-rotation it passes too, so the probes show nothing "
            f"({control['top1_agreement']:.1%}, {control['kl_median']:.4f})"
        )
