"""The ``agentkv`` command: its sub-commands in one place, and how errors leave it."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from agentkv._version import __version__
from agentkv.cli import doctor, inspect, model
from agentkv.cli.compile import compile_files
from agentkv.errors import AgentKVError

app = typer.Typer(
    name="agentkv",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Keep an agent's prompt a cache hit while its facts change.",
)

# Every sub-command is added here. A module that holds one imports torch, transformers and the like
# inside its functions, so that ``agentkv --help`` stays quick.
app.add_typer(model.app, name="model")
app.command("compile")(compile_files)
app.command("doctor")(doctor.examine)
app.command("inspect")(inspect.show)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    typer.echo(f"agentkv {__version__}")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Read the options that stand before a sub-command."""


def main() -> None:
    """Run the command; an error of agentkv is one line on standard error and exit code 1.

    ``AGENTKV_DEBUG=1`` in the environment shows where it came from.
    """
    try:
        app()
    except AgentKVError as problem:
        if os.environ.get("AGENTKV_DEBUG", "") not in ("", "0"):
            raise
        line = Text.assemble(("error: ", "bold red"), str(problem))
        Console(stderr=True).print(line, highlight=False, soft_wrap=True)
        sys.exit(1)
