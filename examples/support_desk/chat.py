"""A chat with the bot, in which the order's row can be changed between messages."""

from __future__ import annotations

import sqlite3

from rich.console import Console
from rich.table import Table

from agentkv import Skill
from agentkv.plan import describe
from examples.support_desk.bot import SupportDesk
from examples.support_desk.database import Column, fetch_order, update_order
from examples.support_desk.policy import RETURNS

HELP = """Type a message, or
  /set COLUMN VALUE   change the order's row, such as /set order.status delivered
  /skill              add the returns skill, spliced if the backend can
  /row                show the row
  /report             show what the conversation cost so far
  /quit               leave"""


def chat(desk: SupportDesk, connection: sqlite3.Connection, order_id: str, console: Console) -> None:
    """Read messages until the end of input or ``/quit``."""
    console.print(HELP, highlight=False, markup=False)
    with desk.context as context:
        while (line := _read(console)) is not None:
            if line.startswith("/"):
                if line == "/quit":
                    return
                _command(line, desk, connection, order_id, console)
                continue
            desk.refresh()
            stream = context.stream(line)
            try:
                for delta in stream:
                    console.print(delta.text, end="", highlight=False, markup=False)
            except KeyboardInterrupt:
                console.print(" (stopped; nothing was recorded)", end="")
            console.print()
            if stream.reply is not None:
                report = stream.reply.report
                console.print(
                    f"[dim]{describe(report.plan)}; {report.cached_tokens} of {report.prompt_tokens} prompt "
                    f"tokens cached, {report.spliced_tokens} spliced, first token after "
                    f"{report.ttft_s:.2f} s[/dim]"
                )


def _read(console: Console) -> str | None:
    while True:
        try:
            line = console.input("[bold]you:[/bold] ").strip()
        except (EOFError, KeyboardInterrupt):
            return None
        if line:
            return line


def _command(
    line: str, desk: SupportDesk, connection: sqlite3.Connection, order_id: str, console: Console
) -> None:
    command, _, rest = line.partition(" ")
    if command == "/row":
        table = Table(show_header=False)
        for key, value in fetch_order(connection, order_id).fields().items():
            table.add_row(key, value)
        console.print(table)
    elif command == "/skill":
        desk.context.add(Skill("returns", RETURNS))
        console.print("the bot knows the returns skill from your next message on")
    elif command == "/report":
        report = desk.context.report
        console.print(
            f"{report.turns} turns, {report.errata} errata, {report.cached_share:.1%} of the prompt tokens "
            f"cached, {report.ttft_s:.2f} s to first tokens in all"
        )
    elif command == "/set":
        name, _, value = rest.strip().partition(" ")
        if name not in set(Column) or not value.strip():
            console.print(f"give a column and a value; columns are {', '.join(Column)}")
            return
        update_order(connection, order_id, Column(name), value.strip())
        console.print(f"{name} is {value.strip()!r} now; the bot is told with your next message")
    else:
        console.print(HELP, highlight=False, markup=False)
