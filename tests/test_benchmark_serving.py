"""The arithmetic of `benchmarks.serving`, and its series against a scripted backend; nothing is timed."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from agentkv import Mode, SamplingOptions
from agentkv.backends.base import Request, Usage
from agentkv.errors import BackendError
from agentkv.testing import ByteTokenizer, Scripted, ScriptedBackend
from agentkv.tokens import TokenIds
from agentkv.turn import predict_cached
from benchmarks._arms import AGENTKV, APPEND_STATE, ARMS, HOIST, REWRITE
from benchmarks.serving.__main__ import run
from benchmarks.serving.counters import Counters, parsed
from benchmarks.serving.measure import (
    later,
    percentile,
    ratio,
    recomputed,
    residues,
    summary,
    throughput,
    without_rows,
)
from benchmarks.serving.plan import PLANS, Count, Load, Profile, SizePlan
from benchmarks.serving.plot import write_plots
from benchmarks.serving.record import Call, Recorder, calls_here, finished, rule
from benchmarks.serving.thresholds import failures
from benchmarks.serving.workload import EARLY, Jobs, agent_jobs, arrivals

BLOCK = 32
TINY = SizePlan(
    asked_tokens=1200,
    unloaded=Count(kept=4, lost=2),
    loads=(Load(2000.0, 4),),
    saturated=Count(kept=32, lost=16),
    turns=Count(kept=3, lost=3),
    talking=ARMS,
)


async def measured(mode: Mode = Mode.ON, plan: SizePlan = TINY, **scripted: Any) -> tuple[Any, Recorder]:
    """Run a plan against a scripted backend."""
    answers = scripted.pop("answers", ["Yes."])
    backend = Recorder(ScriptedBackend(answers, block_size=BLOCK, capacity=10_000, **scripted))

    async def counters() -> Counters:
        usages = [call.usage for call in backend.calls if call.usage is not None]
        return Counters(sum(u.prompt_tokens for u in usages), sum(u.cached_tokens for u in usages))

    result = await run(backend, (plan,), counters, Progress(disable=True), mode, 0)
    environment = {"profile": "full", "mode": str(mode), "own_server": True}
    return {"environment": environment, **result}, backend


@pytest.fixture(scope="module")
def switched_on() -> Any:
    """The result of a run."""
    return asyncio.run(measured())[0]


@pytest.fixture(scope="module")
def switched_off() -> Any:
    """The result of the same with agentkv off."""
    return asyncio.run(measured(Mode.OFF))[0]


def rows(count: int, ttft: float, **more: Any) -> list[dict[str, Any]]:
    """Make up rows of requests that follow one another."""
    made = {
        "failed": None,
        "duration_s": ttft + 1.0,
        "ttft_s": ttft,
        "prompt_tokens": 4000,
        "cached_tokens": 3968,
        "predicted_cached_tokens": 3968,
        "rule_cached_tokens": 3968,
        "new_tokens": 40,
        **more,
    }
    return [{**made, "number": index + 1, "scheduled_s": index * (ttft + 1.0)} for index in range(count)]


def made_up(rewrite: float = 100.0, agentkv: float = 0.5, state: float = 0.6) -> dict[str, Any]:
    """Make up a result by what each arm takes to its first token."""
    seconds = {REWRITE: rewrite, APPEND_STATE: state, HOIST: state, AGENTKV: agentkv}
    tokens = {REWRITE: 4000, APPEND_STATE: 90, HOIST: 80, AGENTKV: 40}

    def arms(count: int) -> dict[str, Any]:
        made = {}
        for name, time in seconds.items():
            found = rows(count, time, new_tokens=tokens[name])
            counted = Counters(4000 * count, 3968 * count)
            made[name] = summary(found, counted)
        return made

    return {
        "environment": {"profile": "full", "own_server": True},
        "block_size": BLOCK,
        "residues_covered": True,
        "unloaded": {"arms": arms(4)},
        "loads": [{"rate": rate, "requests": 10, "arms": arms(10)} for rate in (0.1, 1.0)],
        "saturated": {"arms": arms(16)},
        "conversations": {"arms": arms(12)},
    }


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([3.0], 0.9, 3.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([4.0, 1.0, 3.0, 2.0, 5.0], 0.5, 3.0),
        ([0.0, 10.0], 0.9, 9.0),
    ],
)
def test_a_percentile_lies_between_values(values: list[float], share: float, expected: float) -> None:
    """Percentiles lie between two values in proportion, whatever the order."""
    assert percentile(values, share) == pytest.approx(expected)


def test_ratios_come_from_answered_rows() -> None:
    """A request that failed has no time; if all failed the ratio passes no threshold."""
    slow, fast = rows(3, 6.0), [*rows(3, 2.0), {"failed": "broken"}]
    assert ratio(slow, fast, 0.5) == 3.0
    assert ratio(slow, [{"failed": "broken"}], 0.5) == 0.0


def test_throughput_counts_the_whole_time() -> None:
    """From the first arrival to the last answer, whatever the order; nothing answered is no throughput."""
    found = rows(4, 1.0)
    assert throughput(found) == throughput(found[::-1]) == pytest.approx(4 / 8)
    assert throughput([{"failed": "broken", "scheduled_s": 0.0}]) == 0.0


def test_an_earlier_result_is_computed_anew_from_its_rows(switched_on: Any) -> None:
    """Sums that were wrong in it are right again, and its raw rows are the same."""
    saturated = switched_on["saturated"]
    arms = {name: {**arm, "warmup": 8, "throughput": 9.0} for name, arm in saturated["arms"].items()}
    wrong = {**saturated, "arms": arms, "throughput": {}}
    made = recomputed({**switched_on, "saturated": wrong})["saturated"]
    assert made["throughput"] == saturated["throughput"]
    assert {name: arm["rows"] for name, arm in made["arms"].items()} == {
        name: arm["rows"] for name, arm in saturated["arms"].items()
    }


def test_arrivals_are_repeatable_and_have_the_rate() -> None:
    """A seed gives the same times again, another one others; the mean gap is that of the rate."""
    times = arrivals(0.5, 4000, seed=3)
    assert times == arrivals(0.5, 4000, seed=3) != arrivals(0.5, 4000, seed=4)
    assert times == sorted(times)
    assert times[0] == 0.0
    assert times[-1] / (len(times) - 1) == pytest.approx(2.0, rel=0.1)


def test_jobs_differ_and_grow_by_a_token() -> None:
    """No two requests have the same value or question, and a block of them covers every residue."""
    tokenizer = ByteTokenizer()
    jobs = Jobs(tokenizer, BLOCK, seed=1).take(0, 100)
    assert len({job.values[EARLY] for job in jobs}) == len({job.question for job in jobs}) == 100
    assert len({len(tokenizer.encode(job.values[EARLY])) for job in jobs}) == 1
    lengths = [len(tokenizer.encode(job.question)) for job in jobs[5 : 5 + BLOCK]]
    assert {length % BLOCK for length in lengths} == set(range(BLOCK))


def test_agents_change_at_most_one_field_a_turn() -> None:
    """About half of the turns change a field, none more than one; a seed gives the same again."""
    agents = agent_jobs(8, 12, seed=2)
    assert agents == agent_jobs(8, 12, seed=2)
    changes = [
        sum(before.values[key] != after.values[key] for key in before.values)
        for jobs in agents
        for before, after in itertools.pairwise(jobs)
    ]
    assert set(changes) == {0, 1}
    assert 0.3 < sum(changes) / len(changes) < 0.7


def call(ids: list[int], sent: float, *, answer: int = 0, done: float | None = None, salt: str = "s") -> Call:
    """Make up a call."""
    return Call(salt, TokenIds(ids), 0, sent, sent, done, tuple(range(900, 900 + answer)))


@pytest.mark.parametrize("answer", [1, 31, 32, 33, 64])
@pytest.mark.parametrize("block", [1, 32])
@pytest.mark.parametrize("more", [1, 40])
def test_the_rule_is_the_prediction_for_one_history(answer: int, block: int, more: int) -> None:
    """With one finished call before, the rule is what a context predicts from its own history."""
    before = call(list(range(200)), 0.0, answer=answer, done=1.0)
    ids = [*before.sequence.tolist(), *range(2000, 2000 + more)]
    expected = predict_cached(200 + answer, 200 + answer - 1, len(ids), block)
    assert rule(call(ids, 2.0), [before], block) == expected


def test_a_running_call_counts_with_its_prompt() -> None:
    """Before its end, nothing of an answer can be shared, but the prompt can."""
    before = call(list(range(200)), 0.0, answer=64, done=5.0)
    ids = [*before.sequence.tolist(), *range(2000, 2040)]
    assert rule(call(ids, 2.0), [before], BLOCK) == 192
    assert rule(call(ids, 6.0), [before], BLOCK) == 256


def test_the_rule_takes_the_longest_of_its_salt() -> None:
    """What was sent under another salt does not count; of the rest the longest does."""
    short, other = call(list(range(64)), 0.0, done=1.0), call(list(range(300)), 0.0, done=1.0, salt="t")
    last = call(list(range(300)), 2.0)
    assert rule(last, [short, other], BLOCK) == 64
    assert rule(last, [], BLOCK) == 0
    assert rule(last, [last], BLOCK) == 0


async def test_a_recorder_notes_what_was_sent_and_answered() -> None:
    """A call holds prompt, salt, answer and usage; the running task's calls are told apart."""
    backend = Recorder(ScriptedBackend(["Yes."]))
    here = calls_here()
    await finished(backend.astream(Request(TokenIds([1, 2, 3]), "c", "s", SamplingOptions(max_tokens=8))))
    (noted,) = backend.calls
    assert here == [noted]
    assert (noted.salt, noted.ids.tolist()) == ("s", [1, 2, 3])
    assert noted.usage == Usage(3, 0, 3, generated_tokens=5)
    assert noted.first is not None
    assert noted.done is not None
    assert len(noted.sequence) == 8


