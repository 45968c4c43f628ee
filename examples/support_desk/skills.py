"""The returns skill, added when a customer asks for it: once spliced, once computed."""

from __future__ import annotations

import sqlite3
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from agentkv import Skill
from agentkv.backends.base import Backend, Splicer
from agentkv.errors import AgentKVError
from agentkv.plan import describe
from agentkv.segments import Splicing
from agentkv.splicing import chunk_ids
from agentkv.template import TemplateEncoder
from examples.support_desk.bot import SupportDesk
from examples.support_desk.database import ORDER_ID
from examples.support_desk.policy import RETURNS

FIRST: Final = "What is the order status?"
QUESTION: Final = "Can I return boots that I tried on at home?"


def show_skill(backend: Backend, connection: sqlite3.Connection, console: Console) -> dict[str, Any] | None:
    """Add the skill in mid-conversation both ways; prints what it cost, and returns it.

    Returns None, and says so, where the backend does not splice.
    """
    if not isinstance(backend, Splicer) or not backend.capabilities.splices:
        console.print("The returns skill is not spliced: this backend does not splice.")
        return None
    try:
        backend.compile_chunk("default", chunk_ids(RETURNS, TemplateEncoder(backend.tokenizer)))
    except AgentKVError as error:
        console.print(f"The returns skill is not spliced: {error}", markup=False)
        return None
    rows = [added(backend, connection, how) for how in (Splicing.ALWAYS, Splicing.NEVER)]
    table = Table(
        "the returns skill, added in turn 2",
        "cached",
        "spliced",
        "computed",
        "first token",
        title="A skill when it is needed",
    )
    for row in rows:
        counts = (f"{row[name]}" for name in ("cached_tokens", "spliced_tokens", "computed_tokens"))
        table.add_row(row["way"], *counts, f"{row['ttft_s']:.3f} s")
    console.print(table)
    console.print(f"    plan: {rows[0]['plan']}", highlight=False, markup=False)
    for row in rows:
        console.print(f"    {row['way']}: {row['answer'].strip()}", highlight=False, markup=False)
    return {"rows": rows}


def added(backend: Backend, connection: sqlite3.Connection, how: Splicing) -> dict[str, Any]:
    """Run two turns, the second with the skill, and return what that one cost."""
    desk = SupportDesk(backend, connection, ORDER_ID, skills=(), splicing=Splicing.AUTO)
    with desk.context as context:
        desk.refresh()
        context.ask(FIRST)
        context.add(Skill("returns", RETURNS, splice=how))
        reply = context.ask(QUESTION)
    report = reply.report
    return {
        "way": "spliced" if how is Splicing.ALWAYS else "computed",
        "plan": describe(report.plan),
        "prompt_tokens": report.prompt_tokens,
        "cached_tokens": report.cached_tokens,
        "spliced_tokens": report.spliced_tokens,
        "predicted_spliced_tokens": report.predicted_spliced_tokens,
        "computed_tokens": report.computed_tokens,
        "ttft_s": report.ttft_s,
        "refused": [[key, why.value] for key, why in report.refused],
        "answer": reply.text,
    }
