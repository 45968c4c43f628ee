"""``agentkv compile`` on a tiny model that was saved to a folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig

from agentkv import AgentKVContext, Policy, Skill
from agentkv.backends import TransformersBackend
from agentkv.cli import main
from agentkv.errors import ArtifactSignatureError, CapabilityError, ConfigurationError, ContextWindowError
from agentkv.kv.store import ArtifactStore
from tests.templates import FAMILIES, transformers_tokenizer

RETURNS = "A parcel may be returned within 14 days, free of charge if it was damaged.\nRefunds take 5 days.\n"
CUSTOMS = "A parcel from abroad is held until the customer pays the duty, which the clerk names on request."
LINE = re.compile(r"(?P<file>.+): (?P<name>[0-9a-f]{64}), (?P<tokens>\d+) tokens, \S+ MB, (?P<took>.+)")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = transformers_tokenizer(FAMILIES["chatml"])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    """Two texts in files."""
    files = [tmp_path / "returns.md", tmp_path / "customs [1].md"]
    for file, text in zip(files, (RETURNS, CUSTOMS), strict=True):
        file.write_text(text, "utf-8")
    return files


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> list[str]:
    """Run the command in this process and return the lines that it printed."""
    main.app(["compile", *map(str, words)], standalone_mode=False)
    return capsys.readouterr().out.splitlines()


def parsed(lines: list[str]) -> list[re.Match[str]]:
    matches = [LINE.fullmatch(line) for line in lines]
    assert None not in matches, lines
    return [match for match in matches if match is not None]


def test_each_text_gets_an_artifact_and_a_line(
    model: Path, texts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the artifact's name, its tokens and how long it took."""
    out = tmp_path / "store"
    lines = parsed(run(capsys, *texts, "--model", model, "--out", out))
    store = ArtifactStore(out)
    assert [line["file"] for line in lines] == [str(file) for file in texts]
    assert sorted(line["name"] for line in lines) == list(store.names())
    for line in lines:
        header = store.header(line["name"])
        assert len(header.ids) == int(line["tokens"])
        assert header.tenant == "default"
        assert line["took"].endswith(" s")


def test_a_context_finds_what_was_compiled(
    model: Path, texts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A skill with the text of the file, white space at its ends and all."""
    out = tmp_path / "store"
    run(capsys, *texts, "--model", model, "--out", out, "--tenant", "acme")
    backend = TransformersBackend.from_pretrained(model, artifacts=out, device="cpu")
    skill = Skill("returns", texts[0].read_text("utf-8"))
    with AgentKVContext(backend, [Policy("Be brief."), skill], tenant="acme") as talk:
        assert talk.ask("Hello", max_tokens=2).report.spliced_tokens > 0
    with AgentKVContext(backend, [Policy("Be brief."), skill]) as talk:
        assert talk.ask("Hello", max_tokens=2).report.spliced_tokens == 0


def test_the_default_folder_is_in_the_cache(
    model: Path,
    texts: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Beside the pulled models."""
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path / "cache"))
    (line,) = parsed(run(capsys, texts[0], "--model", model))
    assert ArtifactStore(tmp_path / "cache" / "artifacts").names() == (line["name"],)


