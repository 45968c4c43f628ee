"""`ChatVLLM` on a real socket: what is sent, what is kept, what is sent again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest
from agentkv import Policy
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from pydantic import BaseModel

from agents import Desk, Order, lookup
from langchain_agentkv import wrap
from langchain_agentkv.chat_vllm import ChatVLLM
from stub import ANSWER, VLLMStub

ODD = '{"number":   "7" , "x": 1.0}'
"""Arguments as a model writes them, which JSON libraries write otherwise."""


@pytest.fixture
def server() -> Iterator[VLLMStub]:
    with VLLMStub() as stub:
        yield stub


def model(server: VLLMStub, **options: Any) -> ChatVLLM:
    return ChatVLLM(model="stub", base_url=server.url, **options)


def answering(**message: Any) -> VLLMStub:
    """Return a server that answers every request with one message."""
    return VLLMStub(lambda _: message)


def call(arguments: str) -> dict[str, Any]:
    """Return a tool call of a server's message."""
    return {"id": "call00001", "type": "function", "function": {"name": "lookup", "arguments": arguments}}


def test_an_address_without_a_version_gets_one(server: VLLMStub):
    """The server's address is enough."""
    assert model(server).openai_api_base == f"{server.url}/v1"
    assert model(server).invoke("Hello").content == ANSWER


def test_openais_key_is_never_sent(server: VLLMStub, monkeypatch: pytest.MonkeyPatch):
    """A key in OPENAI_API_KEY is OpenAI's; a vLLM server's is in VLLM_API_KEY."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    model(server).invoke("Hello")
    monkeypatch.setenv("VLLM_API_KEY", "ours")
    model(server).invoke("Hello")
    assert [headers["authorization"] for headers in server.headers] == ["Bearer EMPTY", "Bearer ours"]


def test_extra_bodies_are_merged(server: VLLMStub):
    """A call's extra body adds to the instance's; OpenAI's own class replaces it."""
    llm = model(
        server,
        extra_body={"min_p": 0.1, "chat_template_kwargs": {"a": 1}},
        chat_template_kwargs={"enable_thinking": False},
        cache_salt="s",
        priority=3,
    )
    llm.invoke("Hello", extra_body={"top_k": 5, "chat_template_kwargs": {"b": 2}})
    body = server.requests[-1]
    assert (body["min_p"], body["top_k"], body["cache_salt"], body["priority"]) == (0.1, 5, "s", 3)
    assert body["chat_template_kwargs"] == {"enable_thinking": False, "a": 1, "b": 2}
    assert body["return_token_ids"] is True


def test_a_tenant_has_a_salt_of_its_own(server: VLLMStub):
    """Salts come of key and tenant, as agentkv's own backends make them."""
    key = b"a key of the tests, 32 bytes long"
    salts = {model(server, salt_key=key, tenant=name).cache_salt for name in ("a", "b", "a")}
    assert len(salts) == 2
    assert model(server).cache_salt is None
    with pytest.raises(ValueError, match="empty"):
        model(server, cache_salt="")


def test_cached_tokens_are_reported(server: VLLMStub):
    """`cache_read` of the usage, whole and streamed."""
    llm = model(server)
    question = [HumanMessage("Where is it? " * 20)]
    llm.invoke(question)
    again = llm.invoke(question)
    streamed: Any = None
    for chunk in llm.stream(question):
        streamed = chunk if streamed is None else streamed + chunk
    assert again.usage_metadata is not None
    assert again.usage_metadata["input_token_details"]["cache_read"] > 0
    assert streamed.usage_metadata["input_token_details"]["cache_read"] > 0


@pytest.mark.parametrize("run", ["whole", "stream"])
def test_generated_ids_are_kept(server: VLLMStub, run: str):
    """The ids that the server tells are in the response metadata, in order."""
    answer = answer_of(model(server), "Hello", run)
    assert answer.response_metadata["token_ids"] == [ord(letter) for letter in ANSWER]


