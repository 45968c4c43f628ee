"""How near a spliced prompt's answers are to those of a full prefill, probe by probe.

A probe is a question about a skill behind a beginning that the skill was not compiled behind. The reference
computes the whole prompt and answers greedily; a spliced run reads the same answer, and its logits are
compared position by position. What precedes the splice is exact in both, so its KV is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from agentkv import Ledger, Mode, Policy, Prompt, Skill, UserMessage, begin
from agentkv.anchor import ANCHOR, anchor_ids
from agentkv.backends.base import Capabilities, SpliceSpec
from agentkv.backends.kvcache import ModelKV
from agentkv.costs import Costs
from agentkv.kv.spans import KVSpan
from agentkv.splicing import Shelf, chunk_ids
from agentkv.traits import ModelTraits
from benchmarks.splice.compare import Agreement, compare, names
from benchmarks.splice.corpus import PrefixText, Question, SkillText, prefixes, skills
from benchmarks.splice.kvmodel import KVModel
from benchmarks.splice.plan import DEFAULT_ANCHORING, DEFAULT_SEAM, Anchoring, ProbePlan

POSITIONS: Final = 16
"""Tokens of the reference's answer that are compared; fewer where the answer ends sooner."""
_NAME: Final = "0" * 64
Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to splice."""

    anchoring: Anchoring
    seam: int
    rotated: bool = True
    """False is the control: keys are used where they are not turned for."""


CONTROL: Final = Variant(DEFAULT_ANCHORING, DEFAULT_SEAM, rotated=False)
DEFAULT: Final = Variant(DEFAULT_ANCHORING, DEFAULT_SEAM)


def variants(plan: ProbePlan, mode: Mode) -> list[Variant]:
    """Return what is compared: all seams and anchors, and the control; switched off, two equal ones."""
    if mode is not Mode.ON:
        return [DEFAULT, CONTROL]
    made = [Variant(anchoring, seam) for anchoring in plan.anchorings for seam in plan.seams]
    return [*(made if DEFAULT in made else [DEFAULT, *made]), CONTROL]


@dataclass(frozen=True, slots=True)
class _Reference:
    """A question's prompt and its answer with everything computed."""

    question: Question
    ids: list[int]
    answer: list[int]
    logits: torch.Tensor
    named: bool


