"""`benchmarks.splice` and `benchmarks.gpu_splice` on tiny models, and their arithmetic; nothing is timed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from agentkv import Mode
from agentkv.splicing import chunk_ids
from agentkv.template import TemplateEncoder
from agentkv.testing import ByteTokenizer
from benchmarks import _figures_splice, gpu_splice
from benchmarks.splice import __main__ as command
from benchmarks.splice import corpus, window
from benchmarks.splice.compare import compare, names
from benchmarks.splice.fidelity import POSITIONS, FidelityRun
from benchmarks.splice.kvmodel import KVModel
from benchmarks.splice.measure import linearity, median, of, series, summed
from benchmarks.splice.plan import PLANS, Anchoring, Engine, Part, Plan, ProbePlan, Profile
from benchmarks.splice.plot import write_plots
from benchmarks.splice.suite import model_target, no_rows, run_fidelity, run_times
from benchmarks.splice.targets import Reads, parsed_reads
from benchmarks.splice.thresholds import failures, promised
from benchmarks.splice.times import APPEND, DISK_COLD, FULL, HIT, PRIME, SPLICE
from tests.tiny_models import tiny_model as sliding_model

PROBES = ProbePlan(skills=1, prefixes=2, questions=2, seams=(0, 16), anchorings=tuple(Anchoring))
TINY = Plan(
    sizes=(96, 128, 192),
    samples=2,
    counts=(1, 2),
    each_tokens=96,
    probes=PROBES,
    append_samples=2,
    before_tokens=300,
    added_tokens=128,
)
TIMED = (Part.TTFT, Part.SKILLS, Part.APPEND)


def tiny_model() -> Any:
    """A model of two layers, whose window holds the skills in bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.3,
        bos_token_id=258,
        eos_token_id=257,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """The tiny model; one thread is enough for it, and more of them wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tiny_model()
    torch.set_num_threads(threads)


def timed(model: Any, mode: Mode) -> dict[str, Any]:
    """Run all series of times."""
    rows = no_rows()
    with model_target(model, ByteTokenizer(), None) as target:
        run_times(target, TINY, TIMED, mode, rows, Progress(disable=True))
    return summed(made_of(parts=TIMED, mode=mode), rows)


def made_of(
    engine: Engine = Engine.TRANSFORMERS, parts: Any = tuple(Part), mode: Mode = Mode.ON, block: int = 1
) -> dict[str, Any]:
    """Make up where a result was measured."""
    return {
        "backend": str(engine),
        "profile": "quick",
        "mode": str(mode),
        "parts": [str(part) for part in parts],
        "block_size": block,
        "own_server": True,
    }


@pytest.fixture(scope="module")
def switched_on(model: Any) -> dict[str, Any]:
    """Times of the tiny model."""
    return timed(model, Mode.ON)


@pytest.fixture(scope="module")
def switched_off(model: Any) -> dict[str, Any]:
    """The same with splicing off."""
    return timed(model, Mode.OFF)


@pytest.fixture(scope="module")
def probed(model: Any) -> list[dict[str, Any]]:
    """Probes of the tiny model."""
    rows = no_rows()
    run_fidelity(model, ByteTokenizer(), TINY, Mode.ON, rows, Progress(disable=True))
    return rows[Part.FIDELITY]


def probe(top1: int = 1, kl: float = 0.001, *, rotated: bool = True, seam: int = 16) -> dict[str, Any]:
    """Make up a probe whose positions are all alike."""
    return {
        "anchor": "generic",
        "seam": seam,
        "rotated": rotated,
        "top1": [top1] * POSITIONS,
        "kl": [kl] * POSITIONS,
        "cosine": [0.9999] * POSITIONS,
        "reference_names_fact": True,
        "spliced_names_fact": bool(top1),
    }


def timing(arm: str, tokens: int, seconds: float, *, skills: int = 1, **more: Any) -> dict[str, Any]:
    """Make up a row of a time, whose counts are what its arm is called."""
    loaded = tokens - 32 if arm in (SPLICE, DISK_COLD) else 0
    held = tokens if arm == HIT else 0
    return {
        "arm": arm,
        "tokens": tokens,
        "skills": skills,
        "sample": 0,
        "ttft_s": seconds,
        "prompt_tokens": tokens + 100,
        "cached_tokens": held,
        "predicted_cached_tokens": held,
        "spliced_tokens": loaded,
        "predicted_spliced_tokens": loaded,
        "computed_tokens": tokens + 100 - loaded - held,
        "refused": [],
        "tier": {SPLICE: "ram", DISK_COLD: "disk"}.get(arm, "none"),
        **more,
    }


def good_rows() -> dict[str, list[dict[str, Any]]]:
    """Make up rows that meet every threshold on a server."""
    rows = no_rows()
    seconds = {FULL: 1e-3, SPLICE: 3e-5, DISK_COLD: 6e-5, HIT: 2.5e-5}
    for tokens in (512, 1024, 2048):
        rows[Part.TTFT] += [timing(arm, tokens, each * tokens) for arm, each in seconds.items()]
        rows[Part.TTFT].append(timing(PRIME, tokens, 0.001))
    for count in (1, 2):
        rows[Part.SKILLS] += [timing(arm, 256 * count, each, skills=count) for arm, each in seconds.items()]
    rows[Part.APPEND] = [
        timing(SPLICE, 2048, 0.2, cached_tokens=4032, recomputed_tokens=12),
        timing(APPEND, 2048, 6.0, cached_tokens=4032, recomputed_tokens=12),
    ]
    rows[Part.FIDELITY] = [probe() for _ in range(12)]
    rows[Part.FIDELITY] += [probe(0, 0.2, rotated=False) for _ in range(12)]
    rows["artifacts"] = [{"artifact": "a" * 64, "tokens": 512, "nbytes": 512 * 46_080, "seconds": 1.0}]
    return rows


def judged(rows: Mapping[str, Any], engine: Engine = Engine.VLLM, **more: Any) -> list[str]:
    """What falls short of a result with these rows."""
    return failures(summed(made_of(engine, block=32) | more, rows))


def test_every_fact_stands_in_its_skill() -> None:
    """Each question has an answer in its skill's text, in one of the accepted forms."""
    for skill in corpus.skills():
        for question in skill.questions:
            assert names(skill.text, question.answers), (skill.name, question.ask)