def test_counters_are_summed_over_engines() -> None:
    """Hits and queries of all engines, and nothing of the external cache."""
    text = (
        'vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0\n'
        'vllm:prefix_cache_queries_total{engine="1",model_name="m"} 20.0\n'
        'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 6.4e+01\n'
        'vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 7.0\n'
        'vllm:prefix_cache_hits_created{engine="0",model_name="m"} 1.7e+09\n'
    )
    assert parsed(text) - Counters(20, 0) == Counters(queries=100, hits=64)


async def test_all_arms_are_sent_the_same() -> None:
    """In each series every arm is asked the same questions about the same values."""
    _, backend = await measured(plan=SizePlan(1200, Count(3, 3), (Load(2000.0, 5),)))
    salts = {noted.salt for noted in backend.calls}
    assert len(salts) == len(ARMS)
    jobs = Jobs(backend.tokenizer, BLOCK, 0).take(0, 8)
    for salt in salts:
        texts = [backend.tokenizer.decode(one.ids.tolist()) for one in backend.calls if one.salt == salt]
        for job in jobs:
            asked = [text for text in texts if f"{job.question}\n" in text or text.endswith(job.question)]
            assert [text for text in asked if job.values[EARLY] in text] == asked
            assert len(asked) == 1


def test_a_run_covers_the_residues_and_follows_the_rule(switched_on: Any) -> None:
    """Every prompt length modulo the block occurs, and each call's cached tokens are those of the rule."""
    result = switched_on
    assert result["residues"] == list(range(BLOCK))
    assert result["residues_covered"]
    for part in _parts(result):
        for name, arm in part["arms"].items():
            predicted = [row["predicted_cached_tokens"] is not None for row in arm["rows"]]
            assert set(predicted) == {name in (REWRITE, AGENTKV)}
            assert arm["failed"] == 0
            assert arm["at_rule"] == len(arm["rows"])
            assert arm["counters"] == {key: arm[key] for key in ("cached_tokens", "prompt_tokens")}
    assert not any("rule" in line or "counted" in line for line in failures(result))


