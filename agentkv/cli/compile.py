"""``agentkv compile``: the KV of skills and documents, computed once and kept as artifacts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Final, Protocol

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentkv.anchor import ANCHOR
from agentkv.backends.base import Splicer
from agentkv.cli.progress import TokenBars, megabytes
from agentkv.errors import ArtifactError, ConfigurationError, ContextWindowError
from agentkv.models import cache_folder, resolve
from agentkv.segments import Splicing
from agentkv.splicing import chunk_ids
from agentkv.template import TemplateEncoder

if TYPE_CHECKING:
    from agentkv.backends import VLLMBackend
    from agentkv.kv.store import ArtifactStore
    from agentkv.tokenizer import ChatTokenizer

_DTYPES: Final = ("float32", "bfloat16", "float16")


def compile_files(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE...", help="Texts of skills and documents, in UTF-8.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="FOLDER_OR_ID",
            help="A folder, a hub id or the name of a pulled model; with --server the served name.",
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option("--server", metavar="URL", help="Compile inside this vLLM server, into its own folder."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="FOLDER_OR_ID",
            help="With --server: the served model's, if it is not told.",
        ),
    ] = None,
    ticket_key_file: Annotated[
        Path | None,
        typer.Option("--ticket-key-file", metavar="FILE", help="With --server: its key for tickets."),
    ] = None,
    api_key_env: Annotated[
        str, typer.Option("--api-key-env", metavar="NAME", help="With --server: variable with its API key.")
    ] = "VLLM_API_KEY",
    anchor: Annotated[
        Path | None,
        typer.Option(
            "--anchor", metavar="FILE", help="System text to compile behind; a general one unless given."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Where artifacts are kept; in agentkv's cache unless given."
        ),
    ] = None,
    tenant: Annotated[
        str, typer.Option("--tenant", help="Whose they are; nobody else can load them.")
    ] = "default",
    sign_key_file: Annotated[
        Path | None,
        typer.Option("--sign-key-file", metavar="FILE", help="Sign artifacts with the key in this file."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="float32, bfloat16 or float16: that of the model which will load them."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Such as cuda or cpu; a CUDA device if there is one.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Compile anew what is there.")] = False,
    list_them: Annotated[bool, typer.Option("--list", help="List the artifacts that are there.")] = False,
) -> None:
    """Compute the KV of texts once, so that prompts which hold them load it.

    What is there already is skipped, so a run that was interrupted goes on where it stopped.
    """
    place = cache_folder() / "artifacts" if out is None else out
    key = None if sign_key_file is None else _bytes(sign_key_file).strip()
    if list_them:
        _list(place, key)
        return
    if not files:
        raise typer.BadParameter("name the texts to compile, or give --list", param_hint="FILE...")
    if model is None and server is None:
        raise typer.BadParameter("name the model that will load the artifacts", param_hint="--model")
    if dtype is not None and dtype not in _DTYPES:
        raise typer.BadParameter(f"{dtype!r} is none of {', '.join(_DTYPES)}", param_hint="--dtype")
    texts = [(file, read_text(file)) for file in files]
    behind = ANCHOR if anchor is None else read_text(anchor)
    bars = TokenBars()
    if server is not None:
        of_a_folder = {"--out": out, "--sign-key-file": key, "--dtype": dtype, "--device": device}
        for option, value in {**of_a_folder, "--force": force or None}.items():
            if value is not None:
                raise typer.BadParameter("the server decides that: leave it out", param_hint=option)
        ticket_key = None if ticket_key_file is None else _bytes(ticket_key_file).strip()
        api_key = os.environ.get(api_key_env)
        with _served(server, model, tokenizer, behind, ticket_key, api_key) as there, bars:
            for done in compiled(there, tenant, texts, None, bars):
                bars.say(str(done))
        return
    from agentkv.kv.store import ArtifactStore

    store = ArtifactStore(place, key=key)
    compiler = _embedded(model or "", store, behind, bars, dtype=dtype, device=device)
    with bars:
        for done in compiled(compiler, tenant, texts, store, bars, force=force):
            bars.say(str(done))


class Compiler(Splicer, Protocol):
    """What compiles chunks: a model that runs here, or a server that can."""

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer and chat template."""
        ...


