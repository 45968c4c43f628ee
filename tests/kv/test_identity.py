"""An artifact's name stands for all that its KV depends on; digests change with what they are of."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from agentkv.errors import ConfigurationError, ModelNotFoundError
from agentkv.kv.identity import ModelIdentity, artifact_name, tokenizer_digest, weights_digest

IDENTITY: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "weights": "a" * 64,
    "tokenizer": "b" * 64,
    "revision": None,
    "layers": 2,
    "kv_heads": 4,
    "key_dim": 8,
    "value_dim": 8,
    "dtype": "float32",
    "rope": {"theta": 10000.0},
    "adapter": "",
}
NAME: dict[str, Any] = {"tenant": "acme", "fingerprint": "f" * 64, "anchor": [7, 8], "ids": [1, 23]}


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("architecture", "MistralForCausalLM"),
        ("weights", "c" * 64),
        ("tokenizer", "a" * 64),
        ("revision", "main"),
        ("layers", 3),
        ("kv_heads", 2),
        ("key_dim", 16),
        ("value_dim", 16),
        ("dtype", "bfloat16"),
        ("rope", {"theta": 500000.0}),
        ("adapter", "d" * 64),
    ],
)
def test_another_model_is_another_name(part: str, other: Any) -> None:
    """K44: weights, tokenizer, dtype, rotary positions and adapter each count."""
    one, two = ModelIdentity(**IDENTITY), ModelIdentity(**{**IDENTITY, part: other})
    assert one.fingerprint != two.fingerprint
    assert artifact_name(**{**NAME, "fingerprint": one.fingerprint}) != artifact_name(
        **{**NAME, "fingerprint": two.fingerprint}
    )


def test_every_part_of_a_model_counts() -> None:
    """No part was left out of the test above."""
    assert set(IDENTITY) == set(ModelIdentity.model_fields)


def test_fingerprint_survives_json_and_the_order_of_keys() -> None:
    """The other side of a connection computes the same."""
    one = ModelIdentity(**{**IDENTITY, "rope": {"a": 1, "b": (2, 3)}})
    other = ModelIdentity(**{**IDENTITY, "rope": {"b": [2, 3], "a": 1}})
    assert one.fingerprint == other.fingerprint
    assert ModelIdentity.model_validate_json(one.model_dump_json()).fingerprint == one.fingerprint


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("tenant", "acme2"),
        ("fingerprint", "e" * 64),
        ("anchor", [7]),
        ("anchor", []),
        ("anchor", [8, 7]),
        ("ids", [12, 3]),
        ("ids", [23, 1]),
        ("ids", [1, 23, 0]),
    ],
)
def test_another_part_of_the_name_is_another_name(part: str, other: Any) -> None:
    """K44: tenant, anchor and ids each count, and ids are not digits put together."""
    assert artifact_name(**NAME) != artifact_name(**{**NAME, part: other})


_TEXT = st.text(st.sampled_from("ab\x00"), min_size=1, max_size=3)
_IDS = st.lists(st.sampled_from([0, 1, 256, 65536]), max_size=3)
_NAMES = st.fixed_dictionaries(
    {"tenant": _TEXT, "fingerprint": _TEXT, "anchor": _IDS, "ids": _IDS.filter(bool)}
)


@given(_NAMES, _NAMES)
def test_names_are_equal_only_for_equal_parts(one: dict[str, Any], other: dict[str, Any]) -> None:
    """No part can be taken for the end of another: each stands behind its tag and length."""
    assert (artifact_name(**one) == artifact_name(**other)) == (one == other)


def test_name_is_sha256_of_tagged_parts() -> None:
    """The encoding is fixed: artifacts of an earlier release are found again."""
    parts = [
        (b"format", b"agentkv-artifact/1"),
        (b"tenant", b"acme"),
        (b"fingerprint", b"f" * 64),
        (b"anchor", b"\x07\x00\x00\x00\x08\x00\x00\x00"),
        (b"ids", b"\x01\x00\x00\x00\x17\x00\x00\x00"),
    ]
    message = b"".join(len(x).to_bytes(8, "big") + x for part in parts for x in part)
    assert artifact_name(**NAME) == hashlib.sha256(message).hexdigest()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"tenant": ""}, "tenant is empty"),
        ({"tenant": "\ud800"}, "lone surrogate"),
        ({"ids": []}, "no tokens"),
        ({"ids": [1, -2]}, "token id -2"),
        ({"anchor": [2**32]}, "token id 4294967296"),
    ],
)
def test_what_cannot_be_named_is_refused(changed: dict[str, Any], why: str) -> None:
    """The message says which value is wrong."""
    with pytest.raises(ConfigurationError, match=why):
        artifact_name(**{**NAME, **changed})


def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"embedding": torch.randn(64, 64), "norm": torch.randn(3), "bias": torch.zeros(0)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder, with weights in one file and a tokenizer."""
    place = tmp_path / "model"
    place.mkdir()
    save_file(_tensors(), place / "model.safetensors", {"format": "pt"})
    (place / "tokenizer.json").write_text("{}")
    return place


