"""A turn that is planned, and the state that it was planned on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Final

from agentkv.inputs import Input, ToolResult
from agentkv.ledger import Ledger
from agentkv.rebase import RebaseRequest
from agentkv.reply import refusals
from agentkv.traits import ModelTraits
from agentkv.turn import PendingTurn

NO_TOOLS: Final = "none"
"""The `SamplingOptions.tool_choice` that lets the model call no tool."""


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """A turn that is planned, and the state that it was planned on."""

    turn: PendingTurn
    shadow: PendingTurn | None
    """In mode ``observe``: the turn that agentkv would have made, if it could be planned."""
    ledger: Ledger
    """The conversation's ledger: another one by the time of the answer makes the turn void."""
    traits: ModelTraits
    """Of the ``with`` block: leaving it makes the turn void."""
    rebase: RebaseRequest | None
    """The request that it serves."""
    calls: bool
    """Whether the model may call tools."""


def salted(turn: PendingTurn, salt: str) -> PendingTurn:
    """Return the turn with its salt's digest; nothing is cached if the last turn had another salt."""
    check = hashlib.sha256(salt.encode()).hexdigest()[:16]
    last = turn.ledger.state.generated
    if last is None or last.salt_check in ("", check):
        return replace(turn, salt_check=check)
    return replace(turn, salt_check=check, predicted_cached_tokens=0)


def with_refusals(inputs: list[Input], ledger: Ledger) -> list[Input]:
    """Return inputs with the results of the last answer's calls that cannot be made."""
    last = ledger.state.generated
    if last is None:
        return inputs
    given = {item.call_id for item in inputs if isinstance(item, ToolResult)}
    open_ids = {call.id for call in ledger.state.open_calls}
    refused = [r for r in refusals(last) if r.call_id not in given and r.call_id in open_ids]
    return [*refused, *inputs]
