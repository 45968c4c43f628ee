"""Editing a prompt in place: what stands behind the edit is moved, not computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentkv.backends import Request, SamplingOptions, TransformersBackend, complete
from agentkv.errors import BackendError, CapabilityError, ConfigurationError, ContextWindowError
from agentkv.salts import Namespace, salt
from agentkv.tokens import TokenIds
from tests.splice_parts import (
    APPROXIMATE,
    EXACT,
    KEY,
    assert_same_kv,
    call,
    kv_of,
    request,
    tiny_backend,
    tokens,
)
from tests.tiny_models import CUT_ANYWHERE, WHOLE_ONLY, WINDOW

PROMPT = tokens(90, seed=1)
START, STOP = 20, 28
REPLACEMENTS = {
    "longer": tokens(17, seed=2),
    "shorter": tokens(3, seed=3),
    "equal": tokens(8, seed=4),
    "none": [],
}


def edited(new: list[int]) -> list[int]:
    return [*PROMPT[:START], *new, *PROMPT[STOP:]]


@pytest.fixture(params=list(REPLACEMENTS))
def new(request: pytest.FixtureRequest) -> list[int]:
    """What replaces the tokens."""
    return REPLACEMENTS[request.param]


def test_what_stands_before_is_cached_and_what_stands_behind_is_moved(new: list[int]) -> None:
    """Only the new tokens and the last one pass the model."""
    backend = tiny_backend("llama")
    call(backend, request(PROMPT))
    usage = backend.edit(request(PROMPT), start=START, stop=STOP, ids=new)
    assert usage.prompt_tokens == len(edited(new))
    assert usage.cached_tokens == START
    assert usage.spliced_tokens == len(PROMPT) - STOP - 1
    assert usage.computed_tokens == len(new) + 1


def test_the_next_call_goes_on_from_the_edited_prompt(new: list[int]) -> None:
    """All of it is cached, and a turn more only appends."""
    backend = tiny_backend("llama")
    call(backend, request(PROMPT))
    backend.edit(request(PROMPT), start=START, stop=STOP, ids=new)
    first = call(backend, request(edited(new)))
    assert first.usage.cached_tokens == len(edited(new)) - 1
    held = kv_of(backend, request([*edited(new), *(first.ids or ())]))
    grown = [*edited(new), *(first.ids or ()), *tokens(9, seed=5)]
    second = call(backend, request(grown))
    assert second.usage.cached_tokens == len(edited(new)) + len(first.ids or ()) - 1
    assert_same_kv(kv_of(backend, request(grown)).slice(0, len(held)), held, tolerance=0)


@pytest.mark.parametrize("name", CUT_ANYWHERE)
def test_first_layer_keys_are_those_of_a_full_computation(name: str, new: list[int]) -> None:
    """They depend on token and position alone; deeper layers still hold what they noted of the old tokens."""
    backend, plain = tiny_backend(name), tiny_backend(name)
    call(backend, request(PROMPT))
    backend.edit(request(PROMPT), start=START, stop=STOP, ids=new)
    call(plain, request(edited(new)))
    got, expected = kv_of(backend, request(edited(new))), kv_of(plain, request(edited(new)))
    torch.testing.assert_close(got.layers[0].keys, expected.layers[0].keys, rtol=1e-4, atol=1e-4)
    before, behind = START + len(new), len(edited(new)) - 1
    assert_same_kv(got.slice(0, before), expected.slice(0, before))
    assert not torch.allclose(
        got.slice(before, behind).layers[-1].values,
        expected.slice(before, behind).layers[-1].values,
        rtol=1e-2,
    )


def test_an_edit_is_exact_where_windows_hide_it() -> None:
    """What stands further behind than all layers' windows reach was never changed by the old tokens."""
    new, far = REPLACEMENTS["longer"], START + 17 + 4 * WINDOW
    prompt = [*PROMPT, *tokens(90, seed=7)]
    changed = [*prompt[:START], *new, *prompt[STOP:]]
    backend, plain = tiny_backend("mistral_sliding"), tiny_backend("mistral_sliding")
    call(backend, request(prompt))
    backend.edit(request(prompt), start=START, stop=STOP, ids=new)
    got, expected = call(backend, request(changed)), call(plain, request(changed))
    assert got.ids == expected.ids
    end = len(changed) - 1
    assert_same_kv(
        kv_of(backend, request(changed)).slice(far, end), kv_of(plain, request(changed)).slice(far, end)
    )


