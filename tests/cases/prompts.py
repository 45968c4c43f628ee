"""Reading what a scripted backend was sent."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from agentkv import Wording
from agentkv.entries import Frozen
from agentkv.ledger import Ledger
from agentkv.testing import ScriptedBackend
from agentkv.tokens import TokenIds

CALL = '<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
"""How a model without a format of its own writes a call."""


def call(name: str, arguments: str = "{}") -> str:
    """Return an answer that calls a tool."""
    return CALL.format(name=name, arguments=arguments)


def tool(name: str, description: str = "Does one thing.") -> Mapping[str, Any]:
    """Return a tool's schema."""
    return {"name": name, "description": description, "parameters": {"type": "object", "properties": {}}}


def said(revision: int, label: str, *, old: str | None = None, new: str) -> str:
    """Return the erratum of one field in the generic wording; without `old` as a restated one."""
    wording = Wording()
    form = wording.fresh if old is None else wording.changed
    return wording.header.format(revision=revision) + form.format(label=label, old=old, new=new)


def gone(revision: int, label: str) -> str:
    """Return a tombstone in the generic wording."""
    wording = Wording()
    return wording.header.format(revision=revision) + wording.gone.format(label=label)


def voided(*labels: str) -> str:
    """Return what withdraws conclusions in the generic wording."""
    return Wording().voided.format(labels=" and the ".join(labels)).strip()


def begins_with(later: TokenIds, earlier: TokenIds) -> bool:
    """Whether `later` begins with all of `earlier`."""
    return later.common_prefix(earlier) == len(earlier)


def only_grew(backend: ScriptedBackend) -> bool:
    """Whether every prompt so far begins with the whole prompt before it."""
    return all(begins_with(b.ids, a.ids) for a, b in pairwise(backend.requests))


def news(backend: ScriptedBackend) -> str:
    """Return what the last prompt holds behind the one before it, the answer to that included."""
    before, last = backend.requests[-2:]
    at = last.ids.common_prefix(before.ids)
    return str(backend.tokenizer.decode(last.ids.tolist(at)))


def frozen(ledger: Ledger) -> Frozen:
    """Return the frozen prefix of the ledger's epoch."""
    found = ledger.state.frozen
    assert found is not None
    return found
