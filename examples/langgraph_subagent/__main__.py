"""``python -m examples.langgraph_subagent``: a desk and its reviewer on a model here or on a vLLM server."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from langchain_agentkv import AgentKVCallbackHandler
from rich.console import Console

from agentkv import Inline, Policy
from agentkv.errors import AgentKVError
from examples.langgraph_subagent.graph import build
from examples.support_desk.__main__ import DEFAULT_URL, Runtime, load
from examples.support_desk.agent import Shop, chat_model, make_tools
from examples.support_desk.database import ORDER_ID, Column, open_database
from examples.support_desk.policy import POLICY

QUESTION = "What is the order status?"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    model: Annotated[str | None, typer.Option(help="As of examples.support_desk.")] = None,
    backend: Annotated[Runtime, typer.Option(help="What runs the model.")] = Runtime.EMBEDDED,
    url: Annotated[str, typer.Option(help="Address of the vLLM server.")] = DEFAULT_URL,
    tokenizer: Annotated[str | None, typer.Option(help="As of examples.support_desk.")] = None,
) -> None:
    """Ask the desk twice; the order's status changes between. Prints each model call's report."""
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        shop = Shop(Path(folder) / "desk.sqlite", ORDER_ID)
        open_database(shop.path).close()
        with closing(load(backend, model, url, tokenizer, Path(folder) / "artifacts", console)) as loaded:
            handler = AgentKVCallbackHandler()
            segments = [Policy(Inline(POLICY)), *shop.fields()]
            desk = build(chat_model(loaded), segments, make_tools(shop))
            for status in ("in transit", "delivered"):
                shop.update(Column.STATUS, status)
                seen = len(handler.reports)
                state = desk.ask("1", QUESTION, callbacks=[handler])
                console.print(f"desk:     {state['messages'][-1].text}", highlight=False, markup=False)
                console.print(f"reviewer: {state['review']}", highlight=False, markup=False)
                for report in handler.reports[seen:]:
                    cached, whole = report["cached_tokens"], report["prompt_tokens"]
                    console.print(
                        f"    {report['plan']}; {cached} of {whole} prompt tokens cached", highlight=False
                    )


def main() -> None:
    """Run the command; an error of agentkv is one line."""
    try:
        app()
    except AgentKVError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
