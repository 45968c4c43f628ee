"""What is recorded of an answered call, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from agentkv.backends.base import Completion, FinishReason, RawToolCall, Usage
from agentkv.entries import Erratum
from agentkv.miss import Miss
from agentkv.outcome import finish
from agentkv.plan import describe
from agentkv.report import TurnReport
from langchain_core.messages import AIMessage

from langchain_agentkv.canonical import digest, text_of
from langchain_agentkv.planning import Planned
from langchain_agentkv.records import Opening, Step, dumped
from langchain_agentkv.stamps import cost_of

FROZEN_KEY: Final = "agentkv_frozen"
"""State key of what is written once an epoch."""
LOG_KEY: Final = "agentkv_log"
"""State key of the log, which grows by one record a call."""
REPORT_KEY: Final = "agentkv"
"""Where a message's response metadata holds the report of its call."""
REPORT_VERSION: Final = 1
AGAIN_EVERY: Final = 16
"""So many calls apart the frozen part is written although it is the same."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What was seen of a call."""

    answer: AIMessage
    seconds: float = 0.0
    changed_by: Mapping[str, str] | None = None
    """Field key to the tool that was declared to change it."""
    refused: tuple[str, ...] = ()
    """Names of withdrawn tools that the model called."""


def record(planned: Planned, answer: AIMessage) -> dict[str, Any]:
    """Return the state's update for a call that was answered: plain JSON, as large as what was new.

    The frozen part is written again every so many calls, so that reading it never goes far back.
    """
    found, count = planned.chain, len(planned.asked.messages)
    step = Step(said=planned.said, count=count, chain=found[-1], answer=digest(answer))
    if not planned.reason:
        update: dict[str, Any] = {LOG_KEY: [dumped(step)]}
        if planned.turn % AGAIN_EVERY == 0:
            update[FROZEN_KEY] = dumped(planned.frozen)
        return update
    opening = Opening(
        epoch=planned.frozen.entry.epoch,
        reason=planned.reason,
        revision=planned.pending.ledger.state.revision,
        turns=planned.turn - 1,
        count=planned.new,
        chain=found[planned.new],
    )
    return {FROZEN_KEY: dumped(planned.frozen), LOG_KEY: [dumped(opening), dumped(step)]}


def report_of(planned: Planned, observed: Observed) -> dict[str, Any]:
    """Return the report of a call as plain JSON; it holds no value of a field."""
    usage, counted = usage_of(observed.answer)
    cost = cost_of(observed.answer)
    completion = Completion(
        text=text_of(observed.answer),
        ids=None,
        finish_reason=FinishReason.TOOL_CALLS if observed.answer.tool_calls else FinishReason.STOP,
        usage=usage,
        ttft_s=observed.seconds if cost.ttft_s is None else cost.ttft_s,
        duration_s=observed.seconds,
        tool_calls=tuple(
            RawToolCall(call["id"] or "", call["name"], "{}") for call in observed.answer.tool_calls
        ),
        lost=cost.lost,
        refused=cost.refused,
    )
    known = usage.prompt_tokens > 0
    # What was not counted can be compared with nothing.
    pending = planned.pending if known else replace(planned.pending, known_ids=False)
    _, turn = finish(pending, completion, cached_counts=counted and cost.counted)
    said = [item.entry for item in planned.said if isinstance(item.entry, Erratum)]
    told = [statement.key for entry in said for statement in entry.statements]
    return {
        "version": REPORT_VERSION,
        "mode": planned.frozen.mode,
        "turn": planned.turn,
        "epoch": turn.epoch,
        "plan": "keep; an erratum waits for a message" if planned.postponed else describe(turn.plan),
        "reason": planned.reason,
        "told": told,
        "revision": max([planned.pending.ledger.state.revision, *(entry.revision for entry in said)]),
        "changed_by": {key: tool for key, tool in (observed.changed_by or {}).items() if key in told},
        "answer_edited": planned.change.edited,
        "refused_tools": list(observed.refused),
        "new_tokens_estimated": turn.new_tokens,
        "prompt_tokens": usage.prompt_tokens if known else None,
        "cached_tokens": usage.cached_tokens if counted else None,
        "computed_tokens": usage.computed_tokens if counted else None,
        "generated_tokens": usage.generated_tokens if known else None,
        "duration_s": round(observed.seconds, 6),
        "broken_by": turn.broken_by,
        **(_exact_part(turn, planned) if planned.settings else {}),
    }


def _exact_part(turn: TurnReport, planned: Planned) -> dict[str, Any]:
    """Return what can be said of a call whose token ids are known."""
    miss = Miss.SALTED if planned.salt_moved else turn.miss
    return {
        "predicted_cached_tokens": turn.predicted_cached_tokens,
        "spliced_tokens": turn.spliced_tokens,
        "predicted_spliced_tokens": turn.predicted_spliced_tokens,
        "refused_splices": [[key, reason.value] for key, reason in turn.refused],
        "ttft_s": round(turn.ttft_s, 6),
        "miss": None if miss is None else miss.value,
    }


def plain_report(mode: str, why: str, observed: Observed) -> dict[str, Any]:
    """Return the report of a call that was sent as it would be without agentkv."""
    usage, counted = usage_of(observed.answer)
    known = usage.prompt_tokens > 0
    return {
        "version": REPORT_VERSION,
        "mode": mode,
        "plan": "rewritten",
        "reason": why,
        "prompt_tokens": usage.prompt_tokens if known else None,
        "cached_tokens": usage.cached_tokens if counted else None,
        "computed_tokens": usage.computed_tokens if counted else None,
        "generated_tokens": usage.generated_tokens if known else None,
        "duration_s": round(observed.seconds, 6),
    }


def with_report(answer: AIMessage, report: Mapping[str, Any]) -> AIMessage:
    """Return an answer whose response metadata holds the report of its call."""
    metadata = {**answer.response_metadata, REPORT_KEY: dict(report)}
    return answer.model_copy(update={"response_metadata": metadata})


def usage_of(answer: AIMessage) -> tuple[Usage, bool]:
    """Return a call's tokens, and whether those that were cached are among them."""
    told = answer.usage_metadata
    if told is None:
        return Usage(prompt_tokens=0, cached_tokens=0, computed_tokens=0), False
    prompt = told["input_tokens"]
    details = told.get("input_token_details") or {}
    cached = details.get("cache_read")
    held = min(prompt, cached or 0)
    spliced = min(prompt - held, cost_of(answer).spliced_tokens)
    usage = Usage(
        prompt_tokens=prompt,
        cached_tokens=held,
        computed_tokens=prompt - held - spliced,
        spliced_tokens=spliced,
        generated_tokens=told["output_tokens"],
    )
    return usage, cached is not None