@dataclass(frozen=True, slots=True)
class Compiled:
    """A text that has an artifact; ``str()`` of it is a line for people."""

    file: Path
    artifact: str
    tokens: int
    nbytes: int | None
    """None where a server keeps it."""
    seconds: float | None
    """None where it was there already."""

    def __str__(self) -> str:
        took = "there already" if self.seconds is None else f"{self.seconds:.1f} s"
        size = "" if self.nbytes is None else f"{megabytes(self.nbytes)}, "
        return f"{self.file}: {self.artifact}, {self.tokens} tokens, {size}{took}"


def read_text(file: Path) -> str:
    """Read a text to compile.

    Raises
    ------
    ConfigurationError
        It cannot be read, is not text, or is empty.
    """
    data = _bytes(file)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{file} is not a text in UTF-8 (byte {error.start} is not); give a text file"
        ) from None
    if "\0" in text:
        raise ConfigurationError(f"{file} is not a text: it holds null bytes; give a text file")
    if not text.strip():
        raise ConfigurationError(f"{file} is empty: there is nothing to compile; leave it out")
    # As Python reads text files: a prompt's text has none of the other line ends.
    return text.replace("\r\n", "\n").replace("\r", "\n")


def compiled(
    compiler: Compiler,
    tenant: str,
    texts: Iterable[tuple[Path, str]],
    store: ArtifactStore | None,
    bars: TokenBars,
    *,
    force: bool = False,
) -> Iterator[Compiled]:
    """Compile texts one after the other, and say so of each.

    Parameters
    ----------
    store
        Where the artifacts come to lie; None for a server's own folder.
    force
        Delete and compile anew what is there.

    Raises
    ------
    ContextWindowError
        A text is too long; what came before it is stored.
    BackendError, ArtifactError
        It could not be computed or stored.
    """
    encoder = TemplateEncoder(compiler.tokenizer)
    for file, text in texts:
        ids = chunk_ids(text, encoder)
        name = compiler.find_artifact(tenant, ids)
        if name is not None and force and store is not None:
            store.delete(name)
            name = None
        started = perf_counter()
        bars.begin(file.name)
        try:
            made = compiler.compile_chunk(tenant, ids)
        except ContextWindowError as error:
            raise ContextWindowError(f"{file}: {error}") from error
        seconds = None if name == made else perf_counter() - started
        yield Compiled(file, made, len(ids), None if store is None else store.nbytes(made), seconds)


def _embedded(
    model: str,
    store: ArtifactStore,
    anchor: str,
    progress: Callable[[int, int], None],
    *,
    dtype: str | None,
    device: str | None,
) -> Compiler:
    """Load a model that runs here."""
    from agentkv.backends import TransformersBackend

    return TransformersBackend.from_pretrained(
        resolve(model).location,
        artifacts=store,
        anchor=anchor,
        progress=progress,
        dtype=dtype,
        device=device,
    )


def _served(
    url: str, model: str | None, tokenizer: str | None, anchor: str, ticket_key: bytes | None, key: str | None
) -> VLLMBackend:
    """Reach a server that compiles."""
    from agentkv.backends import VLLMBackend

    return VLLMBackend(
        url,
        model,
        tokenizer,
        splices=Splicing.ALWAYS,
        anchor=anchor,
        ticket_key=ticket_key,
        api_key=key,
    )


def _list(folder: Path, key: bytes | None) -> None:
    from agentkv.kv.store import ArtifactStore

    store = ArtifactStore(folder, key=key)
    table = Table("artifact", "tenant", "model", "dtype", "tokens", "size", "made", box=None)
    for name in sorted(store.names()):
        try:
            header, size = store.header(name), store.nbytes(name)
        except ArtifactError as error:
            table.add_row(name, Text(_line(str(error)), "red"))
            continue
        model, made = header.identity, header.created
        cells = (
            header.tenant,
            model.architecture,
            model.dtype,
            f"{len(header.ids):,}",
            megabytes(size),
            made,
        )
        table.add_row(name, *(Text(_line(str(cell))) for cell in cells))
    # A pipe has no width to fit into; cutting names off would only harm.
    console = Console() if sys.stdout.isatty() else Console(width=400)
    console.print(
        table if table.row_count else f"{folder} holds no artifacts", soft_wrap=True, highlight=False
    )


def _line(text: str) -> str:
    """Return text in one line that does not steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror or error}") from error
