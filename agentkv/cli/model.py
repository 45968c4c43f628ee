"""``agentkv model``: fetch small models and look after them."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from agentkv.cli.progress import megabytes, shown
from agentkv.models import ModelState, default_store

app = typer.Typer(no_args_is_help=True, help="Fetch small models once and keep them.")

Name = Annotated[str, typer.Argument(help="Name of a known model, as 'agentkv model list' shows it.")]


@app.command()
def pull(
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="Build it anew even if it is there.")] = False,
) -> None:
    """Fetch a known model, convert it, and print its folder; answers at once if it is there."""
    with shown(name) as progress:
        folder = default_store().pull(name, force=force, progress=progress)
    typer.echo(folder)


@app.command("list")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the known models and whether they were pulled."""
    store = default_store()
    stored = [store.look(name) for name in sorted(store.known)]
    if as_json:
        rows = [
            {
                "name": model.known.name,
                "state": model.state.value,
                "detail": model.detail,
                "parameters": model.known.parameters,
                "licence": model.known.licence,
                "hub_id": model.known.hub_id,
                "bytes": None if model.manifest is None else model.manifest.size,
                "folder": None if model.state is ModelState.ABSENT else str(model.folder),
            }
            for model in stored
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("name", "state", "parameters", "size", "licence", "same on the hub", box=None)
    for model in stored:
        size = "" if model.manifest is None else megabytes(model.manifest.size)
        known = model.known
        table.add_row(known.name, model.state.value, known.parameters, size, known.licence, known.hub_id)
    # A pipe has no width to fit into; cutting names off would only harm.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table)


@app.command()
def path(name: Name) -> None:
    """Print the folder of a pulled model."""
    typer.echo(default_store().look(name).require())


@app.command()
def verify(name: Name) -> None:
    """Compute the digest of every file of a pulled model and compare."""
    with shown(name) as progress:
        stored = default_store().verify(name, progress=progress)
    files = 0 if stored.manifest is None else len(stored.manifest.files)
    typer.echo(f"{name}: {files} files are as they were written")


@app.command()
def remove(name: Name) -> None:
    """Delete a pulled model."""
    freed = default_store().remove(name)
    typer.echo(f"{name}: removed, {megabytes(freed)} freed")