class FidelityRun:
    """Runs the probes of a plan over one model.

    Parameters
    ----------
    model
        In float32, so that what differs is the splice.
    mode
        With `Mode.OFF` nothing is spliced, and the control cannot show that the probes tell anything.
    """

    def __init__(self, model: KVModel, plan: ProbePlan, mode: Mode = Mode.ON) -> None:
        self._model, self._plan, self._mode = model, plan, mode
        self._traits = ModelTraits(
            model.tokenizer, Capabilities("transformers", 1 << 20, block_size=1, splices=True)
        )
        self._encoder = self._traits.encoder({})
        self._variants = variants(plan, mode)

    @property
    def steps(self) -> int:
        """How often `rows` calls its tick."""
        return self._plan.skills * self._plan.prefixes * (1 + len(self._variants))

    def rows(self, tick: Tick) -> Iterator[dict[str, Any]]:
        """Yield a row for each probe and variant."""
        for skill in skills()[: self._plan.skills]:
            shared: dict[Anchoring, KVSpan] = {}
            for prefix in prefixes()[: self._plan.prefixes]:
                yield from self._pair(skill, prefix, shared, tick)

    def _pair(
        self, skill: SkillText, prefix: PrefixText, shared: dict[Anchoring, KVSpan], tick: Tick
    ) -> Iterator[dict[str, Any]]:
        questions = skill.questions[: self._plan.questions]
        prompts = [self._prompt(skill, prefix, question, seam=0) for question in questions]
        stop = prompts[0][1].stop
        exact = self._model.empty()
        self._model.extend(exact, prompts[0][0][:stop])
        references = [
            self._reference(exact, stop, question, ids)
            for question, (ids, _) in zip(questions, prompts, strict=True)
        ]
        tick()
        own: dict[Anchoring, KVSpan] = {}
        for variant in self._variants:
            spans = own if variant.anchoring is Anchoring.OWN else shared
            if self._mode is Mode.ON and variant.anchoring not in spans:
                spans[variant.anchoring] = self._compiled(skill, prefix, variant.anchoring)
            kv = self._spliced(exact, skill, prefix, variant, spans.get(variant.anchoring), stop)
            for reference in references:
                yield self._row(kv, stop, skill, prefix, variant, reference)
            tick()

    def _prompt(
        self, skill: SkillText, prefix: PrefixText, question: Question, seam: int
    ) -> tuple[list[int], SpliceSpec]:
        """Return a prompt as a context sends it, and what of it is spliced."""
        shelf = Shelf(lambda _ids, _wanted: _NAME, seam)
        declared = Prompt.of([Policy(prefix.text), Skill(skill.name, skill.text)])
        pending = begin(declared, [UserMessage(question.ask)], Ledger(), self._traits, Costs(), shelf=shelf)
        if len(pending.layout.placed) != 1:
            raise RuntimeError(
                f"skill {skill.name!r} stands nowhere in its own prompt: its tokens are others"
            )
        return pending.ids.tolist(), pending.layout.placed[0].splice

    def _reference(self, exact: ModelKV, stop: int, question: Question, ids: list[int]) -> _Reference:
        logits = self._model.extend(exact, ids[stop:])[-1]
        answer, rows = self._model.greedy(exact, logits, POSITIONS)
        exact.truncate(stop)
        text = self._model.tokenizer.decode(answer)
        return _Reference(question, ids, answer, rows, names(text, question.answers))

    def _compiled(self, skill: SkillText, prefix: PrefixText, anchoring: Anchoring) -> KVSpan:
        texts = {Anchoring.NONE: "", Anchoring.GENERIC: ANCHOR, Anchoring.OWN: prefix.anchor}
        anchor = anchor_ids(self._model.tokenizer, texts[anchoring])
        return self._model.compiled(anchor, chunk_ids(skill.text, self._encoder))

    def _spliced(
        self,
        exact: ModelKV,
        skill: SkillText,
        prefix: PrefixText,
        variant: Variant,
        span: KVSpan | None,
        stop: int,
    ) -> ModelKV:
        """Return KV of the first `stop` tokens, the skill's behind the seam taken from an artifact."""
        if span is None:
            return exact.copy(stop)
        ids, splice = self._prompt(skill, prefix, skill.questions[0], variant.seam)
        chunk = chunk_ids(skill.text, self._encoder)
        start, offset = splice.start, splice.offset
        if ids[start:stop] != chunk[offset : offset + stop - start]:
            raise RuntimeError(f"skill {skill.name!r} stands in its prompt with other tokens than its own")
        part = span.slice(offset, offset + stop - start)
        kv = exact.copy(start)
        kv.append(part.moved(start, self._model.rope) if variant.rotated else replace(part, position=start))
        return kv

    def _row(
        self,
        kv: ModelKV,
        stop: int,
        skill: SkillText,
        prefix: PrefixText,
        variant: Variant,
        reference: _Reference,
    ) -> dict[str, Any]:
        tail = [*reference.ids[stop:], *reference.answer[:-1]]
        logits = self._model.extend(kv, tail, keep=len(reference.answer))
        found = compare(reference.logits, logits)
        named: bool | None = None
        if variant in (DEFAULT, CONTROL):
            # Reading on takes longer than all that is compared, so it is done where it is promised.
            answer = self._own_answer(kv, len(reference.ids), reference.answer, logits, found)
            named = names(self._model.tokenizer.decode(answer), reference.question.answers)
        kv.truncate(stop)
        return {
            "skill": skill.name,
            "prefix": prefix.name,
            "question": reference.question.ask,
            "anchor": str(variant.anchoring),
            "seam": variant.seam,
            "rotated": variant.rotated,
            "top1": [int(same) for same in found.top1],
            "kl": [float(f"{value:.4g}") for value in found.kl],
            "cosine": [round(value, 6) for value in found.cosine],
            "reference_names_fact": reference.named,
            "spliced_names_fact": named,
        }

    def _own_answer(
        self, kv: ModelKV, prompt: int, answer: Sequence[int], logits: torch.Tensor, found: Agreement
    ) -> list[int]:
        """Return what the spliced run answers by itself; it reads on from where it leaves the reference."""
        other = found.first_other
        if other is None:
            return list(answer)
        kv.truncate(prompt + other)
        more, _ = self._model.greedy(kv, logits[other], POSITIONS - other)
        return [*answer[:other], *more]
