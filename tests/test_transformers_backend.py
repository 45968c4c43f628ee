"""Sampling, stopping, streaming and failing on the embedded backend."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import agentkv.backends
from agentkv.backends import (
    Backend,
    Completion,
    Delta,
    Event,
    FinishReason,
    Request,
    SamplingOptions,
    TransformersBackend,
    complete,
)
from agentkv.errors import BackendError, ConfigurationError, ContextWindowError, ModelNotFoundError
from agentkv.tokens import TokenIds
from tests.tiny_models import END, VOCABULARY, ByteTokenizer, Scripted, tiny_model

PROMPT = list(b"A prompt of some length, so that there is something to keep.")


def request(ids: list[int] = PROMPT, conversation: str = "a", **options: Any) -> Request:
    return Request(TokenIds(ids), conversation, "salt", SamplingOptions(**{"max_tokens": 40, **options}))


def saying(text: str | bytes, **options: Any) -> tuple[TransformersBackend, Scripted]:
    """A backend whose model answers `text` to `PROMPT` and then ends its turn."""
    script = text.encode() if isinstance(text, str) else text
    model = Scripted(script)
    model.prompt_length = len(PROMPT)
    return TransformersBackend(model, ByteTokenizer(), **options), model


def deltas(events: list[Event]) -> list[Delta]:
    return [event for event in events if isinstance(event, Delta)]


@pytest.fixture
def llama() -> TransformersBackend:
    """A real tiny model that ends only by length."""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    tokenizer = ByteTokenizer()
    tokenizer.eos_ids = frozenset()
    return TransformersBackend(model, tokenizer)


def test_it_is_a_backend(llama: TransformersBackend) -> None:
    """The seam's protocol is met, and the capabilities come from the configuration."""
    assert isinstance(llama, Backend)
    assert llama.capabilities.context_window == 512
    assert llama.capabilities.block_size == 1
    assert llama.capabilities.salts


def test_the_package_names_what_it_exports() -> None:
    """Every exported name exists, and an unknown one is an AttributeError."""
    for name in agentkv.backends.__all__:
        assert getattr(agentkv.backends, name) is not None
    with pytest.raises(AttributeError, match="NoSuchBackend"):
        _ = agentkv.backends.NoSuchBackend


# Streaming and text


def test_deltas_add_up_to_the_completion() -> None:
    """Texts and ids, the end-of-turn token included."""
    backend, _ = saying("Grüße, 世界 👋!")
    *events, end = list(backend.stream(request()))
    assert isinstance(end, Completion)
    assert end.text == "".join(delta.text for delta in deltas(events)) == "Grüße, 世界 👋!"
    assert end.ids == tuple(token for delta in deltas(events) for token in delta.ids)
    assert end.ids == (*"Grüße, 世界 👋!".encode(), END)
    assert end.finish_reason is FinishReason.STOP
    assert 0 < end.ttft_s <= end.duration_s


def test_a_character_of_several_tokens_is_held_back_until_it_is_whole() -> None:
    """No delta carries a replacement character."""
    backend, _ = saying("a👋b")
    texts = [delta.text for delta in deltas(list(backend.stream(request())))]
    assert texts == ["a", "", "", "", "👋", "b", ""]


def test_a_character_cut_off_by_the_limit_is_shown_as_the_tokenizer_shows_it() -> None:
    """Nothing is lost: the text is the decoding of the ids."""
    backend, _ = saying("a👋b")
    end = complete(backend, request(max_tokens=3))
    assert end.finish_reason is FinishReason.LENGTH
    assert end.text == ByteTokenizer().decode(end.ids or ())


@pytest.mark.parametrize(
    ("said", "stop", "text"),
    [
        ("one two three", (" two",), "one"),
        ("one two three", ("two", "one t"), ""),
        ("ababac", ("abac",), "ab"),
        ("one", ("one more",), "one"),
        ("naïve 世界", ("界",), "naïve 世"),
        ("stop", ("stop",), ""),
    ],
)
def test_an_answer_ends_before_a_stop_string(said: str, stop: tuple[str, ...], text: str) -> None:
    """Though each token is one byte of it; no delta ever shows part of one."""
    backend, _ = saying(said)
    *events, end = list(backend.stream(request(stop=stop)))
    assert isinstance(end, Completion)
    assert end.text == text == "".join(delta.text for delta in deltas(events))
    assert end.finish_reason is FinishReason.STOP