def test_the_full_profile_has_200_probes_of_texts_that_are_there() -> None:
    """Skills, prefixes and questions suffice for it, and no anchor is the beginning that it is like."""
    probes = PLANS[Profile.FULL].probes
    assert probes.probes >= 200
    assert len(corpus.skills()) >= probes.skills
    assert len(corpus.prefixes()) >= probes.prefixes
    assert all(len(skill.questions) >= probes.questions for skill in corpus.skills())
    texts = [text for prefix in corpus.prefixes() for text in (prefix.text, prefix.anchor)]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("tokens", [64, 333, 2048])
def test_filler_has_the_tokens_that_were_asked_for(tokens: int) -> None:
    """To the token, and another seed gives another text."""
    encoder = TemplateEncoder(ByteTokenizer())
    one, other = (corpus.filler(encoder, tokens, seed) for seed in (1, 2))
    assert len(chunk_ids(one, encoder)) == len(chunk_ids(other, encoder)) == tokens
    assert one != other


def test_equal_logits_agree() -> None:
    """No divergence, the same top tokens, and no position that differs."""
    logits = torch.randn(4, 50)
    found = compare(logits, logits.clone())
    assert found.kl == pytest.approx([0.0] * 4)
    assert found.cosine == pytest.approx([1.0] * 4)
    assert found.first_other is None