def test_ratios_can_be_computed_again_from_the_rows(switched_on: Any) -> None:
    """What stands at the top of a result follows from its raw rows."""
    result = switched_on
    arms = result["unloaded"]["arms"]
    assert result["unloaded"]["ttft_rewrite_over_agentkv"] == ratio(
        arms[REWRITE]["rows"], arms[AGENTKV]["rows"], 0.5
    )
    for name, arm in result["saturated"]["arms"].items():
        assert result["saturated"]["throughput"][name] == throughput(arm["rows"])
        assert len(arm["rows"]) == (16 if name == REWRITE else 32)
    for arm in result["conversations"]["arms"].values():
        counting = [row["new_tokens"] for row in later(arm["rows"])]
        assert arm["new_tokens_per_turn"] == pytest.approx(sum(counting) / len(counting))
        assert len(counting) == 8 * 2


def test_agentkv_adds_the_fewest_tokens_and_off_adds_the_most(switched_on: Any, switched_off: Any) -> None:
    """In conversations fewer tokens are new than with the state appended; switched off, far more."""
    new = {name: arm["new_tokens_per_turn"] for name, arm in switched_on["conversations"]["arms"].items()}
    assert min(new, key=lambda name: new[name]) == AGENTKV
    assert any("new tokens a turn" in line for line in failures(switched_off))
    assert not any("new tokens a turn" in line for line in failures(switched_on))


