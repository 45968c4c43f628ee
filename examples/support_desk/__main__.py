"""``python -m examples.support_desk``: the scripted conversation beside two other ways, or a chat."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentkv.backends.base import Backend
from agentkv.errors import AgentKVError
from benchmarks._environment import write_results
from examples.support_desk.bot import SupportDesk
from examples.support_desk.chat import chat
from examples.support_desk.compare import compare
from examples.support_desk.database import ORDER_ID, open_database, reset_database

DEFAULT_MODEL = "smollm2-135m"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    model: Annotated[
        str, typer.Option(help="A pulled model's name, a model folder, or an id on the hub.")
    ] = DEFAULT_MODEL,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every turn and the sums to this file.")
    ] = None,
    interactive: Annotated[  # noqa: FBT002 - typer reads the flag from the signature
        bool, typer.Option(help="Chat with the bot instead of running the script.")
    ] = False,
    database: Annotated[
        Path | None, typer.Option(help="SQLite file to use; by default a new one that is removed afterwards.")
    ] = None,
    order: Annotated[str, typer.Option(help="Number of the order that the case is about.")] = ORDER_ID,
) -> None:
    """Run a support desk's conversation in which the order's row changes between turns.

    Each turn is run three ways in this process, each with its own prefix cache: agentkv, which says what
    changed; the prompt rewritten with the new value; and the whole state appended to every message.
    """
    console = Console(soft_wrap=not sys.stdout.isatty())
    with tempfile.TemporaryDirectory() as folder:
        connection = open_database(database or Path(folder) / "desk.sqlite")
        try:
            backend = load(model, console)
            if interactive:
                chat(SupportDesk(backend, connection, order), connection, order, console)
                return
            reset_database(connection)
            result = compare(backend, connection, console)
        finally:
            connection.close()
    write_results(json_file, result, indent=1)
    if json_file is not None:
        console.print(f"written to {json_file}")


def load(model: str, console: Console) -> Backend:
    """Load the embedded backend."""
    from agentkv.backends import TransformersBackend
    from agentkv.models import resolve

    with console.status(f"loading {model}"):
        return TransformersBackend.from_pretrained(str(resolve(model)))


def main() -> None:
    """Run the command; an error of agentkv is one line."""
    try:
        app()
    except AgentKVError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
