"""Which KV a request goes on from, and which is forgotten first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentkv.backends.kvcache import ModelKV
from agentkv.backends.kvstore import Entry, KVStore
from agentkv.tokens import TokenIds
from tests.tiny_models import tiny_model

CONFIG = tiny_model("llama").config
TOKEN_BYTES = 4 * 2 * 2 * 8 * 4
"""Layers, keys and values, heads, dim, bytes of a float32."""
BLOCK_BYTES = 64 * TOKEN_BYTES
"""Room is taken for 64 tokens at a time."""


def new_store(limit: int = 100 * BLOCK_BYTES) -> KVStore[ModelKV]:
    return KVStore(limit, new=lambda: ModelKV(CONFIG), copy=ModelKV.copy)


@torch.inference_mode()
def fill(entry: Entry[ModelKV], ids: TokenIds) -> None:
    """Write states that tell their token and position, as a model would."""
    for token in ids.tolist(len(entry.ids)):
        states = torch.full((1, 2, 1, 8), float(token * 1000 + entry.state.length))
        for layer in range(4):
            entry.state.cache.update(states, -states, layer)
        entry.state.length += 1
    entry.ids = ids


def use(store: KVStore[ModelKV], conversation: str, ids: list[int], salt: str = "salt") -> int:
    """Run one request through the store and return how many tokens it reused."""
    entry = store.open(salt, conversation, TokenIds(ids))
    reused = len(entry.ids)
    fill(entry, TokenIds(ids))
    store.close(entry)
    return reused


def tokens_in(entry: Entry[ModelKV]) -> list[int]:
    keys = entry.state.cache.layers[3].keys[0, 0, :, 0]
    return [int(value) // 1000 for value in keys]


def test_a_growing_conversation_reuses_all_it_has_without_a_copy() -> None:
    """The buffer of the first call is the buffer of the second."""
    store = new_store()
    use(store, "a", [1, 2, 3])
    entry = store.open("salt", "a", TokenIds([1, 2, 3]))
    before = entry.state.cache.layers[0].keys.data_ptr()
    store.close(entry)
    assert use(store, "a", [1, 2, 3, 4, 5]) == 2
    entry = store.open("salt", "a", TokenIds([1, 2, 3, 4, 5, 6]))
    assert len(entry.ids) == 5
    assert entry.state.cache.layers[0].keys.data_ptr() == before
    assert tokens_in(entry) == [1, 2, 3, 4, 5]


def test_a_diverging_conversation_is_cut_where_it_diverges() -> None:
    """Only the shared beginning stays."""
    store = new_store()
    use(store, "a", [1, 2, 3, 4, 5])
    entry = store.open("salt", "a", TokenIds([1, 2, 9, 4, 5]))
    assert tokens_in(entry) == [1, 2]
    assert entry.state.length == 2


def test_the_last_token_is_always_left_to_compute() -> None:
    """The same prompt again reuses all but one token."""
    store = new_store()
    use(store, "a", [1, 2, 3, 4])
    assert use(store, "a", [1, 2, 3, 4]) == 3


def test_another_conversation_shares_by_copy() -> None:
    """Both go their own ways from the shared beginning."""
    store = new_store()
    use(store, "a", [1, 2, 3, 4])
    assert use(store, "b", [1, 2, 7, 8]) == 2
    first = store.open("salt", "a", TokenIds([1, 2, 3, 4, 5]))
    second = store.open("salt", "b", TokenIds([1, 2, 7, 8, 9]))
    assert tokens_in(first) == [1, 2, 3, 4]
    assert tokens_in(second) == [1, 2, 7, 8]


def test_another_conversation_is_used_only_if_it_shares_more() -> None:
    """At a tie the conversation's own entry is kept, in place."""
    store = new_store()
    use(store, "a", [1, 2, 3, 4])
    use(store, "b", [1, 2, 3, 9])
    own = store.open("salt", "b", TokenIds([1, 2, 3, 9]))
    pointer = own.state.cache.layers[0].keys.data_ptr()
    store.close(own)
    tie = store.open("salt", "b", TokenIds([1, 2, 3, 5, 6]))
    assert tie.state.cache.layers[0].keys.data_ptr() == pointer
    store.close(tie)
    assert use(store, "b", [1, 2, 3, 4, 5]) == 4


def test_salts_never_share() -> None:
    """The same conversation and tokens under another salt start from nothing."""
    store = new_store()
    use(store, "a", [1, 2, 3, 4], salt="one")
    assert use(store, "a", [1, 2, 3, 4], salt="two") == 0
    assert use(store, "b", [1, 2, 3, 4], salt="two") == 3


