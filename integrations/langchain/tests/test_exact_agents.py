"""Agents and wrapped models on token ids: what is predicted to be cached is what is cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from agentkv import Policy, Skill
from agentkv.backends.base import Capabilities
from agentkv.miss import Miss
from agentkv.segments import Splicing
from agentkv.testing import ScriptedBackend
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langgraph.checkpoint.sqlite import SqliteSaver

from agents import Desk, Order, cancel, lookup, report
from exactly import PlainByteTokenizer, all_extend, model, prompts, requests
from langchain_agentkv import AgentKVCallbackHandler, ChatAgentKV, wrap

CALL = '<tool_call>{"name":   "lookup", "arguments": {"number" : "7"}}</tool_call>'
KEY = b"0123456789abcdef"


def as_predicted(found: dict[str, Any]) -> bool:
    """Tell whether a report's cached tokens are those that were predicted."""
    return found["cached_tokens"] == found["predicted_cached_tokens"] and found["miss"] in (
        None,
        Miss.COLD.value,
    )


@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("tokenizer", [None, PlainByteTokenizer()], ids=["knows tools", "knows none"])
def test_every_prompt_extends_the_last_and_hits_as_predicted(block: int, tokenizer: Any):
    """Fields change, a tool is called: ids only grow, and each turn's cached tokens are those predicted."""
    answers = ["Hello.", CALL, "It is known.", "Delivered."]
    chat = model(answers, block_size=block, tokenizer=tokenizer)
    desk = Desk(model=chat)
    found = [report(desk.ask("Hello"))]
    desk.order.status = "delivered"
    found.append(report(desk.ask("Where is 7?")))
    desk.order.eta = "Tuesday"
    found.append(report(desk.ask("And now?")))
    assert all_extend(chat, answers) == [True, True, True]
    assert [as_predicted(one) for one in found] == [True, True, True]
    assert found[-1]["cached_tokens"] > 0
    assert found[-1]["plan"] == "erratum(order.eta)"
    assert "The Order status is now delivered." in prompts(chat)[1]


def test_the_first_call_is_cold():
    """The report names the cause."""
    desk = Desk(model=model(["Hello."]))
    assert report(desk.ask("Hello"))["miss"] == Miss.COLD.value


def test_a_new_epoch_is_predicted_too():
    """What the two prompts share is cached; where it breaks is said."""
    chat = model(["Hello.", "Bye."])
    desk = Desk(model=chat)
    first = desk.ask("Hello")
    changes = [RemoveMessage(id=str(first["messages"][0].id)), HumanMessage("Another")]
    found = report(desk.agent.invoke({"messages": changes}, desk.config()))
    assert found["reason"].startswith("the history changed")
    assert found["cached_tokens"] == found["predicted_cached_tokens"] > 0


def test_an_edited_answer_is_predicted_too():
    """What stands behind the edit is computed."""
    chat = model(["Hello there.", "Bye."])
    desk = Desk(model=chat)
    answer = desk.ask("Hello")["messages"][-1]
    edited = AIMessage("Hello you.", id=answer.id, response_metadata=answer.response_metadata)
    desk.agent.update_state(desk.config(), {"messages": [edited]})
    found = report(desk.ask("Bye"))
    assert found["answer_edited"]
    assert found["cached_tokens"] == found["predicted_cached_tokens"] > 0


def test_an_answer_is_asked_for_anew():
    """The same prompt, all of it cached but for its last token."""
    chat = model(["Hello.", "Hi."])
    desk = Desk(model=chat)
    answer = desk.ask("Hello")["messages"][-1]
    change = {"messages": [RemoveMessage(id=str(answer.id))]}
    found = report(desk.agent.invoke(change, desk.config()))
    first, second = requests(chat)
    assert first.ids.tolist() == second.ids.tolist()
    assert found["predicted_cached_tokens"] == found["cached_tokens"] == len(first.ids) - 1


def test_a_thread_goes_on_from_a_database(tmp_path: Any):
    """Another agent on the same file sends what the first would have sent."""
    backend = ScriptedBackend(["Hello.", "Fine.", "Bye."])
    path = str(tmp_path / "threads.sqlite")
    found = []
    for text in ("Hello", "How are you?", "Bye"):
        with SqliteSaver.from_conn_string(path) as saver:
            desk = Desk(model=ChatAgentKV(backend=backend), checkpointer=saver)
            desk.order.status = f"status of {text}"
            found.append(report(desk.ask(text)))
    chat = ChatAgentKV(backend=backend)
    assert all_extend(chat, ["Hello.", "Fine."]) == [True, True]
    assert [as_predicted(one) for one in found] == [True, True, True]


async def test_streamed_and_async_runs_keep_the_prefix():
    """In each stream mode, and awaited."""
    answers = ["One.", "Two.", "Three."]
    chat = model(answers)
    desk = Desk(model=chat)
    for _ in desk.agent.stream(
        {"messages": [("user", "1")]}, desk.config(), stream_mode=["messages", "updates", "values"]
    ):
        pass
    await desk.aask("2")
    desk.order.status = "lost"
    async for _ in desk.agent.astream({"messages": [("user", "3")]}, desk.config(), stream_mode="messages"):
        pass
    assert all_extend(chat, answers) == [True, True]
    assert as_predicted(report(desk.state()))