def test_divergence_is_that_of_the_reference_from_the_spliced_run() -> None:
    """KL(p || q) in nats, by hand, and the first position whose top token differs."""
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.5, 0.5], [0.1, 0.9]])
    found = compare(p.log(), q.log())
    assert found.kl[0] == pytest.approx(0.0)
    assert found.kl[1] == pytest.approx(0.8 * 2.1972246, rel=1e-5)
    assert found.first_other == 1
    with pytest.raises(ValueError, match="cannot be compared"):
        compare(p, q[:1])


def test_each_call_did_what_its_arm_is_called(switched_on: dict[str, Any]) -> None:
    """By the backend's own counts: nothing is cached by accident, and what was planned is loaded."""
    assert not [line for line in failures(switched_on) if "sample" in line or "computed again" in line]
    for part in (Part.TTFT, Part.SKILLS):
        for row in switched_on["rows"][part]:
            assert (
                row["cached_tokens"] + row["spliced_tokens"] + row["computed_tokens"] == row["prompt_tokens"]
            )
            if row["arm"] == FULL:
                assert row["computed_tokens"] == row["prompt_tokens"]
            if row["arm"] == HIT:
                assert row["cached_tokens"] > row["tokens"]
            if row["arm"] in (SPLICE, DISK_COLD):
                assert row["cached_tokens"] == 0
                assert row["tokens"] - 32 * row["skills"] < row["spliced_tokens"] < row["tokens"]


def test_every_series_has_all_its_samples(switched_on: dict[str, Any]) -> None:
    """Each size and number of skills has each arm as often as planned, and the file's size is known."""
    assert [row["tokens"] for row in switched_on["ttft"]] == list(TINY.sizes)
    assert [row["skills"] for row in switched_on["skills"]] == list(TINY.counts)
    for row in (*switched_on["ttft"], *switched_on["skills"]):
        assert row["samples"] == TINY.samples
        assert all(row[f"{arm}_s"] > 0 for arm in (FULL, SPLICE, DISK_COLD, HIT))
    # Two layers of keys and values, two heads of eight numbers, four bytes each.
    assert switched_on["stored"]["bytes_per_token"] >= 2 * 2 * 2 * 8 * 4


def test_a_skill_that_is_added_recomputes_nothing_old(switched_on: dict[str, Any]) -> None:
    """The conversation's own tokens stay cached in either arm; only one of them loads the skill."""
    assert switched_on["append_after_4000"]["recomputed_tokens"] == 0
    for row in switched_on["rows"][Part.APPEND]:
        assert row["held_tokens"] > TINY.before_tokens
        assert bool(row["spliced_tokens"]) == (row["arm"] == SPLICE)


def test_switched_off_it_falls_short(switched_off: dict[str, Any]) -> None:
    """Nothing is compiled or loaded, and that shows in every part."""
    assert switched_off["rows"]["artifacts"] == []
    missed = failures(switched_off)
    for part in TIMED:
        assert any(line.startswith(f"{part}, splice") and "0 tokens spliced" in line for line in missed)
    assert any("were computed again" in line for line in missed)


def test_each_probe_is_compared_in_every_way(probed: list[dict[str, Any]]) -> None:
    """Skills, prefixes and questions times anchors and seams, and the control."""
    assert len(probed) == PROBES.probes * (3 * 2 + 1)
    assert (
        len({json.dumps([row["skill"], row["prefix"], row["question"]]) for row in probed}) == PROBES.probes
    )
    for row in probed:
        assert 1 <= len(row["top1"]) == len(row["kl"]) == len(row["cosine"]) <= POSITIONS
    assert any(max(row["kl"]) > 0 for row in probed)


