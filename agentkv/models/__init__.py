"""Local models: known ones are fetched once and kept, others are found by folder or hub id.

Nothing here imports torch or transformers; `pull` runs them in a process of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from agentkv.models.known import KNOWN_MODELS, SMOLLM2_135M, KnownModel
from agentkv.models.progress import SILENT, Progress, Step
from agentkv.models.resolve import ModelSource, ResolvedModel, resolve_in
from agentkv.models.store import ModelState, ModelStore, StoredModel

__all__ = [
    "KNOWN_MODELS",
    "SILENT",
    "SMOLLM2_135M",
    "KnownModel",
    "ModelSource",
    "ModelState",
    "ModelStore",
    "Progress",
    "ResolvedModel",
    "Step",
    "StoredModel",
    "cache_folder",
    "default_store",
    "pull",
    "resolve",
]


def cache_folder() -> Path:
    """Return the folder that agentkv keeps fetched things in.

    It is ``AGENTKV_CACHE`` if that environment variable is set, else the user's cache folder.
    """
    chosen = os.environ.get("AGENTKV_CACHE", "")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(platformdirs.user_cache_dir("agentkv", appauthor=False))


def default_store() -> ModelStore:
    """Return the store under `cache_folder`."""
    return ModelStore(cache_folder() / "models")


def pull(name: str, *, force: bool = False, progress: Progress = SILENT) -> Path:
    """Return the folder of a known model; fetch and convert it the first time.

    See `ModelStore.pull` for the parameters and what it raises.
    """
    return default_store().pull(name, force=force, progress=progress)


def resolve(model: str | os.PathLike[str]) -> ResolvedModel:
    """Find the model that `model` names; nothing is fetched.

    Parameters
    ----------
    model
        An existing folder that holds ``config.json``, the name of a known model that was pulled, or a
        hub id of the form ``organisation/name``, which is returned as it is.

    Raises
    ------
    ModelNotFoundError
        It is none of these; the message says what to do.
    ModelIntegrityError
        The pulled model is damaged.
    """
    return resolve_in(default_store(), model)