async def test_requests_that_fail_are_counted_and_named() -> None:
    """A request that fails is a row without a time, and the result falls short."""
    broken: list[Request] = []

    def answer(request: Request) -> str | Scripted:
        asked = b"00001: what" in bytes(i for i in request.ids.tolist() if i < 256)
        if broken or not asked:
            return "Yes."
        broken.append(request)
        return Scripted("Yes.", error=BackendError("the line broke"))

    small = SizePlan(
        1200, Count(2, 2), (Load(2000.0, 3),), saturated=Count(2, 2), turns=Count(2, 2), talking=ARMS
    )
    result, _ = await measured(plan=small, answers=[answer])
    failed = sum(arm["failed"] for part in _parts(result) for arm in part["arms"].values())
    assert failed == 1
    assert sum("failed" in line for line in failures(result)) == 1


def _parts(result: Any) -> list[Any]:
    return [result["unloaded"], *result["loads"], result["saturated"], result["conversations"]]


def test_a_good_result_passes() -> None:
    """What meets every threshold falls short of none."""
    assert failures(made_up()) == []


@pytest.mark.parametrize(
    ("result", "missed"),
    [
        (made_up(rewrite=7.0), ["unloaded", "a second, 10 of them", "saturated"]),
        (made_up(agentkv=0.7), ["below append_state", "below hoist", "later than append_state"]),
        (made_up(agentkv=100.0), ["unloaded", "a second, 10 of them", "saturated", "below", "later than"]),
    ],
    ids=["rewriting is fast", "the state is faster", "agentkv is off"],
)
def test_what_falls_short_is_named(result: dict[str, Any], missed: list[str]) -> None:
    """Each threshold that is missed has a line; with agentkv as slow as rewriting all of the times do."""
    found = failures(result)
    for part in missed:
        assert any(part in line for line in found), (part, found)


@pytest.mark.parametrize(
    ("part", "change", "wrong"),
    [
        ("unloaded", {"rule_cached_tokens": 4000}, True),
        ("conversations", {"rule_cached_tokens": 4000}, True),
        ("loads", {"rule_cached_tokens": 4000}, False),
        ("loads", {"predicted_cached_tokens": 4000, "rule_cached_tokens": 4000}, True),
        ("saturated", {"rule_cached_tokens": 3936}, True),
    ],
)
def test_cached_tokens_are_held_to_the_rule(part: str, change: dict[str, int], wrong: bool) -> None:
    """One at a time the rule holds exactly; at once, between the own history and all that was sent."""
    result = made_up()
    series = result["loads"][0] if part == "loads" else result[part]
    series["arms"][AGENTKV]["rows"][2].update(change)
    assert any("not those of the rule" in line for line in failures(result)) is wrong


def _uncovered(result: dict[str, Any]) -> None:
    result.update(residues=[1, 2], residues_covered=False)


def _miscounted(result: dict[str, Any]) -> None:
    result["unloaded"]["arms"][HOIST]["counters"]["cached_tokens"] += 32


@pytest.mark.parametrize(
    ("spoil", "line"), [(_uncovered, "2 of 32 remainders"), (_miscounted, "the server counted")]
)
def test_coverage_and_counters_are_held(spoil: Callable[[dict[str, Any]], None], line: str) -> None:
    """Residues that are missing, and a server that counts otherwise than its answers say, are named."""
    result = made_up()
    spoil(result)
    (found,) = failures(result)
    assert line in found


def test_a_shared_server_is_not_held_to_its_counters() -> None:
    """Where others may use the server, its counters are only told."""
    result = made_up()
    _miscounted(result)
    result["environment"]["own_server"] = False
    assert failures(result) == []


def test_residues_are_those_of_answered_requests() -> None:
    """Lengths of requests that failed cover nothing."""
    made = [*rows(1, 1.0), {"failed": "x"}, *rows(1, 1.0, prompt_tokens=33)]
    assert residues(made, BLOCK) == [0, 1]


def test_the_quick_plan_has_a_request_for_every_residue() -> None:
    """The single requests of each profile's first size are at least as many as a block has tokens."""
    for profile in (Profile.QUICK, Profile.FULL):
        plan = PLANS[profile][0]
        singles = plan.unloaded.kept + sum(load.requests for load in plan.loads)
        assert plan.saturated is not None
        assert singles + plan.saturated.kept >= BLOCK
        assert {APPEND_STATE, AGENTKV} <= set(plan.talking)


def test_a_result_is_plain_json_and_a_plot(tmp_path: Path, switched_on: Any) -> None:
    """A result can be written as JSON without infinities, and drawn."""
    result = switched_on
    assert math.isfinite(json.loads(json.dumps(result, allow_nan=False))["loads"][0]["rate"])
    assert "rows" not in json.dumps(without_rows(result))
    made = write_plots(result, tmp_path / "serving.json")
    assert [path.name for path in made] == ["serving.svg", "serving.png"]
    assert all(path.stat().st_size > 1000 for path in made)
