"""Loading a model says what is wrong in our words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentkv.backends.loading import load_model
from agentkv.errors import CapabilityError, ConfigurationError, ModelNotFoundError


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    """The message says where nothing was found, and how to get a model."""
    with pytest.raises(ModelNotFoundError, match="agentkv model pull") as caught:
        load_model(str(tmp_path), "cpu", None, {})
    assert str(tmp_path) in str(caught.value)


def test_a_known_model_that_was_not_pulled_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A known name is looked up in the local store, never on a hub."""
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="agentkv model pull smollm2-135m"):
        load_model("smollm2-135m", "cpu", None, {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.optional("runs only where there is no CUDA device")
def test_a_device_that_is_not_there_is_said(tmp_path: Path) -> None:
    """No assertion of torch's leaves the constructor."""
    with pytest.raises(CapabilityError, match="cuda:1"):
        load_model(str(tmp_path), "cuda:1", None, {})


def test_options_that_the_model_does_not_take_are_named(small_model_dir: Path) -> None:
    """An unknown option is ours to report."""
    with pytest.raises(ConfigurationError, match="no_such_option"):
        load_model(str(small_model_dir), "cpu", None, {"no_such_option": 1})
