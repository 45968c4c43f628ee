"""Requests to servers, and what is read from their answers, without a server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import httpx2
import pytest

from agentkv import SamplingOptions
from agentkv.backends import (
    Capabilities,
    Completion,
    FinishReason,
    OpenAIBackend,
    PromptForm,
    RawToolCall,
    Request,
    Usage,
    VLLMBackend,
)
from agentkv.backends.answers import AnswerReader
from agentkv.backends.bodies import (
    chat_fields,
    check_extra,
    check_tool_choice,
    read_by_server,
    routing_value,
    tool_choice,
    vllm_sampling,
)
from agentkv.backends.connecting import Connected
from agentkv.backends.parsing import calls_of, chat_request, derender_body, local_grammar, rendered_grammar
from agentkv.backends.serverinfo import cache_info, choose_model, served_models
from agentkv.errors import BackendError, BackendRequestError, CapabilityError, ConfigurationError
from agentkv.miss import Miss
from agentkv.testing import ByteTokenizer
from agentkv.tokens import TokenIds

LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks up.",
        "parameters": {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]},
    },
}
CANCEL = {"type": "function", "function": {"name": "cancel", "description": "", "parameters": {}}}
METRICS = """
process_start_time_seconds 1.5e+09
vllm:cache_config_info{block_size="784",enable_prefix_caching="True",engine="0"} 1.0
vllm:cache_config_info{block_size="784",enable_prefix_caching="True",engine="1"} 1.0
"""


def request(**options: object) -> Request:
    """A request with two tools."""
    return Request(
        TokenIds([1, 2, 3]),
        "conversation é\n",
        "salt",
        SamplingOptions(**options),  # type: ignore[arg-type]
        tools=(LOOKUP, CANCEL),
        rendered_tools=(LOOKUP,),
        messages=({"role": "user", "content": "Hi"},),
    )


@pytest.mark.parametrize(
    "name", ["n", "best_of", "prompt_logprobs", "lora_request", "cache_salt", "messages"]
)
def test_parameters_that_break_a_conversation_are_refused_by_name(name: str) -> None:
    """The error says which, why, and what to do."""
    with pytest.raises(CapabilityError, match=f"'{name}' is refused: "):
        check_extra(SamplingOptions(extra={name: 1}))


def test_parameters_with_an_option_of_their_own_are_sent_back_there() -> None:
    """One value has one place."""
    with pytest.raises(ConfigurationError, match="temperature"):
        check_extra(SamplingOptions(extra={"temperature": 1}))
    check_extra(SamplingOptions(extra={"min_p": 0.1}))


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        (None, None),
        ("auto", None),
        ("none", None),
        ("required", "required"),
        ("lookup", {"type": "function", "function": {"name": "lookup"}}),
    ],
)
def test_none_is_never_sent_as_a_tool_choice(asked: str | None, sent: object) -> None:
    """Servers may take the tools out of the prompt for it."""
    assert tool_choice(asked) == sent
    assert chat_fields(request(tool_choice=asked)).get("tool_choice") == sent


def test_a_choice_of_an_unknown_tool_is_refused() -> None:
    """The error lists the tools that there are."""
    with pytest.raises(ConfigurationError, match="declared tools are: lookup, cancel"):
        check_tool_choice(request(tool_choice="refund"), PromptForm.IDS)
    check_tool_choice(request(tool_choice="required"), PromptForm.MESSAGES)


def test_the_prompt_shows_only_the_tools_that_were_frozen() -> None:
    """A tool that came later is part of the messages, and would otherwise rewrite the prompt."""
    assert chat_fields(request())["tools"] == [LOOKUP]


def test_the_routing_key_fits_a_header_and_tells_nothing() -> None:
    """Whatever a conversation is called, the header holds a digest of fixed form."""
    value = routing_value(request())
    assert len(value) == 32
    assert value.isalnum()
    assert value.isascii()


def test_sampling_is_stated_in_full() -> None:
    """What is left out could be set by the served model's own defaults."""
    body = vllm_sampling(SamplingOptions(seed=0, stop=("x",)))
    assert {"max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed", "stop"} <= set(body)


def test_a_forced_call_is_held_to_the_tools_schema() -> None:
    """Being strict is asked of the server for the grammar only, and only where a call is forced."""
    forced = chat_request("m", request(tool_choice="lookup"))
    assert all(tool["function"]["strict"] for tool in forced["tools"])
    assert all("strict" not in tool["function"] for tool in chat_request("m", request())["tools"])
    assert "tools" not in chat_request("m", request(tool_choice="none"))


