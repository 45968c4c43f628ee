"""``agentkv compile --server``: texts are compiled inside a server, here a stand-in on a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from agentkv.backends import VLLMBackend
from agentkv.cli import main
from agentkv.errors import CapabilityError
from tests.stub_connector import StubConnectorServer
from tests.stub_server import StubServer
from tests.templates import FAMILIES, transformers_tokenizer

TEXT = "Parcels can be returned within thirty days of delivery, in the box that they came in. " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in's tokenizer in a folder."""
    place = tmp_path_factory.mktemp("tokenizer")
    transformers_tokenizer(FAMILIES["qwen"]).save_pretrained(place)
    return place


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "returns.md"
    file.write_text(TEXT, "utf-8")
    return file


@pytest.fixture
def server() -> Iterator[StubConnectorServer]:
    with StubConnectorServer() as stub:
        yield stub


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> list[str]:
    main.app(["compile", *map(str, words)], standalone_mode=False)
    return capsys.readouterr().out.splitlines()


def test_a_text_is_compiled_in_the_server_once(
    server: StubConnectorServer, text: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run finds it there, and a backend of the same anchor does too."""
    command = (text, "--server", server.url, "--tokenizer", folder)
    (first,), (second,) = run(capsys, *command), run(capsys, *command)
    (name,) = server.artifacts
    assert first.startswith(f"{text}: {name}, ")
    assert second.endswith("there already")
    with VLLMBackend(server.url, tokenizer=folder) as backend:
        assert backend.find_artifact("default", server.artifacts[name]) == name
        assert backend.find_artifact("another", server.artifacts[name]) is None


@pytest.mark.parametrize(
    "option", [("--out", "somewhere"), ("--dtype", "float32"), ("--device", "cpu"), ("--force",)]
)
def test_what_the_server_decides_is_refused(
    server: StubConnectorServer, text: Path, folder: Path, option: tuple[str, ...]
) -> None:
    """By the option's name, and nothing is compiled."""
    words = ["compile", str(text), "--server", server.url, "--tokenizer", str(folder), *option]
    with pytest.raises(typer.BadParameter, match="the server decides that"):
        main.app(words, standalone_mode=False)
    assert server.artifacts == {}


def test_a_server_without_the_connector_is_named(text: Path, folder: Path) -> None:
    """With what to start it with."""
    words = ["compile", str(text), "--tokenizer", str(folder), "--server"]
    with StubServer() as plain, pytest.raises(CapabilityError, match="vllm-agentkv"):
        main.app([*words, plain.url], standalone_mode=False)
