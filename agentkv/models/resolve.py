"""From what a user wrote to a model that can be loaded."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from agentkv.errors import ModelNotFoundError
from agentkv.models.store import ModelStore

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


class ModelSource(StrEnum):
    """Where a resolved model is."""

    FOLDER = "folder"
    """A folder that the user named."""
    STORE = "store"
    """A known model that was pulled."""
    HUB = "hub"
    """An id on the Hugging Face hub; nothing was looked up."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that transformers can load; ``str()`` of it gives the location."""

    location: str
    """Path of a folder, or a hub id: what ``from_pretrained`` takes."""
    source: ModelSource

    def __str__(self) -> str:
        return self.location


def resolve_in(store: ModelStore, model: str | os.PathLike[str]) -> ResolvedModel:
    """Resolve `model` with the known models of `store`; see `agentkv.models.resolve`."""
    text = os.fspath(model)
    folder = Path(text).expanduser()
    if text and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFoundError(
                f"folder {str(folder)!r} is not a model: it has no config.json; pass a folder that "
                f"save_pretrained wrote"
            )
        return ResolvedModel(str(folder), ModelSource.FOLDER)
    if isinstance(model, str):
        if model in store.known:
            return ResolvedModel(str(store.look(model).require()), ModelSource.STORE)
        if _HUB_ID.fullmatch(model):
            return ResolvedModel(model, ModelSource.HUB)
    names = ", ".join(sorted(store.known))
    raise ModelNotFoundError(
        f"no model {text!r}: it is neither an existing folder, nor a hub id of the form 'organisation/name', "
        f"nor a known model ({names})"
    )
