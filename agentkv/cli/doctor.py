"""``agentkv doctor``: what of agentkv works on a server, measured."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from agentkv.errors import ConfigurationError

if TYPE_CHECKING:
    from agentkv.doctor import Examination, Finding

_KEY_VARIABLE: Final = "VLLM_API_KEY"
_STYLES: Final = {"ok": "green", "warning": "yellow", "failed": "bold red", "not checked": "dim"}


def examine(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address, such as http://127.0.0.1:8000.")],
    model: Annotated[
        str | None, typer.Option("--model", help="The served name, where there are several.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="FOLDER_OR_ID",
            help="The served model's: a folder, a hub id or a pulled model's name.",
        ),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            "--api-key-env",
            metavar="VARIABLE",
            help=f"Environment variable that holds the API key; {_KEY_VARIABLE} unless given.",
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", metavar="'NAME: VALUE'", help="A further header; may be repeated."),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Do not check the certificate.")] = False,
    ca_file: Annotated[
        Path | None,
        typer.Option("--ca-file", exists=True, dir_okay=False, help="File of certificates to trust."),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Longest silence of the server, in seconds.")
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
    measure_large: Annotated[
        bool,
        typer.Option("--measure-large", help="Look for blocks of up to 2,100 tokens too; takes longer."),
    ] = False,
) -> None:
    """Measure what a server can do for agentkv, and say what to change where something is missing."""
    from agentkv.doctor import Lengths, ServerOptions
    from agentkv.doctor import examine as examined

    if insecure and ca_file is not None:
        raise typer.BadParameter("it excludes --ca-file", param_hint="--insecure")
    try:
        options = ServerOptions(
            url,
            api_key=_key(api_key_env),
            headers=dict(_header(text) for text in header or ()),
            verify=not insecure if ca_file is None else str(ca_file),
            connect_s=min(10.0, timeout),
            stall_s=timeout,
            deadline_s=timeout,
            attempts=2,
        )
        lengths = Lengths.LONG if measure_large else Lengths.SHORT
        with _shown(url) as progress:
            found = examined(options, model=model, tokenizer=tokenizer, lengths=lengths, progress=progress)
    except ConfigurationError as error:
        # Only what was given can be wrong here: what is wrong with the server is a finding.
        raise typer.BadParameter(str(error)) from error
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        _print(found)
    raise typer.Exit(0 if found.ok else 1)


def _key(variable: str | None) -> str | None:
    key = os.environ.get(variable or _KEY_VARIABLE)
    if variable is not None and not key:
        raise typer.BadParameter(
            f"the environment variable {variable} is not set", param_hint="--api-key-env"
        )
    return key or None


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        # Not repeated in the message: a header may hold a secret.
        raise typer.BadParameter("a header has the form 'Name: value'", param_hint="--header")
    return name.strip(), value.strip()


@contextmanager
def _shown(url: str) -> Iterator[Callable[[str], None] | None]:
    """Show which check is made, on a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with console.status(Text(f"examining {url}")) as status:
        yield lambda name: status.update(Text(f"examining {url}: {name}"))


def _print(found: Examination) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=200)
    findings = found.findings
    if findings[0].status.value == "failed":
        # All the others would say that they need this one.
        findings = findings[:1]
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        for line in _lines(finding, width):
            console.print(line, highlight=False, soft_wrap=True)


def _lines(finding: Finding, width: int) -> Iterator[Text]:
    status = finding.status.value
    yield Text.assemble(
        (f"{status:<11}", _STYLES[status]), f"  {finding.name:<{width}}  {_plain(finding.found)}"
    )
    if finding.fix:
        yield Text.assemble(f"{'':<11}  {'':<{width}}  ", ("fix: ", "bold"), _plain(finding.fix))


def _plain(text: str) -> str:
    """Return text in one line that does not steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
