"""Times to the first token, from the caller's call on, each with what the backend says it did."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Final

from agentkv import AgentKVContext, Mode, Policy, SamplingOptions, Skill
from agentkv.backends.base import Request, complete
from agentkv.profile import GENERIC, Wording
from agentkv.report import TurnReport
from agentkv.salts import Namespace, salt
from agentkv.segments import Segment, Splicing
from agentkv.splicing import chunk_ids
from agentkv.template import TemplateEncoder
from benchmarks.splice.corpus import filler
from benchmarks.splice.plan import Part, Plan
from benchmarks.splice.targets import TENANT, Target, load

FULL: Final = "full"
SPLICE: Final = "splice"
DISK_COLD: Final = "disk_cold"
HIT: Final = "hit"
PRIME: Final = "prime"
APPEND: Final = "append"
_ONE: Final = SamplingOptions(max_tokens=1)
_ANSWER: Final = SamplingOptions(max_tokens=2)
_BEGINNING: Final = GENERIC.model_copy(
    update={"wording": Wording(announcement='Of several lines "Update" the last one is true.')}
)
"""A prompt's beginning of a few tokens, so that what is measured is the skill.

A longer one is computed by every arm alike; rows say how many tokens priming computes."""
_QUESTION: Final = "What do I do first?"
_AGAIN: Final = "And what do I do after that?"
_BEFORE_SEED: Final = 500
_ADDED_SEED: Final = 501

Row = dict[str, Any]
Tick = Callable[[], None]


class Times:
    """Measures a target; rows are put into the lists given as they come.

    Parameters
    ----------
    mode
        Of the contexts that splice: with `Mode.OFF` nothing is compiled and nothing spliced.
    rows
        Part to rows; ``"artifacts"`` takes the sizes of what was compiled.
    """

    def __init__(
        self, target: Target, plan: Plan, mode: Mode, rows: dict[str, list[Row]], tick: Tick
    ) -> None:
        self._target, self._plan, self._mode = target, plan, mode
        self._rows, self._tick = rows, tick
        self._encoder = TemplateEncoder(target.backend.tokenizer)
        self._tokens = 0

    @staticmethod
    def steps(plan: Plan, parts: Sequence[Part]) -> int:
        """Count the ticks of some parts."""
        each = {
            Part.TTFT: len(plan.sizes) * (1 + plan.samples),
            Part.SKILLS: len(plan.counts) * (1 + plan.samples),
            Part.APPEND: 3 + 2 * plan.append_samples,
        }
        return sum(each.get(part, 0) for part in parts)

    def sizes(self) -> None:
        """One skill of each size."""
        for tokens in self._plan.sizes:
            self._series(Part.TTFT, [filler(self._encoder, tokens, seed=tokens)])

    def skills(self) -> None:
        """Several skills in one prompt."""
        each = self._plan.each_tokens
        texts = [filler(self._encoder, each, seed=number) for number in range(max(self._plan.counts))]
        for count in self._plan.counts:
            self._series(Part.SKILLS, texts[:count])

    def append(self) -> None:
        """A skill added to a conversation whose long beginning is cached, spliced and computed."""
        policy = Policy(filler(self._encoder, self._plan.before_tokens, _BEFORE_SEED))
        text = filler(self._encoder, self._plan.added_tokens, _ADDED_SEED)
        self._compile([text])
        if self._mode is Mode.ON:
            load(self._target.backend, [text])
        self._tick()
        for arm, splicing in ((SPLICE, Splicing.AUTO), (APPEND, Splicing.NEVER)):
            key = secrets.token_bytes(32)
            with self._context([policy], key, splicing) as base:
                base.ask("Good morning.")
                self._tick()
                for sample in range(self._plan.append_samples):
                    with self._context([policy], key, splicing) as context:
                        # Another question each time: what follows the beginning is cached for none of them.
                        before = context.ask(f"Case {sample + 1} is new. Please note it.").report
                        context.add(Skill("added", text))
                        row = self._timed(context, Part.APPEND, arm, sample, 1)
                    held = before.prompt_tokens + before.generated_tokens - 1
                    row["held_tokens"] = held
                    row["recomputed_tokens"] = max(0, held - row["cached_tokens"])
                    self._tick()

    def _series(self, part: Part, texts: Sequence[str]) -> None:
        self._compile(texts)
        self._tick()
        for sample in range(self._plan.samples):
            self._sample(part, texts, sample)
            self._tick()

    def _sample(self, part: Part, texts: Sequence[str], sample: int) -> None:
        segments = [Skill(f"rules {number}", text) for number, text in enumerate(texts)]
        count = len(texts)
        if self._mode is Mode.ON:
            self._target.cold()
        with self._context(segments) as context:
            self._timed(context, part, DISK_COLD, sample, count)
        with self._context(segments) as context:
            self._timed(context, part, SPLICE, sample, count)
            request = self._target.backend.request
            self._timed(context, part, HIT, sample, count, question=_AGAIN)
        with self._context(segments, splicing=Splicing.NEVER) as context:
            self._timed(context, part, FULL, sample, count)
        if request is not None and request.splices:
            self._prime(part, request, sample, count)

    def _context(
        self, segments: Sequence[Segment], key: bytes | None = None, splicing: Splicing = Splicing.AUTO
    ) -> AgentKVContext:
        """Return a conversation; without a key its cache is its own."""
        return AgentKVContext(
            self._target.backend,
            list(segments),
            mode=Mode.ON if splicing is Splicing.NEVER else self._mode,
            tenant=TENANT,
            salt_key=key or secrets.token_bytes(32),
            sampling=_ANSWER,
            splicing=splicing,
            profile=_BEGINNING,
        )

    def _timed(
        self,
        context: AgentKVContext,
        part: Part,
        arm: str,
        sample: int,
        count: int,
        question: str = _QUESTION,
    ) -> Row:
        before = self._target.reads()
        started = perf_counter()
        report = context.ask(question).report
        first = self._target.backend.first or perf_counter()
        after = self._target.reads()
        tier = None if before is None or after is None else after.since(before)
        row = self._row(part, arm, sample, count, first - started) | _counts(report) | {"tier": tier}
        self._rows[part].append(row)
        return row

    def _prime(self, part: Part, request: Request, sample: int, count: int) -> None:
        """Measure what computing the beginning alone takes."""
        own = salt(secrets.token_bytes(32), tenant=TENANT, namespace=Namespace.APPROXIMATE)
        beginning = request.ids.prefix(request.splices[0].start)
        backend = self._target.backend
        started = perf_counter()
        usage = complete(backend, Request(beginning, secrets.token_hex(8), own, _ONE)).usage
        seconds = (backend.first or perf_counter()) - started
        backend.release(backend.request.conversation if backend.request else "")
        row = self._row(part, PRIME, sample, count, seconds)
        row |= {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}
        row |= {"spliced_tokens": usage.spliced_tokens, "computed_tokens": usage.computed_tokens}
        self._rows[part].append(row)

    def _row(self, part: Part, arm: str, sample: int, count: int, seconds: float) -> Row:
        tokens = self._tokens
        return {"arm": arm, "tokens": tokens, "skills": count, "sample": sample, "ttft_s": round(seconds, 5)}

    def _compile(self, texts: Sequence[str]) -> None:
        """Make the artifacts of texts, and note how many tokens they have."""
        chunks = [chunk_ids(text, self._encoder) for text in texts]
        self._tokens = sum(map(len, chunks))
        if self._mode is not Mode.ON:
            return
        for chunk in chunks:
            started = perf_counter()
            name = self._target.backend.compile_chunk(TENANT, chunk)
            seconds = perf_counter() - started
            nbytes = self._target.nbytes(name)
            row = {"artifact": name, "tokens": len(chunk), "nbytes": nbytes, "seconds": round(seconds, 4)}
            if name not in {row["artifact"] for row in self._rows["artifacts"]}:
                self._rows["artifacts"].append(row)


def _counts(report: TurnReport) -> Row:
    return {
        "prompt_tokens": report.prompt_tokens,
        "cached_tokens": report.cached_tokens,
        "predicted_cached_tokens": report.predicted_cached_tokens,
        "spliced_tokens": report.spliced_tokens,
        "predicted_spliced_tokens": report.predicted_spliced_tokens,
        "computed_tokens": report.computed_tokens,
        "refused": [f"{key}: {why.value}" for key, why in report.refused],
    }
