"""``agentkv inspect``: what a stored ledger holds, without the values unless they are asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentkv.cli.listing import Listing, listed
from agentkv.errors import LedgerError, LedgerFormatError
from agentkv.ledger import Ledger
from agentkv.values import quoted


def show(
    file: Annotated[Path, typer.Argument(metavar="LEDGER.json", help="What Ledger.to_json returned.")],
    entries: Annotated[
        int | None,
        typer.Option("--entries", min=1, help="List the turns and errata of the last so many entries only."),
    ] = None,
    values: Annotated[bool, typer.Option("--values", help="Show the values of fields.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what a stored ledger holds: epochs, turns, errata, and what the model was last told."""
    listing = listed(read(file), str(file), last=entries, values=values)
    if as_json:
        typer.echo(json.dumps(asdict(listing), indent=2))
        return
    # A pipe has no width to fit into; cutting keys off would only harm.
    _print(listing, Console() if sys.stdout.isatty() else Console(width=200))


def read(file: Path) -> Ledger:
    """Read a ledger's file.

    Raises
    ------
    LedgerError
        It cannot be read, or is no ledger. The message holds nothing of what the file holds.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise LedgerError(f"{file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise LedgerFormatError(f"{file} is not a ledger: it is not UTF-8 text") from error
    try:
        return Ledger.from_json(text)
    except LedgerFormatError as error:
        raise LedgerFormatError(f"{file}: {error}") from error


def _print(listing: Listing, console: Console) -> None:
    tokens = "unknown" if listing.tokens is None else f"{listing.tokens:,}"
    about = (
        f"{listing.file}: {listing.entries} entries, {listing.turns} turns, {len(listing.epochs)} epochs, "
        f"last erratum {listing.revision}"
    )
    lines = [
        about,
        f"tokens of the last prompt and answer: {tokens}; of standing errata: {listing.errata_tokens:,}",
    ]
    if listing.open_calls:
        lines.append(f"calls that await their results: {', '.join(listing.open_calls)}")
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    _table(
        console,
        "Epochs",
        ("epoch", "entry", "reason", "segments", "tools", "fields", "summary", "namespace"),
        (
            (
                row.epoch,
                row.entry,
                row.reason,
                row.segments,
                row.tools,
                len(row.fields),
                "yes" if row.summarised else "",
                f"{row.namespace} {row.generation}",
            )
            for row in listing.epochs
        ),
    )
    _table(
        console,
        "What the model was last told",
        ("field", "value", "told by", "earlier values in the context"),
        ((row.key, row.value, row.told_by, row.superseded) for row in listing.fields),
    )
    _table(
        console,
        "Errata",
        ("entry", "epoch", "number", "statements", "tokens", "carrier", "snapshot"),
        (
            (
                row.entry,
                row.epoch,
                row.revision,
                tuple(f"{key} = {_shown(value)}" for key, value in row.statements.items()),
                row.tokens,
                row.carrier,
                "yes" if row.snapshot else "",
            )
            for row in listing.errata
        ),
    )
    _table(
        console,
        "Turns",
        ("turn", "entry", "epoch", "said before the answer", "prompt tokens", "answer tokens", "calls"),
        (
            (
                row.turn,
                row.entry,
                row.epoch,
                row.said,
                row.prompt_tokens,
                f"{'unknown' if row.answer_tokens is None else row.answer_tokens}"
                + (" (stopped)" if row.stopped else ""),
                row.calls,
            )
            for row in listing.history
        ),
    )


def _table(console: Console, title: str, columns: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> None:
    table = Table(*columns, title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*map(_cell, row))
    if table.row_count:
        console.print()
        console.print(table)


def _cell(value: object) -> Text:
    if isinstance(value, tuple):
        return Text(", ".join(map(_shown, value)))
    return Text(_shown(value))


def _shown(value: object) -> str:
    """Return text that neither styles nor steers a terminal."""
    text = str(value)
    return quoted(text) if text else ""