def test_an_edit_to_the_same_tokens_changes_nothing() -> None:
    """The KV is that of the prompt as it was."""
    backend, plain = tiny_backend("gemma3_sliding"), tiny_backend("gemma3_sliding")
    call(backend, request(PROMPT))
    backend.edit(request(PROMPT), start=START, stop=STOP, ids=PROMPT[START:STOP])
    assert call(backend, request(PROMPT)).ids == call(plain, request(PROMPT)).ids
    assert_same_kv(kv_of(backend, request(PROMPT)), kv_of(plain, request(PROMPT)))


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (85, 90), (90, 90), (40, 40), (89, 90)])
def test_an_edit_may_stand_anywhere(start: int, stop: int) -> None:
    """At the beginning, at the end, or between two tokens; counts add up, and the next call goes on."""
    backend, new = tiny_backend("llama"), tokens(4, seed=8)
    call(backend, request(PROMPT))
    usage = backend.edit(request(PROMPT), start=start, stop=stop, ids=new)
    changed = [*PROMPT[:start], *new, *PROMPT[stop:]]
    assert usage.cached_tokens + usage.spliced_tokens + usage.computed_tokens == len(changed)
    assert call(backend, request(changed)).usage.cached_tokens == len(changed) - 1


def test_other_conversations_keep_their_kv() -> None:
    """One that has read the same prompt under the same salt goes on with it."""
    backend = tiny_backend("llama")
    call(backend, request(PROMPT))
    other = call(backend, request(PROMPT, conversation="b"))
    backend.edit(request(PROMPT), start=START, stop=STOP, ids=[])
    again = call(backend, request(PROMPT, conversation="b"))
    assert again.usage.cached_tokens == len(PROMPT) - 1
    assert again.ids == other.ids


# What is refused


def test_an_exact_namespace_is_refused() -> None:
    """What was noted of the old tokens would stand in the exact cache."""
    backend = tiny_backend("llama")
    call(backend, request(PROMPT, salt=EXACT))
    with pytest.raises(CapabilityError, match="exact"):
        backend.edit(request(PROMPT, salt=EXACT), start=START, stop=STOP, ids=[])
    assert call(backend, request(PROMPT, salt=EXACT)).usage.cached_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("name", WHOLE_ONLY)
def test_a_model_whose_kv_cannot_be_moved_is_refused(name: str) -> None:
    """By the name of its type."""
    backend = tiny_backend(name)
    call(backend, request(PROMPT))
    with pytest.raises(CapabilityError, match=backend.model.config.model_type):
        backend.edit(request(PROMPT), start=START, stop=STOP, ids=[])


@pytest.mark.parametrize("told", [[], PROMPT[: STOP - 2]])
def test_an_edit_without_kv_is_refused(told: list[int]) -> None:
    """Of a conversation that was never run, or not so far; the message says how far."""
    backend = tiny_backend("llama")
    if told:
        backend.prefill(request(told))
    with pytest.raises(BackendError, match=f"first {len(told)} of its 90 .* does not cover"):
        backend.edit(request(PROMPT), start=START, stop=STOP, ids=[])


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (7, 5), (80, 91)])
def test_a_range_that_the_prompt_does_not_have_is_refused(start: int, stop: int) -> None:
    """Before its beginning, upside down, or beyond its end; nothing is changed."""
    backend = tiny_backend("llama")
    call(backend, request(PROMPT))
    with pytest.raises(ConfigurationError, match="90 tokens"):
        backend.edit(request(PROMPT), start=start, stop=stop, ids=[])
    assert call(backend, request(PROMPT)).usage.cached_tokens == len(PROMPT) - 1