def test_without_the_servers_grammar_a_forced_call_is_one_object() -> None:
    """Its name is the tool's and its arguments keep to the schema; any tool's where any is asked for."""
    named = local_grammar(request(tool_choice="lookup"))["json"]
    assert named["properties"]["name"] == {"const": "lookup"}
    assert named["properties"]["arguments"] == LOOKUP["function"]["parameters"]  # type: ignore[index]
    assert len(local_grammar(request(tool_choice="required"))["json"]["anyOf"]) == 2


def test_a_rendered_grammar_keeps_what_is_set() -> None:
    """Empty and private parameters are left out, and an answer without any gives none."""
    found = {"json": None, "structural_tag": "{}", "_backend": None, "disable_any_whitespace": False}
    answer = {"sampling_params": {"structured_outputs": found}}
    assert rendered_grammar(answer) == {"structural_tag": "{}", "disable_any_whitespace": False}
    assert rendered_grammar({"sampling_params": {}}) is None
    assert rendered_grammar([]) is None


def test_arguments_are_kept_as_the_model_wrote_them() -> None:
    """A parser that writes them anew does not change them; where it read something else, it is believed."""
    raw = '<tool_call>{"name": "lookup", "arguments": {"b":1,"a":2}}</tool_call>'
    parsed = {"tool_calls": [{"id": "x", "function": {"name": "lookup", "arguments": '{"b": 1, "a": 2}'}}]}
    assert calls_of(parsed, raw) == (RawToolCall("x", "lookup", '{"b":1,"a":2}'),)
    other = {"tool_calls": [{"id": "x", "function": {"name": "lookup", "arguments": '{"b": 3}'}}]}
    assert calls_of(other, raw) == (RawToolCall("x", "lookup", '{"b": 3}'),)
    assert calls_of({"content": "Hi"}, "Hi") == ()


def test_a_derender_request_shows_the_prompts_end_and_all_generated_ids() -> None:
    """The server's parser sees whether the prompt opened a block, and every id."""
    reader = AnswerReader(request())
    reader.feed({"choices": [{"index": 0, "text": "Hi", "token_ids": [7, 8], "finish_reason": "stop"}]})
    body = derender_body("m", request(), reader)
    assert body["prompt_token_ids"] == [1, 2, 3]
    assert body["generate_response"]["choices"][0]["token_ids"] == [7, 8]
    assert body["generate_response"]["choices"][0]["finish_reason"] == "stop"


def test_metrics_tell_block_size_engines_and_start() -> None:
    """Blocks of hybrid models are large; each engine has a cache of its own (K47)."""
    found = cache_info(METRICS)
    assert (found.block_size, found.enabled, found.started, found.engines) == (784, True, 1.5e9, 2)
    nothing = cache_info("# a router's own metrics\n")
    assert (nothing.block_size, nothing.enabled, nothing.started, nothing.engines) == (None, None, None, 0)


def test_the_model_is_the_one_asked_for_or_the_only_one() -> None:
    """Several models without a choice, and a missing one, are errors that list what is served."""
    rows = [{"id": "base", "max_model_len": 8192, "root": "org/base"}, {"id": "adapter", "root": "lora"}]
    models = served_models({"data": rows})
    assert choose_model(models[:1], None, "http://x").context_window == 8192
    assert choose_model(models, "adapter", "http://x").name == "adapter"
    with pytest.raises(CapabilityError, match=r"base, adapter.*model="):
        choose_model(models, None, "http://x")
    with pytest.raises(CapabilityError, match="no model 'gpt'"):
        choose_model(models, "gpt", "http://x")
    with pytest.raises(BackendError, match="no list of models"):
        served_models({"error": "x"})


@pytest.mark.parametrize("kind", [VLLMBackend, OpenAIBackend])
def test_a_backend_is_made_without_a_connection_and_never_shows_its_key(
    kind: type[VLLMBackend | OpenAIBackend],
) -> None:
    """Wrong arguments are refused at once; nothing is asked before a context is entered."""
    with kind("http://127.0.0.1:9/v1/", api_key="secret") as backend:
        assert backend.url == "http://127.0.0.1:9"
        assert "secret" not in repr(backend)
    with pytest.raises(ConfigurationError, match="block_size=0"):
        kind("http://127.0.0.1:9", block_size=0)
    with pytest.raises(ConfigurationError, match="no address"):
        kind("127.0.0.1:9")


def test_the_form_of_prompts_is_checked() -> None:
    """A word that names no form is an error that lists them."""
    with pytest.raises(ConfigurationError, match="prompts='ids'"):
        VLLMBackend("http://127.0.0.1:9", prompts="ids")  # type: ignore[arg-type]
    assert VLLMBackend("http://127.0.0.1:9", prompts=PromptForm.MESSAGES)


