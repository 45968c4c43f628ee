"""``python -m examples.support_desk``: the scripted conversation beside two other ways, or a chat."""

from __future__ import annotations

import sys
import tempfile
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from agentkv.errors import AgentKVError
from agentkv.segments import Splicing
from benchmarks._environment import write_results
from examples.support_desk.bot import SupportDesk
from examples.support_desk.chat import chat
from examples.support_desk.compare import compare
from examples.support_desk.database import ORDER_ID, open_database, reset_database
from examples.support_desk.skills import show_skill

if TYPE_CHECKING:
    from agentkv.backends import TransformersBackend, VLLMBackend

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_URL = "http://127.0.0.1:8000"


class Runtime(StrEnum):
    """What runs the model."""

    EMBEDDED = "embedded"
    """A transformers model in this process."""
    VLLM = "vllm"
    """A vLLM server."""


class AgentKind(StrEnum):
    """What holds the conversation."""

    CONTEXT = "context"
    """A context of agentkv, compared with two other ways."""
    LANGCHAIN = "langchain"
    """A LangChain agent with tools."""


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    model: Annotated[
        str | None,
        typer.Option(
            help="Embedded: a pulled model's name, a folder, or an id on the hub; smollm2-135m if not given. "
            "vLLM: the served name; the only one if not given."
        ),
    ] = None,
    backend: Annotated[Runtime, typer.Option(help="What runs the model.")] = Runtime.EMBEDDED,
    url: Annotated[str, typer.Option(help="Address of the vLLM server.")] = DEFAULT_URL,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="vLLM: folder or hub id of the tokenizer; what the server loaded if not given."),
    ] = None,
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
    agent: Annotated[
        AgentKind, typer.Option(help="What holds the conversation; langchain runs a script of its own.")
    ] = AgentKind.CONTEXT,
) -> None:
    """Run a support desk's conversation in which the order's row changes between turns.

    Each turn is run three ways, each with its own prefix cache: agentkv, which says what changed; the prompt
    rewritten with the new value; and the whole state appended to every message. Then a skill is added in
    mid-conversation, once spliced and once computed.

    With `--agent langchain` the same desk is a LangChain agent with tools, and each turn's report is printed.
    """
    console = Console(soft_wrap=not sys.stdout.isatty())
    if interactive and agent is AgentKind.LANGCHAIN:
        raise typer.BadParameter("the LangChain agent runs its script: leave out --interactive")
    with tempfile.TemporaryDirectory() as folder:
        file = database or Path(folder) / "desk.sqlite"
        connection = open_database(file)
        try:
            artifacts = Path(folder) / "artifacts"
            with closing(load(backend, model, url, tokenizer, artifacts, console)) as loaded:
                if agent is AgentKind.LANGCHAIN:
                    from examples.support_desk.agent import Shop, chat_model, run_agent

                    reset_database(connection)
                    result = run_agent(chat_model(loaded), Shop(file, order), console)
                elif interactive:
                    desk = SupportDesk(loaded, connection, order, skills=(), splicing=Splicing.ALWAYS)
                    chat(desk, connection, order, console)
                    return
                else:
                    reset_database(connection)
                    result = compare(loaded, connection, console)
                    result["skill"] = show_skill(loaded, connection, console)
        finally:
            connection.close()
    write_results(json_file, result, indent=1)
    if json_file is not None:
        console.print(f"written to {json_file}")


def load(
    runtime: Runtime,
    model: str | None,
    url: str,
    tokenizer: str | None,
    artifacts: Path,
    console: Console,
) -> TransformersBackend | VLLMBackend:
    """Load the embedded backend, or reach the server."""
    if runtime is Runtime.VLLM:
        from agentkv.backends import VLLMBackend

        served = VLLMBackend(url, model, tokenizer)
        with console.status(f"reaching {url}"):
            console.print(f"{served.model} on {url}", highlight=False)
        return served
    from agentkv.backends import TransformersBackend
    from agentkv.models import resolve

    name = model or DEFAULT_MODEL
    with console.status(f"loading {name}"):
        return TransformersBackend.from_pretrained(str(resolve(name)), artifacts=artifacts)


def main() -> None:
    """Run the command; an error of agentkv is one line."""
    try:
        app()
    except AgentKVError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
