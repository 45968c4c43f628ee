"""Runs the arms side by side, and makes a row of each model call."""

from __future__ import annotations

from typing import Any

from rich.progress import Progress

from agentkv import Mode
from agentkv.backends.base import Backend
from benchmarks.agent.arms import AgentArm
from benchmarks.agent.plan import ARMS, Plan
from benchmarks.agent.record import AgentCall
from benchmarks.agent.workload import AgentTurn, make_turns, policy
from examples.support_desk.script import reports


def run(backend: Backend, plan: Plan, mode: Mode, seed: int, progress: Progress) -> list[dict[str, Any]]:
    """Run all conversations; the arms take turns within each turn, so that the machine's moods hit all.

    Parameters
    ----------
    backend
        Runs the model for all arms; each is a tenant of its own.
    mode
        Of the arm agentkv.
    """
    text = policy(plan.policy_tokens, plan.answer_tokens)
    block = backend.capabilities.block_size
    task = progress.add_task("turns", total=plan.conversations * plan.turns * len(ARMS))
    rows: list[dict[str, Any]] = []
    for conversation in range(plan.conversations):
        arms = {name: AgentArm(name, backend, text, plan.answer_tokens, mode) for name in ARMS}
        last: dict[str, AgentCall] = {}
        for turn in make_turns(plan.turns, seed + conversation):
            for name, arm in arms.items():
                calls = arm.turn(turn)
                for place, call in enumerate(calls, start=1):
                    row = {"arm": name, "conversation": conversation + 1, **_turn(turn, place, len(calls))}
                    rows.append({**row, **_call(call, last.get(name), block)})
                    last[name] = call
                rows[-1] |= _judged(turn, calls[-1].note.answer)
                progress.advance(task)
    return rows


def _turn(turn: AgentTurn, place: int, calls: int) -> dict[str, Any]:
    # What a tool changed is first told in the call behind its result.
    told_in = min(2 if turn.calls_tool else 1, calls)
    return {
        "turn": turn.number,
        "call": place,
        "calls_tool": turn.calls_tool,
        "changed": turn.changed,
        "after_change": turn.changed is not None and place == told_in,
    }


def _call(call: AgentCall, before: AgentCall | None, block: int) -> dict[str, Any]:
    ids, usage = call.sent.ids, call.usage
    known = 0 if before is None else ids.common_prefix(before.sent.sequence)
    return {
        "called": list(call.note.tools),
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "computed_tokens": usage.computed_tokens,
        # Of the prompt before, without its answer.
        "whole_blocks_before": 0 if before is None else before.usage.prompt_tokens // block * block,
        "new_tokens": len(ids) - known,
        "generated_tokens": usage.generated_tokens,
        "ttft_s": call.ttft_s,
        "duration_s": call.duration_s,
        "plan": call.note.report.get("plan", ""),
        "reason": call.note.report.get("reason", ""),
        "predicted_cached_tokens": call.note.report.get("predicted_cached_tokens"),
        "answer": call.note.answer,
    }


def _judged(turn: AgentTurn, answer: str) -> dict[str, Any]:
    """Return what an answer says of the field that changed."""
    if turn.changed is None or turn.old_value is None:
        return {}
    return {
        "new_value": turn.new_value,
        "reports_new": reports(answer, turn.new_value),
        "reports_old": reports(answer, turn.old_value),
    }
