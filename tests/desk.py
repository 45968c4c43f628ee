"""A small support desk on the scripted backend: what the core's tests share."""

from __future__ import annotations

from typing import Any

from agentkv import AgentKVContext, Policy, mutable, mutable_fields
from agentkv.entries import Erratum, Frozen, RebaseReason
from agentkv.ledger import Ledger
from agentkv.plan import Rebase
from agentkv.reply import Reply
from agentkv.testing import ScriptedBackend

KEY = b"a key of the tests, 32 bytes long"


@mutable_fields
class Order:
    """What the prompt shows of an order."""

    status: str = mutable(label="Order status", default="in transit")
    eta: str = mutable(label="Estimated delivery", default="Monday")


def desk(backend: ScriptedBackend, *segments: Any, **options: Any) -> AgentKVContext:
    """Make a context of a policy and further segments."""
    return AgentKVContext(backend, [Policy("Be brief."), *segments], salt_key=KEY, **options)


def lookup(number: str) -> str:
    """Look an order up."""
    return number


def cancel(number: str) -> str:
    """Cancel an order."""
    return number


def call(name: str = "lookup", arguments: str = '{"number": "7"}') -> str:
    """Write a tool call as a model does."""
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def errata(ledger: Ledger) -> list[Erratum]:
    """Return the errata of a ledger."""
    return [entry for entry in ledger if isinstance(entry, Erratum)]


def epochs(ledger: Ledger) -> list[Frozen]:
    """Return the openings of a ledger's epochs."""
    return [entry for entry in ledger if isinstance(entry, Frozen)]


def reason(reply: Reply) -> RebaseReason | None:
    """Return why a turn opened an epoch; None if it did not."""
    for step in reply.report.plan:
        if isinstance(step, Rebase):
            return step.reason
    return None


def new_text(backend: ScriptedBackend) -> str:
    """Return what the last prompt holds behind the one before."""
    before, last = backend.prompts[-2:]
    shared = next((i for i, (a, b) in enumerate(zip(before, last, strict=False)) if a != b), len(before))
    return last[shared:]


def extends(backend: ScriptedBackend) -> list[bool]:
    """Tell of each request but the first whether its ids begin with the ones before."""
    return [
        after.ids.common_prefix(before.ids) == len(before.ids)
        for before, after in zip(backend.requests, backend.requests[1:], strict=False)
    ]