def test_a_tool_that_is_told_in_the_text_is_called():
    """The call's ids stay, though the tool is not bound."""
    call = '<tool_call>{"name": "cancel", "arguments": {"number": "7"}}</tool_call>'
    answers = ["Hello.", call, "Done."]
    inner = model(answers)
    chat = wrap(inner, [Policy("You answer for a shop.")])
    thread: Any = {"configurable": {"thread_id": "1"}}
    messages: list[Any] = [HumanMessage("Hello")]
    messages.append(chat.bind_tools([lookup]).invoke(messages, thread))
    messages.append(HumanMessage("Cancel 7"))
    answer = chat.bind_tools([lookup, cancel]).invoke(messages, thread)
    assert [c["name"] for c in answer.tool_calls] == ["cancel"]
    assert all_extend(inner, answers) == [True]


def test_a_wrapped_model_predicts_as_well():
    """Its reports are those of the middleware, and its requests are of the thread."""
    order = Order()
    inner = model(["Hello.", "Bye."])
    chat = wrap(inner, [Policy("You answer for a shop."), order])
    thread: Any = {"configurable": {"thread_id": "1"}}
    messages: list[Any] = [HumanMessage("Hello")]
    messages.append(chat.invoke(messages, thread))
    order.status = "lost"
    messages.append(HumanMessage("Bye"))
    found = chat.invoke(messages, thread).response_metadata["agentkv"]
    assert all_extend(inner, ["Hello."]) == [True]
    assert as_predicted(found)
    assert found["cached_tokens"] > 0
    assert len({request.conversation for request in requests(inner)}) == 1


def test_a_wrapped_stream_predicts_as_well():
    """Chunk by chunk it keeps the ids too."""
    inner = model(["Hello.", "Bye."])
    chat = wrap(inner, [Policy("You answer for a shop.")])
    thread: Any = {"configurable": {"thread_id": "1"}}
    pieces = list(chat.stream("Hello", thread))
    answer: Any = sum(pieces[1:], pieces[0])
    found = chat.invoke([HumanMessage("Hello"), answer, HumanMessage("Bye")], thread)
    assert all_extend(inner, ["Hello."]) == [True]
    assert as_predicted(found.response_metadata["agentkv"])


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_other_modes_rewrite_the_prompt(mode: str):
    """The kill switch and the comparison work on token ids too."""
    chat = model(["Hello.", "Bye."])
    desk = Desk(model=chat, options={"mode": mode})
    desk.ask("Hello")
    desk.order.status = "lost"
    found = report(desk.ask("Bye"))
    assert "lost" in prompts(chat)[1].split("Hello")[0]
    assert found["mode"] == mode
    assert "predicted_cached_tokens" not in found


def test_another_tenant_has_another_salt():
    """And the next call under it is predicted to find nothing."""
    backend = ScriptedBackend(["Hello.", "Bye."])
    thread: Any = {"configurable": {"thread_id": "1"}}
    messages: list[Any] = [HumanMessage("Hello")]
    chat = wrap(ChatAgentKV(backend=backend, tenant="a", salt_key=KEY), [Policy("Be kind.")])
    messages.append(chat.invoke(messages, thread))
    other = wrap(
        ChatAgentKV(backend=backend, tenant="b", salt_key=KEY), [Policy("Be kind.")], ledger_store=chat._store
    )
    found = other.invoke([*messages, HumanMessage("Bye")], thread).response_metadata["agentkv"]
    assert (found["predicted_cached_tokens"], found["cached_tokens"]) == (0, 0)
    assert found["miss"] == Miss.SALTED.value
    assert backend.requests[0].salt != backend.requests[1].salt


def test_the_handler_sums_up_what_was_predicted():
    """Beside what was observed."""
    handler = AgentKVCallbackHandler()
    desk = Desk(model=model(["Hello.", "Bye."]))
    desk.ask("Hello", callbacks=[handler])
    desk.ask("Bye", callbacks=[handler])
    assert handler.session.predicted_cached_tokens == handler.session.cached_tokens > 0


class ShelfBackend(ScriptedBackend):
    """A scripted backend that has an artifact of every chunk; what it would load is in its requests."""

    seam = 4

    def __init__(self, answers: Sequence[str]) -> None:
        super().__init__(answers)
        old = self.capabilities
        self.capabilities = Capabilities(
            name="splicing", context_window=old.context_window, block_size=1, splices=True
        )
        self.compiled: list[list[int]] = []

    def find_artifact(self, tenant: str, ids: Sequence[int]) -> str | None:
        return "ab" * 32

    def compile_chunk(self, tenant: str, ids: Sequence[int]) -> str:
        return "ab" * 32


SKILL = "Returns are taken within thirty days of delivery, unworn, with the receipt in the box."


def test_a_skill_is_spliced_where_it_stands():
    """The request names exactly the skill's tokens, in an approximate namespace from the first call on."""
    chat = ChatAgentKV(backend=ShelfBackend(["Hello.", "Bye."]))
    desk = Desk(model=chat, segments=[Policy("You answer for a shop."), Skill("returns", SKILL), Order()])
    first, later = report(desk.ask("Hello")), report(desk.ask("Bye"))
    asked = requests(chat)
    [splice] = asked[0].splices
    told = bytes(i for i in asked[0].ids.tolist(splice.start, splice.stop) if i < 256).decode()
    assert SKILL.endswith(told)
    assert len(told) == len(SKILL) - 4
    assert first["predicted_spliced_tokens"] == len(splice)
    assert later["predicted_spliced_tokens"] == 0
    assert asked[0].salt == asked[1].salt
    assert asked[0].salt.startswith("approx-")


def test_without_splicing_the_namespace_is_exact():
    """A model that is told never to splice asks for nothing."""
    chat = ChatAgentKV(backend=ShelfBackend(["Hello."]), splicing=Splicing.NEVER)
    desk = Desk(model=chat, segments=[Skill("returns", SKILL)])
    desk.ask("Hello")
    [asked] = requests(chat)
    assert asked.splices == ()
    assert not asked.salt.startswith("approx-")
