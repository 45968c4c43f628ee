"""A streamed answer is put together from whatever chunks an OpenAI-compatible server sends."""

from __future__ import annotations

from typing import Any

import pytest

from agentkv.backends.answers import AnswerReader
from agentkv.backends.base import Completion, Delta, FinishReason, RawToolCall, Request, Usage
from agentkv.errors import BackendError
from agentkv.reasoning import ReasoningSplitter
from agentkv.tokens import TokenIds

REQUEST = Request(TokenIds(range(10)), "c", "s")
USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 3,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 8},
}


def text(words: str, ids: list[int] | None = None, **more: Any) -> dict[str, Any]:
    """A chunk of a text completion."""
    return {"choices": [{"index": 0, "text": words, "token_ids": ids, "finish_reason": None, **more}]}


def chat(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A chunk of a chat completion."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None, **more}]}


def call(**piece: Any) -> dict[str, Any]:
    """A chunk with a piece of a tool call."""
    return chat({"tool_calls": [piece]})


def usage(**changes: Any) -> dict[str, Any]:
    """The chunk behind the answer."""
    return {"choices": [], "usage": USAGE | changes}


def read(
    *chunks: dict[str, Any], splitter: ReasoningSplitter | None = None
) -> tuple[list[Delta], Completion]:
    """Return the deltas and the whole answer."""
    reader = AnswerReader(REQUEST, splitter)
    deltas = [delta for chunk in chunks if (delta := reader.feed(chunk)) is not None]
    rest = reader.rest()
    return deltas + ([rest] if rest is not None else []), reader.completion()


def test_a_text_completion_is_read_with_its_ids() -> None:
    """Deltas add up to the answer; usage is what the server counted."""
    deltas, whole = read(text("Hel", [1]), text("lo", [2, 3], finish_reason="stop"), usage())
    assert deltas == [Delta("Hel", (1,)), Delta("lo", (2, 3))]
    assert (whole.text, whole.ids, whole.finish_reason) == ("Hello", (1, 2, 3), FinishReason.STOP)
    assert whole.usage == Usage(10, 8, 2, generated_tokens=3)
    assert whole.counted
    assert whole.tool_calls is None


def test_a_chat_completion_is_read() -> None:
    """The first chunk names the role only, the last the reason only."""
    deltas, whole = read(
        chat({"role": "assistant", "content": ""}),
        chat({"content": "Hel"}),
        chat({"content": "lo"}),
        chat({}, finish_reason="length"),
        usage(),
    )
    assert [delta.text for delta in deltas] == ["Hel", "lo"]
    assert (whole.text, whole.ids, whole.finish_reason) == ("Hello", None, FinishReason.LENGTH)


def test_ids_without_text_are_handed_on() -> None:
    """An incomplete character, or the end of the turn."""
    deltas, whole = read(text("", [7]), text("é", [8]), text("", [2], finish_reason="stop"))
    assert deltas == [Delta("", (7,)), Delta("é", (8,)), Delta("", (2,))]
    assert (whole.text, whole.ids) == ("é", (7, 8, 2))


def test_a_server_that_names_no_ids_leaves_them_unknown_and_one_that_names_none_has_none() -> None:
    """Unknown is not the same as empty."""
    assert read(text("Hello", None, finish_reason="stop"))[1].ids is None
    assert read(text("", [], finish_reason="stop"))[1].ids == ()


def test_a_tool_call_in_pieces_is_put_together() -> None:
    """By its index; the arguments stay as they were written."""
    deltas, whole = read(
        call(index=0, id="a", type="function", function={"name": "lookup", "arguments": ""}),
        call(index=0, function={"arguments": '{"id":'}),
        call(index=1, id="b", function={"name": "cancel", "arguments": "{}"}),
        call(index=0, function={"arguments": " 7}"}),
        chat({}, finish_reason="tool_calls"),
    )
    assert whole.tool_calls == (RawToolCall("a", "lookup", '{"id": 7}'), RawToolCall("b", "cancel", "{}"))
    assert whole.finish_reason is FinishReason.TOOL_CALLS
    assert len(deltas) == 4
    assert not whole.text


@pytest.mark.parametrize("place", [{}, {"index": None}])
def test_whole_tool_calls_need_no_index(place: dict[str, Any]) -> None:
    """Some servers send each call in one piece, and number none."""
    _, whole = read(
        call(**place, id="a", function={"name": "lookup", "arguments": "{}"}),
        call(**place, id="b", function={"name": "lookup", "arguments": None}),
        chat({}, finish_reason="stop"),
    )
    assert whole.tool_calls == (RawToolCall("a", "lookup", "{}"), RawToolCall("b", "lookup", ""))
    assert whole.finish_reason is FinishReason.TOOL_CALLS


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_kept_apart_by_both_its_names(name: str) -> None:
    """Servers do not agree on it."""
    deltas, whole = read(
        chat({name: "Hm"}), chat({name: ", yes"}), chat({"content": "Yes"}, finish_reason="stop")
    )
    assert deltas == [Delta("", (), "Hm"), Delta("", (), ", yes"), Delta("Yes", ())]
    assert (whole.text, whole.reasoning) == ("Yes", "Hm, yes")


def test_reasoning_in_the_text_is_taken_out() -> None:
    """Where the server leaves it, a tag that is cut by chunks too; `raw` keeps what came."""
    reader = AnswerReader(REQUEST, ReasoningSplitter(inside=False))
    for piece in ("<thi", "nk>Hm</th", "ink>Yes"):
        reader.feed(text(piece, [1]))
    reader.feed(text("", [2], finish_reason="stop"))
    reader.rest()
    whole = reader.completion()
    assert (whole.text.strip(), whole.reasoning.strip()) == ("Yes", "Hm")
    assert reader.raw == "<think>Hm</think>Yes"


def test_text_that_only_began_like_a_tag_comes_with_the_rest() -> None:
    """Nothing is lost at the end."""
    deltas, whole = read(text("a <thi", [1], finish_reason="stop"), splitter=ReasoningSplitter(inside=False))
    assert "".join(delta.text for delta in deltas) == whole.text == "a <thi"


def test_without_usage_tokens_are_counted_from_what_is_known() -> None:
    """The prompt's own ids and the generated ones; cached tokens are not known."""
    _, whole = read(text("Hello", [1, 2], finish_reason="stop"))
    assert whole.usage == Usage(10, 0, 10, generated_tokens=2)
    assert not whole.counted


@pytest.mark.parametrize(
    "details",
    [None, {}, {"cached_tokens": None}, {"audio_tokens": 4}],
    ids=["none", "empty", "null", "other"],
)
def test_without_details_cached_tokens_are_not_counted(details: Any) -> None:
    """Zero would be a claim."""
    _, whole = read(text("a", [1], finish_reason="stop"), usage(prompt_tokens_details=details))
    assert not whole.counted
    assert (whole.usage.cached_tokens, whole.usage.computed_tokens) == (0, 10)


def test_no_cached_tokens_are_a_count() -> None:
    """A server that says zero was asked and looked."""
    _, whole = read(text("a", [1], finish_reason="stop"), usage(prompt_tokens_details={"cached_tokens": 0}))
    assert whole.counted


def test_usage_in_every_chunk_counts_once() -> None:
    """The last one holds."""
    first = text("a", [1]) | {"usage": USAGE | {"completion_tokens": 1}}
    last = text("b", [2], finish_reason="stop") | {"usage": USAGE | {"completion_tokens": 2}}
    assert read(first, last)[1].usage.generated_tokens == 2


def test_more_cached_than_prompt_is_cut() -> None:
    """Usage adds up: some servers count what a connector loaded twice."""
    _, whole = read(text("a", [1], finish_reason="stop"), usage(prompt_tokens_details={"cached_tokens": 99}))
    assert whole.usage == Usage(10, 10, 0, generated_tokens=3)


@pytest.mark.parametrize("chunks", [[], [text("Hello", [1]), usage()]], ids=["empty", "amid"])
def test_an_answer_without_a_reason_to_end_is_an_error(chunks: list[dict[str, Any]]) -> None:
    """It may be cut off: nothing is recorded."""
    with pytest.raises(BackendError, match="without a finish reason"):
        read(*chunks)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_server_gave_up_is_an_error(reason: str) -> None:
    """Whatever came before it."""
    with pytest.raises(BackendError, match=reason):
        read(text("Hello", [1]), text("", [], finish_reason=reason))


@pytest.mark.parametrize(
    ("reason", "meant"),
    [
        ("stop", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("function_call", FinishReason.TOOL_CALLS),
        ("eos", FinishReason.STOP),
    ],
)
def test_reasons_are_read_in_the_servers_words(reason: str, meant: FinishReason) -> None:
    """One that nobody knows is an end like any other."""
    assert read(text("a", [1], finish_reason=reason))[1].finish_reason is meant


def test_chunks_without_choices_add_nothing() -> None:
    """Such as signs of life."""
    deltas, whole = read(
        {}, {"choices": []}, {"choices": None}, text("a", [1]), text("", None, finish_reason="stop")
    )
    assert deltas == [Delta("a", (1,))]
    assert whole.text == "a"


def test_other_choices_are_not_ours() -> None:
    """Only one was asked for; the first one's pieces are found behind others too."""
    other = {"index": 1, "text": "no", "token_ids": [9], "finish_reason": "abort"}
    mixed = {"choices": [other, *text("yes", [1], finish_reason="stop")["choices"]]}
    deltas, whole = read({"choices": [other]}, mixed)
    assert deltas == [Delta("yes", (1,))]
    assert (whole.text, whole.ids) == ("yes", (1,))


@pytest.mark.parametrize(("reason", "stopped"), [("\n\n", True), (2, False), (None, False)])
def test_a_stop_string_is_told_from_a_stop_token(reason: Any, stopped: bool) -> None:
    """vLLM names the string, or the token's id."""
    reader = AnswerReader(REQUEST)
    reader.feed(text("a", [1], finish_reason="stop", stop_reason=reason))
    assert reader.stopped_by_string is stopped


def test_prompt_ids_are_those_that_the_server_read() -> None:
    """Servers that render messages say what came of them."""
    first = chat({"role": "assistant"}) | {"prompt_token_ids": [5, 6, 7]}
    _, whole = read(first, chat({"content": "a"}, finish_reason="stop"))
    assert whole.prompt_ids == TokenIds([5, 6, 7])
    assert whole.usage.prompt_tokens == 3


@pytest.mark.parametrize(
    "chunk",
    [
        {"choices": "Hello"},
        {"choices": [7]},
        {"choices": [{"delta": "Hello"}]},
        {"choices": [{"delta": {"tool_calls": ["lookup"]}}]},
        {"choices": [{"delta": {"content": ["Hello"]}}]},
        {"choices": [{"text": "a", "token_ids": 7}]},
    ],
)
def test_a_chunk_of_another_form_is_an_error_of_ours(chunk: dict[str, Any]) -> None:
    """And no accident of Python's."""
    with pytest.raises(BackendError, match="form"):
        read(chunk, text("", [], finish_reason="stop"))