def test_the_tokens_of_a_stop_string_are_among_the_ids() -> None:
    """They were generated, so the next prompt goes on from them; later ones were not generated."""
    backend, model = saying("one two three")
    end = complete(backend, request(stop=(" two",)))
    assert end.ids == tuple(b"one two")
    assert model.passes == [len(PROMPT)] + [1] * (len("one two") - 1)


def test_an_end_token_of_the_generation_configuration_counts_too() -> None:
    """Beside those of the tokenizer."""
    model = Scripted([*b"hi", 260, *b"there"])
    model.prompt_length = len(PROMPT)
    model.generation_config.eos_token_id = [259, 260]
    end = complete(TransformersBackend(model, ByteTokenizer()), request())
    assert end.text == "hi"
    assert end.ids == (*b"hi", 260)


# Sampling


def test_the_same_seed_gives_the_same_answer(llama: TransformersBackend) -> None:
    """With a hot cache as with a cold one; another seed gives another answer."""
    first = complete(llama, request(temperature=1.0, seed=7))
    again = complete(llama, request(temperature=1.0, seed=7))
    other = complete(llama, request(temperature=1.0, seed=8))
    assert again.usage.cached_tokens == len(PROMPT) - 1
    assert first.ids == again.ids
    assert first.ids != other.ids


def test_the_repetition_penalty_counts_the_prompt_and_the_answer(llama: TransformersBackend) -> None:
    """One that forbids repetition gives tokens that are new, each once; without it some come again."""
    free = complete(llama, request()).ids or ()
    assert len(set(free) - set(PROMPT)) < 40
    new = complete(llama, request(repetition_penalty=1e6)).ids or ()
    assert len(set(new) - set(PROMPT)) == 40


def test_the_global_random_state_is_left_alone(llama: TransformersBackend) -> None:
    """Sampling draws from a generator of its own."""
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    complete(llama, request(temperature=1.0))
    assert torch.equal(torch.rand(1), expected)


# What is refused


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("stop", ("",)),
        ("stop", "END"),
    ],
)
def test_an_option_out_of_range_is_refused_before_any_work(option: str, value: Any) -> None:
    """The message names the option; the model is not called."""
    backend, model = saying("hi")
    with pytest.raises(ConfigurationError, match=option):
        backend.stream(request(**{option: value}))
    assert model.passes == []


@pytest.mark.parametrize(
    ("ids", "message"), [([], "empty"), ([5, VOCABULARY], str(VOCABULARY))], ids=["empty", "unknown id"]
)
def test_a_prompt_the_model_cannot_read_is_refused_before_any_work(ids: list[int], message: str) -> None:
    """An empty one, and ids beyond the vocabulary."""
    backend, model = saying("hi")
    with pytest.raises(ConfigurationError, match=message):
        backend.stream(request(ids))
    with pytest.raises(ConfigurationError, match=message):
        backend.prefill(request(ids))
    assert model.passes == []


def test_prompt_and_answer_have_to_fit_the_context_window() -> None:
    """512 tokens fit exactly; one more is refused with the numbers."""
    backend, model = saying("hi")
    assert complete(backend, request([5] * 472, max_tokens=40)).usage.prompt_tokens == 472
    model.passes.clear()
    with pytest.raises(
        ContextWindowError, match=r"473 prompt tokens .* 513, .* 512: shorten the prompt by 1 "
    ):
        backend.stream(request([5] * 473, max_tokens=40))
    assert model.passes == []


@pytest.mark.parametrize("options", [{"prefill_chunk": 0}, {"memory_limit_bytes": -1}])
def test_a_backend_option_out_of_range_is_refused(options: dict[str, Any]) -> None:
    """When the backend is made."""
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        TransformersBackend(tiny_model("llama"), ByteTokenizer(), **options)


def test_a_folder_without_a_model_is_not_found(tmp_path: Path) -> None:
    """The message names the folder."""
    with pytest.raises(ModelNotFoundError, match=str(tmp_path)):
        TransformersBackend.from_pretrained(tmp_path)


# Times