def test_a_chunk_compiled_behind_the_prompts_own_beginning_is_exact(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle: a splice is then what a full prefill computes; what differs elsewhere is the anchor."""
    run = FidelityRun(KVModel(model, ByteTokenizer()), replace(PROBES, prefixes=1, seams=(0, 16)))
    encoder = TemplateEncoder(ByteTokenizer())

    def compiled(skill: corpus.SkillText, prefix: corpus.PrefixText, anchoring: Anchoring) -> Any:
        ids, splice = run._prompt(skill, prefix, skill.questions[0], seam=0)
        return run._model.compiled(ids[: splice.start], chunk_ids(skill.text, encoder))

    monkeypatch.setattr(run, "_compiled", compiled)
    rows = list(run.rows(lambda: None))
    assert rows
    assert max(value for row in rows for value in row["kl"]) < 1e-6
    assert all(all(row["top1"]) for row in rows)
    assert all(row["spliced_names_fact"] in (None, row["reference_names_fact"]) for row in rows)
    assert any(row["spliced_names_fact"] is not None for row in rows)


def test_switched_off_the_probes_show_nothing(model: Any) -> None:
    """With everything computed the control passes too, which is a failure."""
    rows = no_rows()
    run_fidelity(model, ByteTokenizer(), TINY, Mode.OFF, rows, Progress(disable=True))
    assert max(value for row in rows[Part.FIDELITY] for value in row["kl"]) < 1e-6
    missed = failures(summed(made_of(parts=(Part.FIDELITY,), mode=Mode.OFF), rows))
    assert any("the probes show nothing" in line for line in missed)


def test_good_rows_fall_short_of_nothing() -> None:
    """What meets every threshold passes."""
    assert judged(good_rows()) == []


@pytest.mark.parametrize(
    ("part", "arm", "changes", "line"),
    [
        (Part.TTFT, FULL, {"ttft_s": 0.5}, "times sooner than a full prefill, not 20"),
        (Part.TTFT, HIT, {"ttft_s": 0.001}, "times a prefix hit and priming"),
        (Part.TTFT, SPLICE, {"spliced_tokens": 0}, "0 tokens spliced of"),
        (Part.TTFT, SPLICE, {"tier": "disk"}, "taken from disk, not from ram"),
        (Part.TTFT, FULL, {"cached_tokens": 64}, "64 tokens were cached"),
        (Part.TTFT, HIT, {"cached_tokens": 0}, "0 tokens cached of"),
        (Part.TTFT, HIT, {"spliced_tokens": 32}, "32 tokens were spliced"),
        (Part.SKILLS, SPLICE, {"ttft_s": 9.0}, "as long as computing them"),
        (Part.APPEND, SPLICE, {"recomputed_tokens": 32}, "32 of them were computed again"),
        (Part.APPEND, SPLICE, {"ttft_s": 9.0}, "if it is computed"),
    ],
)
def test_a_row_that_is_not_as_promised_is_named(
    part: Part, arm: str, changes: dict[str, Any], line: str
) -> None:
    """Each threshold is computed from the raw rows, and misses are said."""
    rows = good_rows()
    rows[part] = [row | changes if row["arm"] == arm else row for row in rows[part]]
    assert any(line in missed for missed in judged(rows))


@pytest.mark.parametrize(
    ("rotated", "changes", "line"),
    [
        (True, {"top1": [0] + [1] * 7}, "agrees at 87.5% of positions"),
        (True, {"kl": [0.02] * 8}, "median KL 0.0200"),
        (False, {"top1": [1] * 8, "kl": [0.001] * 8}, "the probes show nothing"),
    ],
)
def test_probes_that_are_not_as_promised_are_named(rotated: bool, changes: dict[str, Any], line: str) -> None:
    """The default's agreement and divergence, and a control that does not miss them."""
    rows = good_rows()
    rows[Part.FIDELITY] = [row | changes if row["rotated"] == rotated else row for row in rows[Part.FIDELITY]]
    assert any(line in missed for missed in judged(rows))


@pytest.mark.parametrize("part", list(Part))
def test_a_part_that_was_not_measured_falls_short(part: Part) -> None:
    """Unless it was not asked for."""
    rows = good_rows() | {part: []}
    assert judged(rows)
    assert not judged(rows, parts=[str(other) for other in Part if other is not part])


def test_an_interrupted_run_falls_short() -> None:
    """Whatever it measured."""
    assert judged(good_rows(), interrupted=True) == ["it was interrupted"]


def test_times_that_are_not_linear_fall_short() -> None:
    """A line is fitted to the medians of the splice times."""
    rows = good_rows()[Part.TTFT]
    line = linearity(rows)
    assert line is not None
    assert line["worst"] == pytest.approx(0.0, abs=1e-9)
    assert line["s_per_token"] == pytest.approx(3e-5)
    bent = [row | {"ttft_s": row["ttft_s"] * row["tokens"]} if row["arm"] == SPLICE else row for row in rows]
    assert any("off a line" in missed for missed in judged(good_rows() | {Part.TTFT: bent}))
    assert linearity([row for row in rows if row["tokens"] < 2048]) is None


def test_cold_rows_that_were_not_read_from_disk_do_not_count() -> None:
    """The median of cold splices is over those that the server read from disk."""
    rows = [timing(DISK_COLD, 512, 1.0), timing(DISK_COLD, 512, 0.1, tier="ram")]
    assert median(of(rows, DISK_COLD)) == 1.0
    assert median(of(rows, DISK_COLD, 1024)) is None
    assert series(rows, "tokens")[0]["disk_cold_s"] == 1.0


def test_a_result_has_the_promised_form() -> None:
    """The keys that others read, and each number computed from the rows beside it."""
    result = summed(made_of(), good_rows())
    assert set(result["ttft"][0]) == {"tokens", "full_s", "splice_s", "disk_cold_s", "hit_s", "samples"}
    assert set(result["append_after_4000"]) == {"splice_s", "append_s", "recomputed_tokens"}
    fidelity = {"anchor", "seam", "top1_agreement", "kl_median", "kl_p99", "greedy16_agreement"}
    assert fidelity | {"cosine_median", "probes"} <= set(result["fidelity"][0])
    assert result["default"] == {
        "anchor": "generic",
        "seam": 16,
        "top1_agreement": 1.0,
        "kl_median": 0.001,
    }
    assert result["control"] == {"top1_agreement": 0.0, "kl_median": 0.2}
    assert result["stored"]["bytes_per_token"] == 46_080


def test_the_thresholds_are_those_of_the_engine() -> None:
    """A hit costs nothing in this process, so only a server's splice is held against one."""
    served, embedded = promised(Engine.VLLM), promised(Engine.TRANSFORMERS)
    assert served["full_over_splice"] == {"2048": 20.0, "4096": 35.0}
    assert served["splice_over_hit_and_priming"] == 1.3
    assert embedded["splice_over_hit_and_priming"] is None


def test_tiers_are_read_from_metrics() -> None:
    """Summed over engines; without the connector there are none."""
    text = (
        'vllm:agentkv_artifact_reads_total{engine="0",model_name="m",tier="ram"} 3.0\n'
        'vllm:agentkv_artifact_reads_total{engine="1",model_name="m",tier="ram"} 1.0\n'
        'vllm:agentkv_artifact_reads_total{engine="0",model_name="m",tier="disk"} 2.0\n'
        'vllm:agentkv_artifact_reads_created{engine="0",model_name="m",tier="disk"} 1.7e+09\n'
    )
    assert parsed_reads(text) == Reads(ram=4, disk=2)
    assert parsed_reads("vllm:num_requests_running 0.0\n") is None
    assert Reads(4, 2).since(Reads(3, 2)) == "ram"
    assert Reads(4, 2).since(Reads(4, 1)) == "disk"
    assert Reads(4, 2).since(Reads(3, 1)) == "both"
    assert Reads(4, 2).since(Reads(4, 2)) == "none"


def test_the_command_writes_what_it_measured(
    model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """JSON with raw rows, thresholds and the verdict; `--again` comes to the same."""
    monkeypatch.setattr(command, "loaded", lambda name: (model, ByteTokenizer(), None))
    monkeypatch.setitem(PLANS, Profile.QUICK, TINY)  # type: ignore[arg-type]
    file, other = tmp_path / "splice.json", tmp_path / "again.json"
    done = CliRunner().invoke(command.app, ["--part", "append", "--json", str(file)])
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["environment"]["parts"] == ["append"]
    assert written["passed"] == (done.exit_code == 0) == (not written["failures"])
    assert len(written["rows"]["append"]) == 2 * TINY.append_samples
    CliRunner().invoke(command.app, ["--again", str(file), "--json", str(other)])
    assert json.loads(other.read_text(encoding="utf-8")) == written


def test_an_interrupt_keeps_what_was_measured(
    model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C in a later part leaves the rows of the earlier one, and the verdict is that it fell short."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "loaded", lambda name: (model, ByteTokenizer(), None))
    monkeypatch.setattr(command, "run_fidelity", interrupted)
    monkeypatch.setitem(PLANS, Profile.QUICK, TINY)  # type: ignore[arg-type]
    file = tmp_path / "splice.json"
    parts = ["--part", "append", "--part", "fidelity"]
    done = CliRunner().invoke(command.app, [*parts, "--json", str(file)])
    written = json.loads(file.read_text(encoding="utf-8"))
    assert done.exit_code == 1
    assert written["rows"]["append"]
    assert written["environment"]["interrupted"]
    assert "it was interrupted" in written["failures"]


def test_a_plot_is_written_beside_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SVG and PNG; without matplotlib, or without anything to draw, there is none."""
    result = summed(made_of(), good_rows())
    made = write_plots(result, tmp_path / "splice.json")
    assert [path.name for path in made] == ["splice.svg", "splice.png"]
    assert all(path.stat().st_size > 1000 for path in made)
    assert write_plots(summed(made_of(), no_rows()), tmp_path / "splice.json") == []
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert write_plots(result, tmp_path / "splice.json") == []


def test_tables_are_computed_from_the_rows() -> None:
    """Sums that stand in a result are not trusted."""
    result = summed(made_of(), good_rows())
    wrong = deepcopy(result)
    wrong["ttft"], wrong["fidelity"], wrong["append_after_4000"] = [], [], None
    for table in (_figures_splice.ttft, _figures_splice.fidelity, _figures_splice.append):
        head, rows = table(wrong)
        assert (head, rows) == table(result)
        assert rows
        assert {len(row) for row in rows} == {len(head)}
    assert _figures_splice.ttft(result)[1][-1][-1] == "33.3×"


def test_the_gpu_script_runs_on_a_tiny_shape() -> None:
    """On the CPU, through the same backend: what is spliced was loaded, and what is full was computed."""
    shape = replace(gpu_splice.TINY, sizes=(128, 256))
    rows = gpu_splice.measure(shape, "cpu", 2, Progress(disable=True))
    assert gpu_splice.failures(rows, timed=False) == []
    assert len(rows) == 2 * 2 * len(gpu_splice.ARMS)
    assert [row["tokens"] for row in gpu_splice.summed(rows)] == [128, 256]
    head, table = _figures_splice.gpu({"rows": rows})
    assert {len(row) for row in table} == {len(head)}
    damaged = [row | {"spliced_tokens": 0} for row in rows]
    assert len(gpu_splice.failures(damaged, timed=False)) == 2 * 2 * 2


def test_a_chunk_longer_than_the_window_is_exact_behind_its_own_beginning() -> None:
    """On sliding layers too; compiled elsewhere it differs, and not turned it differs more."""
    model = KVModel(sliding_model("gemma3_sliding"), ByteTokenizer())
    sums = window.summed(list(window.rows(model, window.cases(model, 1, 1, 1))))
    same, spliced, control = (values["kl_max"] for values in sums.values())
    assert same < 1e-5 < spliced < control
