"""What users may write where a model is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentkv import models
from agentkv.errors import ModelNotFoundError
from agentkv.models import ModelSource


def test_resolve_takes_a_folder_that_has_a_config(tmp_path: Path) -> None:
    """A folder given as text or as a path is found; its location is its path."""
    (tmp_path / "config.json").touch()
    for given in (tmp_path, str(tmp_path)):
        found = models.resolve(given)
        assert found.source is ModelSource.FOLDER
        assert str(found) == found.location == str(tmp_path)


def test_resolve_says_what_a_folder_lacks(tmp_path: Path) -> None:
    """A folder without config.json is no model."""
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        models.resolve(tmp_path)


def test_resolve_returns_a_hub_id_as_it_is() -> None:
    """Nothing is looked up for an id of the form organisation/name."""
    found = models.resolve("Qwen/Qwen3-0.6B")
    assert (found.location, found.source) == ("Qwen/Qwen3-0.6B", ModelSource.HUB)


@pytest.mark.parametrize("given", ["", "smolm", "./gone/model", "/gone", "a/b/c", "../x", Path("gone/model")])
def test_resolve_refuses_anything_else_and_lists_known_names(given: str | Path) -> None:
    """What is neither folder, hub id nor known name is an error; a path object is never a hub id."""
    with pytest.raises(ModelNotFoundError, match="smollm2-135m"):
        models.resolve(given)


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AGENTKV_CACHE comes before the user's cache folder; an empty one does not count."""
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path))
    assert models.default_store().root == tmp_path / "models"
    with pytest.raises(ModelNotFoundError, match="agentkv model pull smollm2-135m"):
        models.resolve("smollm2-135m")
    monkeypatch.setenv("AGENTKV_CACHE", "")
    assert models.cache_folder().name == "agentkv"