class Clock:
    """Stands still until it is told that time passes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("agentkv.backends.transformers.perf_counter", made)
    return made


def test_times_leave_out_what_the_consumer_takes_between_deltas(clock: Clock) -> None:
    """Each pass through the model takes a second; the consumer starts late and takes long for each delta."""
    backend, model = saying("hello", prefill_chunk=25)
    model.register_forward_hook(lambda *_: setattr(clock, "now", clock.now + 1))
    stream = backend.stream(request())
    clock.now += 1000
    events = []
    for event in stream:
        events.append(event)
        clock.now += 100
    assert len(deltas(events)) == 6
    assert model.passes == [25, 25, 10, 1, 1, 1, 1, 1]
    assert isinstance(events[-1], Completion)
    assert (events[-1].ttft_s, events[-1].duration_s) == (3, 8)


# The cost of a long history


def test_a_grown_prompt_is_read_from_its_new_tokens_only(
    monkeypatch: pytest.MonkeyPatch, llama: TransformersBackend
) -> None:
    """Neither checking nor feeding nor sampling lists tokens that the conversation has KV for."""
    first = complete(llama, request())
    copied: list[int] = []
    tolist = TokenIds.tolist

    def counted(ids: TokenIds, start: int = 0, stop: int | None = None) -> list[int]:
        made = tolist(ids, start, stop)
        copied.append(len(made))
        return made

    def iterated(ids: TokenIds) -> Iterator[int]:
        raise AssertionError("the whole prompt was walked through")

    monkeypatch.setattr(TokenIds, "tolist", counted)
    monkeypatch.setattr(TokenIds, "__iter__", iterated)
    answer = first.ids or ()
    again = complete(llama, request([*PROMPT, *answer, *b"more"], max_tokens=2))
    assert copied == [again.usage.computed_tokens] == [len(b"more") + 1]


# Prefill


def test_the_prompt_is_prefilled_in_chunks_and_progress_is_told() -> None:
    """Only what is not cached is counted."""
    calls: list[tuple[int, int]] = []
    backend, model = saying("", prefill_chunk=25, progress=lambda done, total: calls.append((done, total)))
    complete(backend, request())
    assert model.passes == [25, 25, 10]
    assert calls == [(25, 60), (50, 60), (60, 60)]
    calls.clear()
    complete(backend, request([*PROMPT, *b"more"]))
    assert calls == [(4, 4)]


def test_prefill_alone_makes_the_next_call_hot(llama: TransformersBackend) -> None:
    """No token is generated, and only the last prompt token is computed again."""
    usage = llama.prefill(request())
    assert (usage.cached_tokens, usage.computed_tokens, usage.generated_tokens) == (0, len(PROMPT), 0)
    assert complete(llama, request()).usage.computed_tokens == 1
    assert complete(llama, request([*PROMPT, 1, 2], conversation="b")).usage.cached_tokens == len(PROMPT)


def test_prefilling_stopped_by_progress_keeps_what_was_computed() -> None:
    """The callback's own error comes through."""

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt(f"{done} of {total}")

    backend, model = saying("hi", prefill_chunk=25, progress=stop)
    with pytest.raises(KeyboardInterrupt, match="25 of 60"):
        complete(backend, request())
    with pytest.raises(KeyboardInterrupt, match="25 of 35"):
        complete(backend, request())
    assert model.passes == [25, 25]


# Stopping, failing, forgetting


def test_a_stream_closed_early_stops_the_model_and_keeps_its_kv() -> None:
    """The next call goes on from every token that passed through the model."""
    backend, model = saying("a long answer")
    stream = backend.stream(request())
    said = [next(stream) for _ in range(4)]
    assert isinstance(stream, Iterator)
    stream.close()  # type: ignore[attr-defined]
    assert model.passes == [len(PROMPT), 1, 1, 1]
    told = [token for delta in deltas(said) for token in delta.ids]
    after = complete(backend, request([*PROMPT, *told, *b" and"]))
    assert after.usage.cached_tokens == len(PROMPT) + 3


@pytest.mark.parametrize("fail_at", [0, 1, 4], ids=["first chunk", "second chunk", "decoding"])
def test_a_failure_in_the_model_drops_the_conversation_and_nothing_else(fail_at: int) -> None:
    """It surfaces as a BackendError with its cause, and the same call then succeeds."""
    backend, model = saying("hello", prefill_chunk=30)
    backend.prefill(request(list(b"other"), conversation="b"))
    model.passes.clear()
    model.fail_at = fail_at
    with pytest.raises(BackendError, match="out of memory") as caught:
        complete(backend, request())
    assert caught.value.__cause__ is model.failure
    assert backend.stored_conversations == ("b",)
    model.fail_at = None
    again = complete(backend, request())
    assert again.text == "hello"
    assert again.usage.cached_tokens == 0