def test_an_edited_prompt_that_the_model_cannot_read_is_refused() -> None:
    """Too long, unknown ids, or nothing left."""
    backend = tiny_backend("llama")
    call(backend, request(PROMPT))
    with pytest.raises(ContextWindowError, match="512"):
        backend.edit(request(PROMPT), start=0, stop=0, ids=[65] * 500)
    with pytest.raises(ConfigurationError, match="vocabulary"):
        backend.edit(request(PROMPT), start=0, stop=0, ids=[9999])
    with pytest.raises(ConfigurationError, match="empty"):
        backend.edit(request(PROMPT), start=0, stop=90, ids=[])
    assert call(backend, request(PROMPT)).usage.cached_tokens == len(PROMPT) - 1


def test_a_model_that_fails_drops_the_kv() -> None:
    """The edited prompt is then computed whole."""
    backend = tiny_backend("llama")
    call(backend, request(PROMPT))
    backend.edit(request(PROMPT), start=START, stop=START, ids=[])

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    hook = backend.model.register_forward_pre_hook(fail)
    with pytest.raises(BackendError, match="out of memory"):
        backend.edit(request(PROMPT), start=START, stop=STOP, ids=[65])
    hook.remove()
    assert backend.stored_conversations == ()
    assert call(backend, request(edited([65]))).usage.cached_tokens == 0


# The small model

RECORD = (
    "Order record. Customer: {name}. The order was placed on Monday and paid by card. It holds two lamps and "
    "a carpet. It leaves the warehouse in Aarhus on Thursday and arrives on Saturday. The carrier is "
    "Nordic Freight. The parcel weighs nine kilograms. It is insured up to two hundred euros."
)
QUESTIONS = (
    "Which carrier takes the parcel?",
    "On which day does the parcel arrive?",
    "How much does the parcel weigh?",
    "In which city is the warehouse?",
    "How was the order paid?",
)


@pytest.mark.parametrize(("old", "new"), [("Bo", "Maximiliane Featherstonehaugh"), ("Maximiliane", "Bo")])
def test_the_small_model_answers_alike_behind_an_edit(
    old: str, new: str, small_backend_float32: TransformersBackend
) -> None:
    """A name of one token for another of many, and back: answers begin as those of a full computation."""
    backend = small_backend_float32
    tokenizer = backend.tokenizer
    agreed = 0
    for number, question in enumerate(QUESTIONS):

        def ids_of(name: str, question: str = question) -> list[int]:
            text = tokenizer.render(
                [
                    {"role": "system", "content": RECORD.format(name=name)},
                    {"role": "user", "content": question},
                ],
                add_generation_prompt=True,
            )
            return tokenizer.encode(text)

        before, after = ids_of(old), ids_of(new)
        start = TokenIds(before).common_prefix(TokenIds(after))
        same = TokenIds(before[::-1]).common_prefix(TokenIds(after[::-1]))
        options = SamplingOptions(max_tokens=1)
        asked = Request(TokenIds(before), f"edited {number}", APPROXIMATE, options)
        backend.prefill(asked)
        usage = backend.edit(
            asked, start=start, stop=len(before) - same, ids=after[start : len(after) - same]
        )
        assert usage.spliced_tokens == same - 1
        edited = complete(backend, Request(TokenIds(after), f"edited {number}", APPROXIMATE, options))
        assert edited.usage.cached_tokens == len(after) - 1
        other = salt(KEY, tenant="full", namespace=Namespace.EXACT)
        full = complete(backend, Request(TokenIds(after), "full", other, options))
        agreed += edited.ids == full.ids
        backend.reset()
    assert agreed == len(QUESTIONS)


@pytest.fixture(scope="module")
def small_backend_float32(small_model_dir: Path) -> TransformersBackend:
    """The small model in the dtype that is compared to the token."""
    return TransformersBackend.from_pretrained(small_model_dir, dtype=torch.float32)
