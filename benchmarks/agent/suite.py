"""Runs the arms side by side, and makes a row of each model call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langchain_core.language_models import BaseChatModel
from rich.progress import Progress

from agentkv import Mode
from agentkv.tokens import TokenIds
from benchmarks.agent.arms import AgentArm
from benchmarks.agent.plan import ARMS, Plan
from benchmarks.agent.record import Call
from benchmarks.agent.workload import AgentTurn, make_turns, policy
from examples.support_desk.script import reports

MakeModel = Callable[[str], BaseChatModel]
"""Returns the model of an arm; each has a prefix cache of its own."""


def run(
    make_model: MakeModel, plan: Plan, block_size: int, mode: Mode, seed: int, progress: Progress
) -> list[dict[str, Any]]:
    """Run all conversations; the arms take turns within each turn, so that the machine's moods hit all.

    Parameters
    ----------
    make_model
        Called for each arm of each conversation.
    block_size
        Tokens of a block of the server's prefix cache.
    mode
        Of the arm agentkv.
    """
    text = policy(plan.policy_tokens, plan.answer_tokens)
    task = progress.add_task("turns", total=plan.conversations * plan.turns * len(ARMS))
    rows: list[dict[str, Any]] = []
    for conversation in range(plan.conversations):
        arms = {name: AgentArm(name, make_model(name), text, mode) for name in ARMS}
        last: dict[str, Call] = {}
        for turn in make_turns(plan.turns, seed + conversation):
            for name, arm in arms.items():
                calls = arm.turn(turn)
                for place, call in enumerate(calls, start=1):
                    row = {"arm": name, "conversation": conversation + 1, **_turn(turn, place, len(calls))}
                    rows.append({**row, **_call(call, last.get(name), block_size)})
                    last[name] = call
                rows[-1] |= _judged(turn, calls[-1].answer)
                progress.advance(task)
    return rows


def _turn(turn: AgentTurn, place: int, calls: int) -> dict[str, Any]:
    # What a tool changed is first told in the call behind its result.
    told_in = 2 if turn.calls_tool else 1
    return {
        "turn": turn.number,
        "call": place,
        "last": place == calls,
        "changed": turn.changed,
        "after_change": turn.changed is not None and place == min(told_in, calls),
        "calls_tool": turn.calls_tool,
    }


def _call(call: Call, before: Call | None, block_size: int) -> dict[str, Any]:
    cached = call.cached_tokens
    return {
        "called": list(call.tools),
        "prompt_tokens": call.prompt_tokens,
        "cached_tokens": cached,
        "computed_tokens": None if cached is None else call.prompt_tokens - cached,
        "whole_blocks_before": 0 if before is None else before.prompt_tokens // block_size * block_size,
        "new_tokens": _new_tokens(call, before),
        "generated_tokens": call.generated_tokens,
        "ttft_s": call.ttft_s,
        "duration_s": call.duration_s,
        "plan": call.report.get("plan", ""),
        "reason": call.report.get("reason", ""),
        "answer": call.answer,
    }


def _new_tokens(call: Call, before: Call | None) -> int | None:
    """Return the prompt tokens that neither the previous prompt nor its answer held; None if ids are unknown."""
    if not call.prompt_ids or (before is not None and not before.prompt_ids):
        return None
    if before is None:
        return len(call.prompt_ids)
    known = TokenIds(before.prompt_ids).extend(before.answer_ids)
    return len(call.prompt_ids) - TokenIds(call.prompt_ids).common_prefix(known)


def _judged(turn: AgentTurn, answer: str) -> dict[str, Any]:
    """Return what an answer says of the field that changed."""
    if turn.changed is None or turn.old_value is None:
        return {}
    return {
        "new_value": turn.new_value,
        "reports_new": reports(answer, turn.new_value),
        "reports_old": reports(answer, turn.old_value),
    }
