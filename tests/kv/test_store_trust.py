"""A store believes no name, header or number that it has not checked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from agentkv.errors import (
    ArtifactDamagedError,
    ArtifactError,
    ArtifactMismatchError,
    ArtifactMissingError,
    ArtifactSignatureError,
    ConfigurationError,
)
from agentkv.kv.refusals import Refusal, refusal_of
from agentkv.kv.store import ArtifactStore
from tests.kv.artifacts import ASKED, IDS, MODEL, header_of, same, span_of


@pytest.mark.parametrize(
    "name", ["", "../etc/passwd", "a" * 63, "a" * 65, "A" * 64, "g" * 64, "a" * 64 + "\n", "a" * 60 + "/../"]
)
@pytest.mark.parametrize("call", ["path", "header", "verify", "nbytes", "delete"])
def test_a_name_that_is_no_digest_never_becomes_a_path(store: ArtifactStore, name: str, call: str) -> None:
    """Names come from requests."""
    with pytest.raises(ArtifactMissingError, match="64 hex digits"):
        getattr(store, call)(name)


@pytest.mark.parametrize(
    ("changed", "refusal"),
    [
        ({"ids": IDS[:-1]}, Refusal.TOKENS),
        ({"ids": (*IDS[:-1], 9)}, Refusal.TOKENS),
        ({"tenant": "other"}, Refusal.TENANT),
        ({"identity": MODEL.model_copy(update={"weights": "0" * 64})}, Refusal.FINGERPRINT),
        ({"identity": MODEL.model_copy(update={"tokenizer": "0" * 64})}, Refusal.FINGERPRINT),
        ({"identity": MODEL.model_copy(update={"adapter": "0" * 64})}, Refusal.FINGERPRINT),
        ({"identity": MODEL.model_copy(update={"dtype": "bfloat16"})}, Refusal.FINGERPRINT),
        ({"identity": MODEL.model_copy(update={"rope": {"theta": 5e5}})}, Refusal.ROPE),
        ({"identity": MODEL.model_copy(update={"rope": {}, "weights": "0" * 64})}, Refusal.FINGERPRINT),
    ],
)
@pytest.mark.parametrize("verified", [False, True])
def test_an_artifact_of_something_else_is_refused(
    store: ArtifactStore, name: str, changed: dict[str, Any], refusal: Refusal, verified: bool
) -> None:
    """K44: other tokens, another tenant or another model, also where its content was checked before."""
    for load in (store.load, lambda name, **asked: store.load_heads(name, 0, 2, **asked)):
        with pytest.raises(ArtifactMismatchError) as caught:
            load(name, **{**ASKED, **changed}, verified=verified)
        assert refusal_of(caught.value) is refusal


def test_a_message_does_not_name_another_tenant(store: ArtifactStore, name: str) -> None:
    """Who guesses a name learns nothing of its owner."""
    with pytest.raises(ArtifactMismatchError) as caught:
        store.load(name, **{**ASKED, "tenant": "other"})
    assert "acme" not in str(caught.value)


def test_every_cut_of_a_file_is_noticed(store: ArtifactStore, name: str) -> None:
    """At any length, from the header alone."""
    path = store.path(name)
    whole = path.read_bytes()
    for length in (0, 7, 8, 9, 300, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ArtifactDamagedError, match="cannot be read"):
            store.header(name)


def test_every_damaged_byte_is_noticed(store: ArtifactStore, name: str) -> None:
    """Wherever it is: in the lengths, the header, the signature, the keys or the values."""
    path = store.path(name)
    whole = bytearray(path.read_bytes())
    for at in [*range(0, len(whole), 13), len(whole) - 1]:
        whole[at] ^= 1
        path.write_bytes(whole)
        whole[at] ^= 1
        with pytest.raises(ArtifactError):
            store.load(name, **ASKED)


@pytest.mark.parametrize("last", [True, False])
def test_altered_numbers_are_damage(store: ArtifactStore, name: str, last: bool) -> None:
    """The first and the last number are covered; the header alone is still sound."""
    path = store.path(name)
    data = bytearray(path.read_bytes())
    data[-1 if last else 8 + int.from_bytes(data[:8], "little")] ^= 1
    path.write_bytes(data)
    assert store.header(name)
    for read in (
        lambda: store.verify(name),
        lambda: store.load(name, **ASKED),
        lambda: store.load_heads(name, 1, 2, **ASKED),
    ):
        with pytest.raises(ArtifactDamagedError, match="were altered"):
            read()


def test_content_that_was_verified_is_not_read_again(store: ArtifactStore, name: str) -> None:
    """The caller answers for it: the altered number of another rank's heads is not even read."""
    path = store.path(name)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    mine = store.load_heads(name, 0, 2, **ASKED, verified=True)
    assert same(mine, span_of().heads(0, 2))
    assert not same(store.load(name, **ASKED, verified=True), span_of())