def test_each_conversation_is_told_of_a_restart_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the first one that notices it; what is lost later on the same server was evicted."""
    now = {"started": 1.0}
    with VLLMBackend("http://127.0.0.1:9") as backend:
        found = Connected(
            served_models({"data": [{"id": "m"}]})[0],
            cache_info(METRICS.replace('engine="1"} 1.0', "").replace("1.5e+09", "1.0")),
            Capabilities("vllm", 100, 784),
            ByteTokenizer(),
            scale_out=False,
        )
        monkeypatch.setattr(backend, "_found", found)

        def metrics(path: str) -> httpx2.Response:
            text = f"process_start_time_seconds {now['started']}\n"
            return httpx2.Response(200, text=text + 'vllm:cache_config_info{block_size="784"} 1.0\n')

        monkeypatch.setattr(backend._http, "get", metrics)

        def lost(conversation: str, cached: int) -> Miss | None:
            asked = replace(request(), conversation=conversation, expected_cached_tokens=784)
            usage = Usage(1000, cached, 1000 - cached)
            return backend._explained(
                asked, AnswerReader(asked), Completion("", (), FinishReason.STOP, usage, 0.0, 0.0)
            ).lost

        assert [lost("a", 784), lost("b", 784)] == [None, None]
        now["started"] = 2.0
        assert [lost("a", 0), lost("b", 0)] == [Miss.RESTARTED, Miss.RESTARTED]
        assert [lost("a", 0), lost("b", 784)] == [Miss.EVICTED, None]
        assert lost("never seen here", 0) is None


def test_a_server_that_is_sent_messages_cannot_force_a_tool_of_the_system_text() -> None:
    """It was not sent the tools, so the choice would be dropped without a word."""
    asked = replace(request(tool_choice="lookup"), rendered_tools=())
    check_tool_choice(asked, PromptForm.IDS)
    with pytest.raises(CapabilityError, match="part of the system text"):
        check_tool_choice(asked, PromptForm.MESSAGES)


def test_calls_of_the_system_texts_tools_are_left_to_the_text() -> None:
    """A server reads the calls of tools that it was sent; of others it knows nothing."""
    answer = Completion("Hi", (), FinishReason.STOP, Usage(3, 0, 3), 0.0, 0.0)
    assert read_by_server(request(), answer).tool_calls == ()
    assert read_by_server(replace(request(), rendered_tools=()), answer).tool_calls is None


def test_options_that_are_not_openais_can_be_given_as_extra_where_they_are_not_sent() -> None:
    """What the error of `OpenAIBackend` says to do works; on vLLM they have options of their own."""
    given = SamplingOptions(extra={"top_k": 5})
    check_extra(given, frozenset({"top_k"}))
    with pytest.raises(ConfigurationError, match="top_k"):
        check_extra(given)


def test_a_server_that_refuses_priorities_is_asked_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Priming then waits its turn, and later calls do not try again; other refusals are passed on."""
    done = Completion("", (), FinishReason.LENGTH, Usage(3, 0, 3), 0.0, 0.0)
    with VLLMBackend("http://127.0.0.1:9") as backend:
        tried: list[bool] = []

        def stream(asked: Request) -> Iterator[Completion]:
            tried.append(backend._priorities)
            if backend._priorities:
                raise BackendRequestError("Got priority 1000000 but priority scheduling is not enabled")
            yield done

        monkeypatch.setattr(backend, "stream", stream)
        assert backend.prefill(request()) == backend.prefill(request()) == done.usage
        assert tried == [True, False, False]

        def refuse(asked: Request) -> Iterator[Completion]:
            raise BackendRequestError("no such model")

        monkeypatch.setattr(backend, "stream", refuse)
        with pytest.raises(BackendRequestError, match="no such model"):
            backend.prefill(request())


def test_a_server_without_a_prefix_cache_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers count no cached tokens, and its metrics say why."""
    text = 'vllm:cache_config_info{block_size="16",enable_prefix_caching="False"} 1.0\n'
    with VLLMBackend("http://127.0.0.1:9") as backend:
        monkeypatch.setattr(backend._http, "get", lambda path: httpx2.Response(200, text=text))
        monkeypatch.setattr(backend, "_found", "connected")
        asked = replace(request(), expected_cached_tokens=2)
        answer = Completion("", (), FinishReason.STOP, Usage(3, 0, 3), 0.0, 0.0)
        assert backend._explained(asked, AnswerReader(asked), answer).lost is Miss.DISABLED
