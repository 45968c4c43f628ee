"""An artifact is written whole or not at all, and read back as it was."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from agentkv.errors import (
    ArtifactMissingError,
    ConfigurationError,
)
from agentkv.kv.spans import KVSpan, LayerKV
from agentkv.kv.store import ArtifactStore
from tests.kv.artifacts import ASKED, IDS, KEY, MODEL, header_of, same, span_of


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_saved_is_loaded(store: ArtifactStore, dtype: str) -> None:
    """Every bit, the position and the header, whatever the dtype."""
    model = MODEL.model_copy(update={"dtype": dtype})
    span = span_of(dtype=getattr(torch, dtype))
    header = header_of(span, identity=model)
    name = store.save(header, span)
    assert name == header.name
    assert store.header(name) == store.verify(name) == header
    loaded = store.load(name, ids=IDS, identity=model, tenant="acme")
    assert same(loaded, span)
    assert loaded.layers[0].keys.dtype == getattr(torch, dtype)


def test_file_is_safetensors_with_plain_json(store: ArtifactStore, name: str) -> None:
    """Nothing that is executed when it is read: eight bytes of length, JSON, numbers."""
    data = store.path(name).read_bytes()
    size = int.from_bytes(data[:8], "little")
    layout = json.loads(data[8 : 8 + size])
    assert set(layout) == {"__metadata__", "keys.0", "keys.1", "values.0", "values.1"}
    assert json.loads(layout["__metadata__"]["agentkv"])["format"] == "agentkv-artifact"
    assert len(data) - 8 - size == span_of().nbytes


def test_parts_of_larger_tensors_are_saved(store: ArtifactStore) -> None:
    """What was cut from a cache is a view of it."""
    whole = span_of()
    layers = [LayerKV(torch.cat([x.keys] * 2, 1), torch.cat([x.values] * 2, 1)) for x in whole.layers]
    part = KVSpan(tuple(layers), 90).slice(6, 12)
    name = store.save(header_of(part), part)
    assert same(store.load(name, **ASKED), part)


def test_names_sizes_and_deleting(store: ArtifactStore, name: str) -> None:
    """Only artifacts are listed, and one that was deleted is missing."""
    (store.folder / "notes.safetensors").write_bytes(b"")
    (store.folder / f".{name}.0123.tmp").write_bytes(b"")
    assert store.names() == (name,)
    assert store.nbytes(name) == store.path(name).stat().st_size
    span = store.load(name, **ASKED)
    store.delete(name)
    store.delete(name)
    assert store.names() == ()
    assert same(span, span_of())
    with pytest.raises(ArtifactMissingError, match=name):
        store.nbytes(name)


def test_an_empty_store_is_no_error(tmp_path: Path) -> None:
    """Its folder is made at the first artifact."""
    store = ArtifactStore(tmp_path / "none" / "yet")
    assert store.names() == ()
    with pytest.raises(ArtifactMissingError, match="compile the chunk"):
        store.load("0" * 64, **ASKED)
    assert list(tmp_path.iterdir()) == []


def test_the_header_is_read_without_the_tensors(store: ArtifactStore, name: str) -> None:
    """A file whose tensors are not there, only its length, gives its header."""
    path = store.path(name)
    whole = path.read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    with path.open("wb") as file:
        file.write(whole[:size])
        file.truncate(len(whole))
    assert store.header(name).ids == IDS


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("verified", [False, True])
def test_heads_read_are_heads_of_the_whole(
    store: ArtifactStore, name: str, rank: int, verified: bool
) -> None:
    """What a rank reads by itself is what it would have cut from all."""
    part = store.load_heads(name, rank, 4, **ASKED, verified=verified)
    assert same(part, store.load(name, **ASKED).heads(rank, 4))
    assert part.layers[0].keys.shape == (1, 6, 8)


def test_a_rank_that_cannot_be_is_refused(store: ArtifactStore, name: str) -> None:
    """4 heads over 3 ranks."""
    with pytest.raises(ConfigurationError, match="4 KV heads"):
        store.load_heads(name, 0, 3, **ASKED)


@pytest.mark.parametrize(
    "other",
    [
        span_of(1),
        KVSpan(span_of().layers, 95),
        KVSpan(span_of().layers[:1], 96),
        span_of().slice(0, 5),
        span_of().to(torch.float16),
        span_of().heads(0, 2),
    ],
    ids=["numbers", "position", "layers", "tokens", "dtype", "heads"],
)
def test_a_header_of_another_span_is_refused(store: ArtifactStore, other: KVSpan) -> None:
    """Nothing is written then."""
    with pytest.raises(ConfigurationError, match=r"ArtifactHeader\.of"):
        store.save(header_of(span_of()), other)
    assert store.names() == ()


def test_an_artifact_that_is_there_stays(store: ArtifactStore, name: str) -> None:
    """Who computes the same chunk again, a little differently, changes nothing."""
    before = store.path(name).read_bytes()
    other = span_of(1)
    assert store.save(header_of(other), other) == name
    assert store.path(name).read_bytes() == before


def test_a_damaged_artifact_is_replaced(store: ArtifactStore, name: str) -> None:
    """So it does not stay damaged for ever; the same for one of another key."""
    store.path(name).write_bytes(b"damaged")
    assert store.save(header_of(span_of(1)), span_of(1)) == name
    assert same(store.load(name, **ASKED), span_of(1))
    other = ArtifactStore(store.folder, key=bytes(32))
    other.save(header_of(span_of(2)), span_of(2))
    assert same(other.load(name, **ASKED), span_of(2))


def test_a_write_that_fails_leaves_nothing(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, for one."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agentkv.kv.store.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        store.save(header_of(span_of()), span_of())
    assert list(store.folder.iterdir()) == []


def test_a_folder_without_links_takes_artifacts(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on some network file systems."""

    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("agentkv.kv.store.os.link", unsupported)
    name = store.save(header_of(span_of()), span_of())
    assert same(store.load(name, **ASKED), span_of())
    assert [path.name for path in store.folder.iterdir()] == [f"{name}.safetensors"]


def test_concurrent_writers_leave_one_whole_artifact(tmp_path: Path) -> None:
    """Eight write the same chunk at once, each its own numbers: all then read those of one."""
    gate = threading.Barrier(8)

    def write(seed: int) -> tuple[str, KVSpan]:
        store, span = ArtifactStore(tmp_path, key=KEY), span_of_each[seed]
        header = header_of(span)
        gate.wait()
        name = store.save(header, span)
        return name, store.load(name, **ASKED)

    # Random numbers come from one generator, which threads would share.
    span_of_each = [span_of(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(write, range(8)))
    store = ArtifactStore(tmp_path, key=KEY)
    (name,) = store.names()
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.safetensors"]
    stored = store.load(name, **ASKED)
    assert all(theirs == name and same(loaded, stored) for theirs, loaded in found)
    assert sum(same(stored, span) for span in span_of_each) == 1