def test_a_run_that_stopped_goes_on_where_it_was(
    model: Path, texts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text that is too long ends the first run; what came before it is not compiled again."""
    out, long = tmp_path / "store", tmp_path / "long.md"
    long.write_text(RETURNS * 500, "utf-8")
    with pytest.raises(ContextWindowError, match=r"long\.md: .* window is 4096"):
        run(capsys, texts[0], long, texts[1], "--model", model, "--out", out)
    parsed(capsys.readouterr().out.splitlines())
    assert len(ArtifactStore(out).names()) == 1
    assert not list(out.glob(".*"))
    lines = parsed(run(capsys, *texts, "--model", model, "--out", out))
    assert lines[0]["took"] == "there already"
    assert lines[1]["took"] != "there already"


def test_force_compiles_again(
    model: Path, texts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The artifact has the same name."""
    out = tmp_path / "store"
    (first,) = parsed(run(capsys, texts[0], "--model", model, "--out", out))
    (again,) = parsed(run(capsys, texts[0], "--model", model, "--out", out, "--force"))
    assert again["name"] == first["name"]
    assert again["took"].endswith(" s")


def test_dtype_and_anchor_are_part_of_the_name(
    model: Path, texts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What another model or another prompt would not load has another name."""
    anchor = tmp_path / "anchor.txt"
    anchor.write_text("You are a clerk.")
    common = [texts[0], "--model", model, "--out", tmp_path / "store", "--dtype"]
    runs = [[*common, "float32"], [*common, "bfloat16"], [*common, "float32", "--anchor", anchor]]
    names = [parsed(run(capsys, *words))[0]["name"] for words in runs]
    assert len(set(names)) == 3
    headers = [ArtifactStore(tmp_path / "store").header(name) for name in names]
    assert [header.identity.dtype for header in headers] == ["float32", "bfloat16", "float32"]
    assert len(headers[2].anchor) < len(headers[0].anchor)


def test_a_key_signs(
    model: Path, texts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """White space around the key in its file does not count; another key is refused."""
    key, out = tmp_path / "key", tmp_path / "store"
    key.write_bytes(b"a secret of many bytes\n")
    (line,) = parsed(run(capsys, texts[0], "--model", model, "--out", out, "--sign-key-file", key))
    assert ArtifactStore(out, key=b"a secret of many bytes").verify(line["name"])
    with pytest.raises(ArtifactSignatureError):
        ArtifactStore(out, key=b"another of many bytes").verify(line["name"])


def test_artifacts_are_listed(
    model: Path, texts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With tenant, model and tokens; one that is damaged says so."""
    out = tmp_path / "store"
    assert run(capsys, "--list", "--out", out) == [f"{out} holds no artifacts"]
    one, other = parsed(run(capsys, *texts, "--model", model, "--out", out, "--tenant", "acme"))
    (out / f"{other['name']}.safetensors").write_bytes(b"cut")
    shown = "\n".join(run(capsys, "--list", "--out", out))
    assert re.search(f"{one['name']} +acme +LlamaForCausalLM +float32 +{one['tokens']} ", shown)
    assert re.search(f"{other['name']} .*cannot be read", shown)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"text\0text", "null bytes"),
        (b"\x89PNG\r\n\x1a\n", "not a text in UTF-8"),
    ],
)
def test_a_file_that_is_no_text_is_refused_before_the_model_is_loaded(
    content: bytes | None, message: str, texts: list[Path], tmp_path: Path
) -> None:
    """Missing, empty or binary; nothing is written."""
    file, out = tmp_path / "wrong", tmp_path / "store"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"wrong .*{message}"):
        main.app(
            ["compile", str(texts[0]), str(file), "--model", "no such model", "--out", str(out)],
            standalone_mode=False,
        )
    assert not out.exists()


def test_what_is_lacking_is_asked_for(texts: list[Path]) -> None:
    """The texts, the model, and a dtype that there is."""
    for words, message in (
        (["--model", "m"], "texts"),
        ([str(texts[0])], "name the model"),
        ([str(texts[0]), "--model", str(texts[0].parent), "--dtype", "int8"], "int8"),
    ):
        with pytest.raises(typer.BadParameter, match=message):
            main.app(["compile", *words], standalone_mode=False)


def test_an_error_is_one_line(texts: list[Path], tmp_path: Path) -> None:
    """As every error of the command."""
    done = subprocess.run(
        [sys.executable, "-m", "agentkv", "compile", str(tmp_path / "none"), "--model", "m"],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"AGENTKV_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "No such file" in done.stderr


def test_a_model_that_cannot_be_spliced_is_named(
    model: Path, texts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its positions depend on the length of the prompt."""
    other = tmp_path / "dynamic"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = LlamaConfig.from_pretrained(model)
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(other)
    with pytest.raises(CapabilityError, match="llama"):
        main.app(["compile", str(texts[0]), "--model", str(other)], standalone_mode=False)