def test_the_least_recently_used_conversation_goes_first() -> None:
    """Using a conversation again saves it."""
    store = new_store(limit=3 * BLOCK_BYTES)
    for name, token in (("a", 1), ("b", 2), ("c", 3)):
        use(store, name, [token, 50, 51])
    assert store.stored_bytes == 3 * BLOCK_BYTES
    use(store, "a", [1, 50, 51, 52])
    use(store, "d", [4, 50])
    assert store.conversations == ("c", "a", "d")


def test_an_entry_in_use_is_not_evicted() -> None:
    """Two open entries may exceed the bound together; closing makes room again."""
    store = new_store(limit=BLOCK_BYTES)
    first = store.open("salt", "a", TokenIds([1, 2]))
    fill(first, TokenIds([1, 2]))
    second = store.open("salt", "b", TokenIds([3, 4]))
    fill(second, TokenIds([3, 4]))
    store.measure(first)
    store.measure(second)
    assert set(store.conversations) == {"a", "b"}
    store.close(first)
    assert store.conversations == ("b",)


def test_an_entry_above_the_bound_is_dropped_and_the_others_stay() -> None:
    """The bound is not kept at the others' cost once the large one is done."""
    store = new_store(limit=2 * BLOCK_BYTES)
    use(store, "small", [1, 2])
    use(store, "large", list(range(100, 300)))
    assert store.conversations == ("small",)
    assert store.stored_bytes == BLOCK_BYTES


def test_a_second_call_on_a_busy_conversation_gets_its_own_kv() -> None:
    """It copies what it shares, and what it computes is not kept."""
    store = new_store()
    use(store, "a", [1, 2, 3])
    first = store.open("salt", "a", TokenIds([1, 2, 3, 4]))
    second = store.open("salt", "a", TokenIds([1, 2, 9]))
    assert second is not first
    assert tokens_in(first) == [1, 2, 3]
    assert tokens_in(second) == [1, 2]
    fill(second, TokenIds([1, 2, 9]))
    fill(first, TokenIds([1, 2, 3, 4]))
    store.close(second)
    store.close(first)
    assert use(store, "a", [1, 2, 3, 4, 5]) == 4


@pytest.mark.parametrize("forget", ["release", "reset", "drop"])
def test_what_is_forgotten_while_in_use_does_not_come_back(forget: str) -> None:
    """Closing an entry that was released, reset or dropped keeps nothing."""
    store = new_store()
    entry = store.open("salt", "a", TokenIds([1, 2, 3]))
    fill(entry, TokenIds([1, 2, 3]))
    if forget == "release":
        store.release("a")
    elif forget == "reset":
        store.reset()
    else:
        store.drop(entry)
    store.close(entry)
    assert store.conversations == ()
    assert store.stored_bytes == 0


def test_release_forgets_a_conversation_under_every_salt() -> None:
    """Others stay, and an unknown conversation is ignored."""
    store = new_store()
    use(store, "a", [1, 2], salt="one")
    use(store, "a", [1, 2], salt="two")
    use(store, "b", [1, 2], salt="one")
    store.release("a")
    store.release("unknown")
    assert store.conversations == ("b",)


def test_bytes_are_those_of_the_tensors() -> None:
    """The count is the sum over real storages, room included."""
    store = new_store()
    use(store, "a", list(range(1, 70)))
    entry = store.open("salt", "a", TokenIds([1, 2]))
    storages = {
        states.untyped_storage().data_ptr(): states.untyped_storage().nbytes()
        for layer in entry.state.cache.layers
        for states in (layer.keys, layer.values)
    }
    assert store.stored_bytes == sum(storages.values()) >= 69 * TOKEN_BYTES


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"), st.sampled_from("xyz"), st.lists(st.integers(1, 2), min_size=1, max_size=6)
        ),
        max_size=12,
    )
)
def test_every_reuse_is_the_longest_prefix_of_its_salt(calls: list[tuple[str, str, list[int]]]) -> None:
    """Against a model in plain Python: the reused KV is that of the tokens, and none longer was there."""
    store = new_store()
    kept: dict[tuple[str, str], list[int]] = {}
    for salt, conversation, ids in calls:
        entry = store.open(salt, conversation, TokenIds(ids))
        best = max(
            (
                sum(1 for n in range(1, len(ids)) if other[:n] == ids[:n] and len(other) >= n)
                for (other_salt, _), other in kept.items()
                if other_salt == salt
            ),
            default=0,
        )
        assert len(entry.ids) == entry.state.length == best
        assert best == 0 or tokens_in(entry) == ids[:best]
        fill(entry, TokenIds(ids))
        store.close(entry)
        kept[salt, conversation] = ids
