"""``python -m benchmarks.splice.window``: a splice longer than the attention window, against a full prefill.

Chunks of two skills' texts are spliced into plain text, behind beginnings that they were not compiled behind.
Sliding layers see the last tokens of their window only, and the chunk's middle is beyond it. The model is any
folder; the one that the committed run was made on is Gemma 3 270M, which has no chat template.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from agentkv.anchor import ANCHOR
from agentkv.backends.kvcache import ModelKV
from agentkv.huggingface import HuggingFaceTokenizer
from agentkv.kv.spans import KVSpan
from benchmarks._environment import environment, write_results
from benchmarks.splice.compare import compare
from benchmarks.splice.corpus import prefixes, skills
from benchmarks.splice.kvmodel import KVModel

POSITIONS: Final = 16
SEAM: Final = 16
MOST_KL: Final = 0.01
LEAST_TOP1: Final = 0.97
_SAME: Final = "compiled behind the same beginning"
_DEFAULT: Final = "anchor and seam"
_CONTROL: Final = "not re-rotated"


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt's parts, as ids."""

    chunk: list[int]
    prefix: list[int]
    questions: list[list[int]]


def cases(model: KVModel, pairs: int, beginnings: int, questions: int) -> Iterator[Case]:
    """Yield chunks of two skills each behind several beginnings."""
    encode = model.tokenizer.encode
    for one, other in list(pairwise(skills()))[:pairs]:
        chunk = encode(f"\n{one.text}\n\n{other.text}\n")
        asked = [*one.questions, *other.questions][:questions]
        for prefix in prefixes()[:beginnings]:
            yield Case(
                chunk,
                encode(prefix.text + "\n"),
                [encode(f"\nQuestion: {question.ask}\nAnswer:") for question in asked],
            )


def rows(model: KVModel, found: Iterator[Case]) -> Iterator[dict[str, Any]]:
    """Yield a row for each probe and way to splice."""
    anchor = model.tokenizer.encode(ANCHOR + "\n")
    for number, case in enumerate(found):
        exact = model.empty()
        model.extend(exact, [*case.prefix, *case.chunk])
        stop, start = exact.length, len(case.prefix) + SEAM
        behind_anchor = model.compiled(anchor, case.chunk)
        ways = {
            _SAME: exact.span(len(case.prefix), stop),
            _DEFAULT: behind_anchor,
            _CONTROL: behind_anchor,
        }
        for index, question in enumerate(case.questions):
            answer, reference = _answered(model, exact, question, stop)
            for way, span in ways.items():
                kv = _spliced(model, exact, span, start, turned=way is not _CONTROL)
                logits = model.extend(kv, [*question, *answer[:-1]], keep=len(answer))
                agreement = compare(reference, logits)
                yield {
                    "case": number,
                    "question": index,
                    "way": way,
                    "chunk_tokens": len(case.chunk),
                    "top1": [int(same) for same in agreement.top1],
                    "kl": [float(f"{value:.4g}") for value in agreement.kl],
                }


def _answered(
    model: KVModel, exact: ModelKV, question: list[int], stop: int
) -> tuple[list[int], torch.Tensor]:
    logits = model.extend(exact, question)[-1]
    answer, reference = model.greedy(exact, logits, POSITIONS)
    exact.truncate(stop)
    return answer, reference


def _spliced(model: KVModel, exact: ModelKV, span: KVSpan, start: int, *, turned: bool) -> ModelKV:
    part = span.slice(SEAM, len(span))
    kv = exact.copy(start)
    kv.append(part.moved(start, model.rope) if turned else replace(part, position=start))
    return kv


def summed(found: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return top-1 agreement and median KL over all positions, for each way."""
    sums = {}
    for way in (_SAME, _DEFAULT, _CONTROL):
        mine = [row for row in found if row["way"] == way]
        top1 = [same for row in mine for same in row["top1"]]
        kl = [value for row in mine for value in row["kl"]]
        sums[way] = {
            "probes": len(mine),
            "top1_agreement": sum(top1) / len(top1),
            "kl_median": median(kl),
            "kl_max": max(kl),
        }
    return sums


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub id of a model with sliding windows")
    parser.add_argument("--pairs", type=int, default=3, help="chunks, of two skills each")
    parser.add_argument("--beginnings", type=int, default=3, help="prompts for each chunk")
    parser.add_argument("--questions", type=int, default=5, help="questions for each prompt")
    parser.add_argument("--json", type=Path, help="write rows and sums to this file")
    given = parser.parse_args()
    from agentkv.backends.loading import load_model

    name, loaded = load_model(given.model, "cpu", torch.float32, {})
    model = KVModel(loaded, HuggingFaceTokenizer.from_pretrained(name))
    config = loaded.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    found = []
    for row in rows(model, cases(model, given.pairs, given.beginnings, given.questions)):
        found.append(row)
        print(f"\r{len(found)} rows", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    sums = summed(found)
    for way, values in sums.items():
        print(way, ", ".join(f"{key} {value:.4g}" for key, value in values.items()))
    good = sums[_DEFAULT]
    passed = good["top1_agreement"] >= LEAST_TOP1 and good["kl_median"] <= MOST_KL
    result = {
        "environment": environment(model=config.model_type, window=window, layer_types=config.layer_types),
        "sums": sums,
        "passed": passed,
        "rows": found,
    }
    write_results(given.json, result, indent=None)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