def test_weights_digest_is_the_same_for_a_copy(folder: Path, tmp_path: Path) -> None:
    """A server and a client with folders of their own agree."""
    other = shutil.copytree(folder, tmp_path / "copy")
    assert weights_digest(folder) == weights_digest(str(other))


def test_weights_digest_does_not_depend_on_how_files_are_split(folder: Path) -> None:
    """Sharded or not, and whatever the files are called."""
    whole = weights_digest(folder)
    tensors = _tensors()
    (folder / "model.safetensors").unlink()
    save_file({"norm": tensors.pop("norm")}, folder / "model-00001-of-00002.safetensors")
    save_file(tensors, folder / "model-00002-of-00002.safetensors", {"other": "metadata"})
    assert weights_digest(folder) == whole


@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("name", ["embedding", "norm"])
def test_weights_digest_changes_with_a_tensors_first_or_last_number(folder: Path, name: str, at: int) -> None:
    """Training changes every tensor, so a part of each is enough."""
    before, tensors = weights_digest(folder), _tensors()
    tensors[name].view(-1)[at] += 1
    save_file(tensors, folder / "model.safetensors")
    assert weights_digest(folder) != before


def test_weights_digest_changes_with_names_shapes_and_types(folder: Path) -> None:
    """The same bytes under another name, or read as something else, are other weights."""
    tensors = _tensors()
    digests = {weights_digest(folder)}
    for changed in (
        {**tensors, "norm2": tensors["norm"].clone()},
        {"embedding": tensors["norm"], "norm": tensors["embedding"], "bias": tensors["bias"]},
        {**tensors, "embedding": tensors["embedding"].view(32, 128)},
        {**tensors, "embedding": tensors["embedding"].view(torch.int32)},
    ):
        save_file(changed, folder / "model.safetensors")
        digests.add(weights_digest(folder))
    assert len(digests) == 5


def test_weights_digest_needs_readable_weights(folder: Path) -> None:
    """A folder without weights, or with a file that is cut or none at all, has no digest."""
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for part in (b"", b"not a tensor file", whole[:100], whole[:-100], b"\xff" * 8 + whole):
        file.write_bytes(part)
        with pytest.raises(ModelNotFoundError, match="cannot be read as safetensors"):
            weights_digest(folder)
    file.unlink()
    with pytest.raises(ModelNotFoundError, match="holds no"):
        weights_digest(folder)


def test_tokenizer_digest_is_of_the_file_that_is_used(folder: Path) -> None:
    """``tokenizer.json`` before ``tokenizer.model`` before a GGUF file."""
    for name in ("one.gguf", "tokenizer.model", "tokenizer.json"):
        (folder / name).write_text(name)
    for name in ("tokenizer.json", "tokenizer.model", "one.gguf"):
        assert tokenizer_digest(folder) == hashlib.sha256(name.encode()).hexdigest()
        (folder / name).unlink()
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer\.json"):
        tokenizer_digest(folder)