def answer_of(llm: Any, question: Any, run: str) -> AIMessage:
    """Ask, in one piece or as a stream."""
    if run == "whole":
        whole: AIMessage = llm.invoke(question)
        return whole
    made: Any = None
    for chunk in llm.stream(question):
        made = chunk if made is None else made + chunk
    last: AIMessage = made
    return last


@pytest.mark.parametrize("run", ["whole", "stream"])
def test_arguments_are_sent_again_as_the_model_wrote_them(run: str):
    """White space and number forms of a call survive, whole and streamed, and through JSON."""
    with answering(content="Let me look.", tool_calls=[call(ODD)]) as server:
        llm = model(server)
        answer = answer_of(llm, "Where is 7?", run)
        assert answer.tool_calls[0]["args"] == {"number": "7", "x": 1.0}
        stored = type(answer).model_validate(json.loads(json.dumps(answer.model_dump())))
        llm.invoke([HumanMessage("Where is 7?"), stored, ToolMessage("Here.", tool_call_id="call00001")])
        sent = server.requests[-1]["messages"][1]
    assert sent["tool_calls"][0]["function"]["arguments"] == ODD
    assert sent["content"] == "Let me look."


def test_arguments_that_were_edited_are_sent_as_they_are_now():
    """What a human changed is no longer what the model wrote."""
    with answering(content=None, tool_calls=[call(ODD)]) as server:
        llm = model(server)
        answer = llm.invoke("Where is 7?")
        answer.tool_calls[0]["args"] = {"number": "8"}
        llm.invoke([HumanMessage("Where is 7?"), answer, ToolMessage("Here.", tool_call_id="call00001")])
        sent = server.requests[-1]["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(sent) == {"number": "8"}


@pytest.mark.parametrize("arguments", ["[1, 2]", '"7"', "7", "null", "{broken"])
@pytest.mark.parametrize("run", ["whole", "stream"])
def test_arguments_that_are_no_object_are_invalid_calls(arguments: str, run: str):
    """They are never run, and go back in a form that every server reads, always the same."""
    with answering(content="", tool_calls=[call(arguments)]) as server:
        llm = model(server)
        if run == "stream":
            llm = model(server, streaming=True)
        answer = llm.invoke("Where is 7?")
        assert answer.tool_calls == []
        assert [bad["args"] for bad in answer.invalid_tool_calls] == [arguments]
        llm.invoke([HumanMessage("Where is 7?"), answer, ToolMessage("Bad.", tool_call_id="call00001")])
        sent = server.requests[-1]["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(sent) == {"malformed_arguments": arguments}


@pytest.mark.parametrize("run", ["whole", "stream"])
def test_thoughts_are_kept_and_sent_again(run: str):
    """What the model thought goes back under vLLM's name for it."""
    with answering(content="Yes.", reasoning="Let me think.") as server:
        llm = model(server)
        answer = answer_of(llm, "Is it?", run)
        assert answer.content == "Yes."
        assert answer.additional_kwargs["reasoning_content"] == "Let me think."
        llm.invoke([HumanMessage("Is it?"), answer, HumanMessage("Sure?")])
        assert server.requests[-1]["messages"][1]["reasoning"] == "Let me think."


@pytest.mark.parametrize("content", ["x", [{"type": "text", "text": "x"}], ["x"]])
def test_contents_are_sent_in_one_form(server: VLLMStub, content: Any):
    """A list of one text is the text."""
    model(server).invoke([HumanMessage(content=content)])
    assert server.requests[-1]["messages"][0]["content"] == "x"


def test_an_empty_content_beside_calls_is_empty_text(server: VLLMStub):
    """K15: null, "" and [] are sent as one form, and the message is never dropped."""
    calls: Any = [{"name": "lookup", "args": {"number": "7"}, "id": "call00001", "type": "tool_call"}]
    bodies = []
    for content in ("", [], [{"type": "text", "text": ""}]):
        result = ToolMessage("Here.", tool_call_id="call00001")
        messages = [HumanMessage("?"), AIMessage(content=content, tool_calls=calls), result]
        model(server).invoke(messages)
        bodies.append(json.dumps(server.requests[-1]["messages"]))
    assert len(set(bodies)) == 1
    assert json.loads(bodies[0])[1]["content"] == ""


def test_an_answer_without_calls_has_no_empty_list_of_them(server: VLLMStub):
    """Some templates write a line for an empty list."""
    model(server).invoke([HumanMessage("?"), AIMessage("Yes."), HumanMessage("Sure?")])
    assert "tool_calls" not in server.requests[-1]["messages"][1]


class Verdict(BaseModel):
    """What came of it."""

    good: bool
    why: str


def test_structured_output_is_a_json_schema_by_default(server: VLLMStub):
    """vLLM's grammar holds the model to it; parsed values are the schema's."""
    made = model(server).with_structured_output(Verdict).invoke("Is it?")
    assert made == Verdict(good=True, why="text")
    assert server.requests[-1]["response_format"]["json_schema"]["schema"]["required"] == ["good", "why"]


def test_structured_output_that_does_not_parse_is_told_beside_the_message():
    """`include_raw` gives the message and the error."""
    with answering(content="no JSON") as server:
        made: Any = model(server).with_structured_output(Verdict, include_raw=True).invoke("Is it?")
    assert made["raw"].content == "no JSON"
    assert made["parsed"] is None
    assert made["parsing_error"] is not None


def test_counting_needs_no_download(server: VLLMStub):
    """Tokens are estimated, tools included."""
    llm = model(server)
    question = [HumanMessage("Where is it?")]
    assert 0 < llm.get_num_tokens_from_messages(question) < 40
    counted = [llm.get_num_tokens_from_messages(question, tools=tools) for tools in ([], [lookup])]
    assert counted[0] < counted[1]


def prefixes(bodies: list[Mapping[str, Any]]) -> list[bool]:
    """Tell of each request but the first whether it begins with the one before."""
    texts = [json.dumps([body.get("tools"), body["messages"]])[:-2] for body in bodies]
    return [after.startswith(before) for before, after in pairwise(texts)]


@pytest.mark.parametrize("streaming", [False, True])
def test_an_agents_requests_extend_each_other_on_the_wire(streaming: bool):
    """With the middleware each body begins with the one before, calls and errata included."""
    with VLLMStub() as server:
        desk = Desk(model=model(server), segments=[Policy("Rules. " * 50), order := Order()])
        for turn, text in enumerate(("Look it up?", "Thanks.", "Bye.")):
            if streaming:
                given: Any = {"messages": [("user", text)]}
                list(desk.agent.stream(given, desk.config(), stream_mode="messages"))
            else:
                desk.ask(text)
            order.status = f"step {turn}"
        bodies = server.requests
    assert len(bodies) == 4
    assert prefixes(bodies) == [True, True, True]
    reports = [m.response_metadata["agentkv"] for m in desk.state()["messages"] if isinstance(m, AIMessage)]
    assert [one["cached_tokens"] > 0 for one in reports] == [False, True, True, True]
    assert [one["told"] for one in reports] == [[], [], ["order.status"], ["order.status"]]


def test_a_wrapped_model_on_the_wire(server: VLLMStub):
    """`wrap` around it keeps the prefix too."""
    order = Order()
    llm = wrap(model(server), [Policy("Rules."), order])
    thread: Any = {"configurable": {"thread_id": "1"}}
    answer = llm.invoke("Hello", thread)
    order.status = "lost"
    llm.invoke([HumanMessage("Hello"), answer, HumanMessage("And?")], thread)
    assert prefixes(server.requests) == [True]


async def test_async_calls(server: VLLMStub):
    """`ainvoke` and `astream` keep the same things."""
    llm = model(server)
    answer = await llm.ainvoke("Hello")
    assert answer.response_metadata["token_ids"]
    pieces = [chunk.text async for chunk in llm.astream("Hello")]
    assert "".join(pieces) == ANSWER