def test_an_artifact_under_another_name_is_refused(store: ArtifactStore, name: str) -> None:
    """A copy does not become the artifact of other tokens."""
    shutil.copy(store.path(name), store.path("0" * 64))
    with pytest.raises(ArtifactDamagedError, match=f"holds artifact {name}"):
        store.header("0" * 64)


def test_another_safetensors_file_is_no_artifact(store: ArtifactStore, name: str) -> None:
    """A model's weights, say, which have no header of ours."""
    save_file({"keys.0": torch.zeros(2)}, store.path(name), {"format": "pt"})
    with pytest.raises(ArtifactDamagedError, match="no agentkv header"):
        store.header(name)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"version": 2}, "version"),
        ({"format": "other"}, "format"),
        ({"unknown": 1}, "unknown"),
        ({"ids": []}, "ids"),
        ({"ids": [-1]}, "ids.0"),
        ({"ids": [2**32]}, "ids.0"),
        ({"tenant": ""}, "tenant"),
    ],
)
def test_a_header_of_another_format_is_refused(tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    """An unsigned store takes nobody's word for what a version means."""
    header = {**header_of(span_of()).model_dump(mode="json"), **changed}
    save_file(
        {"keys.0": torch.zeros(2)}, tmp_path / f"{'0' * 64}.safetensors", {"agentkv": json.dumps(header)}
    )
    with pytest.raises(ArtifactDamagedError, match=why):
        ArtifactStore(tmp_path).header("0" * 64)


@pytest.mark.parametrize(
    "changed",
    [{"layers": 3}, {"layers": 1}, {"kv_heads": 2}, {"key_dim": 4}, {"value_dim": 8}, {"dtype": "bfloat16"}],
)
def test_tensors_that_are_not_those_of_the_header_are_refused(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    """Whoever wrote it: a loader can rely on shapes and dtype."""
    span = span_of()
    header = header_of(span, identity=MODEL.model_copy(update=changed))
    tensors = {
        f"{part}.{i}": getattr(x, part) for i, x in enumerate(span.layers) for part in ("keys", "values")
    }
    path = tmp_path / f"{header.name}.safetensors"
    save_file(tensors, path, {"agentkv": header.model_dump_json()})
    with pytest.raises(ArtifactDamagedError, match="compile it again"):
        ArtifactStore(tmp_path).header(header.name)


def test_a_missing_signature_is_refused(store: ArtifactStore) -> None:
    """Who writes to the folder does not decide what the model has read."""
    unsigned = ArtifactStore(store.folder)
    name = unsigned.save(header_of(span_of()), span_of())
    assert unsigned.verify(name)
    with pytest.raises(ArtifactSignatureError, match="not signed with this store's key"):
        store.load(name, **ASKED)


def test_another_keys_signature_is_refused(store: ArtifactStore, name: str) -> None:
    """Also by `header`, before anything of it is believed."""
    with pytest.raises(ArtifactSignatureError):
        ArtifactStore(store.folder, key=bytes(32)).header(name)
    assert ArtifactStore(store.folder).header(name)


def test_a_short_key_is_refused(tmp_path: Path) -> None:
    """The message does not hold it."""
    with pytest.raises(ConfigurationError, match="5 bytes") as caught:
        ArtifactStore(tmp_path, key=b"short")
    assert "short" not in str(caught.value)