def test_an_interrupt_inside_the_model_comes_through_and_drops_the_kv() -> None:
    """Half-written KV is not kept."""
    backend, model = saying("hello")
    model.fail_at, model.failure = 2, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        complete(backend, request())
    assert backend.stored_conversations == ()


def test_memory_stays_within_the_bound(llama: TransformersBackend) -> None:
    """The least recently used conversation goes; one above the bound runs and is dropped."""
    complete(llama, request(conversation="a"))
    one = llama.stored_bytes
    assert one > 0
    model = llama.model
    backend = TransformersBackend(model, llama.tokenizer, memory_limit_bytes=2 * one)
    for conversation in ("a", "b", "a", "c"):
        complete(backend, request([*conversation.encode(), *PROMPT[1:]], conversation=conversation))
        assert backend.stored_bytes <= 2 * one
    assert backend.stored_conversations == ("a", "c")
    tight = TransformersBackend(model, llama.tokenizer, memory_limit_bytes=one - 1)
    assert len(complete(tight, request()).ids or ()) == 40
    assert tight.stored_conversations == ()
    assert tight.stored_bytes == 0


def test_release_and_reset_forget(llama: TransformersBackend) -> None:
    """The next call computes everything."""
    for conversation in ("a", "b"):
        complete(llama, request([*conversation.encode(), *PROMPT], conversation=conversation))
    llama.release("a")
    llama.release("unknown")
    assert list(llama.stored_conversations) == ["b"]
    llama.reset()
    assert list(llama.stored_conversations) == []
    assert complete(llama, request()).usage.cached_tokens == 0


def test_calls_from_several_threads_give_the_answers_of_single_calls(llama: TransformersBackend) -> None:
    """Conversations that share a beginning run at the same time."""
    prompts = {name: [*PROMPT, *name.encode(), *PROMPT[:9]] for name in ("one", "two", "three", "four")}
    expected = {name: complete(llama, request(ids)).ids for name, ids in prompts.items()}
    llama.reset()
    got: dict[str, Any] = {}

    def run(name: str) -> None:
        got[name] = complete(llama, request(prompts[name], conversation=name)).ids

    threads = [threading.Thread(target=run, args=(name,)) for name in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == expected
    assert set(llama.stored_conversations) == set(prompts)


# The small model


def test_the_small_model_answers(small_backend: TransformersBackend) -> None:
    """A real chat model, a real tokenizer: text, end of turn, and the KV for the next turn."""
    tokenizer = small_backend.tokenizer
    text = tokenizer.render(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    ids = TokenIds(tokenizer.encode(text))
    call = Request(ids, "small", "salt", SamplingOptions(max_tokens=30))
    *events, end = list(small_backend.stream(call))
    assert isinstance(end, Completion)
    assert "Paris" in end.text
    assert end.text == "".join(delta.text for delta in deltas(events)) == tokenizer.decode(end.ids or ())
    assert end.finish_reason is FinishReason.STOP
    assert (end.ids or ())[-1] in tokenizer.eos_ids
    grown = replace(call, ids=ids.extend(end.ids or ()).extend(tokenizer.encode("\n")))
    assert complete(small_backend, grown).usage.cached_tokens == len(ids) + len(end.ids or ()) - 1
    small_backend.release("small")


def test_the_small_model_stops_at_a_stop_string(small_backend: TransformersBackend) -> None:
    """Across the model's own tokens."""
    tokenizer = small_backend.tokenizer
    text = tokenizer.render(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    ids = TokenIds(tokenizer.encode(text))
    whole = complete(small_backend, Request(ids, "small", "s", SamplingOptions(max_tokens=30)))
    stop = "of Fra"
    assert stop in whole.text
    cut = complete(small_backend, Request(ids, "small", "s", SamplingOptions(max_tokens=30, stop=(stop,))))
    assert cut.text == whole.text[: whole.text.index(stop)]
    small_backend.release("small")
