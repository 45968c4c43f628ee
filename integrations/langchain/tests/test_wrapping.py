"""Wrapped models in Runnables and graphs, and `create_agent`."""

from __future__ import annotations

from typing import Any

import pytest
from agentkv import Policy
from agentkv.errors import ConfigurationError, FieldError
from langchain.agents import create_agent as create_plain_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.store.memory import InMemoryStore
from pydantic import BaseModel

from agents import Order, cancel, lookup
from langchain_agentkv import (
    AgentKVCallbackHandler,
    AgentKVMiddleware,
    GraphLedgerStore,
    MemoryLedgerStore,
    create_agent,
    from_state,
    wrap,
)
from scripted import Scripted, append_only, calling, updates_in

THREAD: Any = {"configurable": {"thread_id": "1"}}


def talk(model: Any, order: Order, config: Any = THREAD) -> list[Any]:
    """Ask three times, with a change after the first."""
    messages: list[Any] = [("system", "Be kind."), ("user", "Hello")]
    for turn, text in enumerate(("And?", "Well?", "")):
        answer = model.invoke(messages, config)
        messages += [answer, *([("user", text)] if text else [])]
        if turn == 0:
            order.status = "lost"
    return messages


STORES = [MemoryLedgerStore, lambda: GraphLedgerStore(InMemoryStore())]


@pytest.mark.parametrize("store", STORES)
def test_a_wrapped_model_keeps_the_prefix_of_a_thread(store: Any):
    """The ledger of a thread lies in the store; each change is said once."""
    order, inner = Order(), Scripted()
    talk(wrap(inner, [Policy("Rules."), order], ledger_store=store()), order)
    assert append_only(inner.calls) == [True, True]
    assert len(updates_in(inner.calls[2])) == 1
    assert inner.calls[0].system.startswith("Be kind.\n\nFacts can change")


@pytest.mark.parametrize("store", STORES)
async def test_a_wrapped_model_in_async_runs(store: Any):
    """`ainvoke` and `astream` do the same."""
    order, inner = Order(), Scripted()
    model = wrap(inner, [order], ledger_store=store())
    messages: list[Any] = [HumanMessage("Hello")]
    messages.append(await model.ainvoke(messages, THREAD))
    order.status = "lost"
    messages.append(HumanMessage("And?"))
    whole: Any = None
    async for chunk in model.astream(messages, THREAD):
        whole = chunk if whole is None else whole + chunk
    order.status = "found"
    await model.ainvoke([*messages, whole, HumanMessage("Well?")], THREAD)
    assert append_only(inner.calls) == [True, True]
    assert len(updates_in(inner.calls[2])) == 2
    assert whole.response_metadata["agentkv"]["told"] == ["order.status"]


def test_a_wrapped_model_streams():
    """Pieces come as the model makes them; the report comes last."""
    inner = Scripted(answers=["One two three."])
    model = wrap(inner, [Order()])
    chunks = list(model.stream("Hello", THREAD))
    assert [chunk.text for chunk in chunks][:3] == ["One ", "two ", "three. "]
    assert sum(bool(chunk.response_metadata.get("agentkv")) for chunk in chunks) == 1


def test_a_stream_that_is_left_is_not_recorded():
    """What was not read to its end is told again."""
    order, inner, store = Order(), Scripted(answers=["One two three."]), MemoryLedgerStore()
    stream = wrap(inner, [order], ledger_store=store).stream("Hello", THREAD)
    next(stream)
    stream.close()
    assert store.read("1") == {}


def test_threads_are_kept_apart_in_a_batch():
    """Each configuration's thread has its own ledger."""
    order, inner = Order(), Scripted()
    model = wrap(inner, [order])
    configs: list[Any] = [{"configurable": {"thread_id": str(n)}} for n in range(3)]
    answers = model.batch([[HumanMessage("Hello")]] * 3, configs)
    order.status = "lost"
    model.batch([[HumanMessage("Hello"), answer, HumanMessage("And?")] for answer in answers], configs)
    assert [len(updates_in(call)) for call in inner.calls] == [0, 0, 0, 1, 1, 1]


def test_without_a_thread_each_call_stands_alone():
    """Nothing is kept, and what is true is in the prompt."""
    order, inner = Order(), Scripted()
    talk(wrap(inner, [order]), order, {})
    assert [updates_in(call) for call in inner.calls] == [[], [], []]
    assert "Order status: lost" in inner.calls[1].system


def test_a_wrapped_model_in_a_chain():
    """A prompt template in front of it."""
    order, inner = Order(), Scripted()
    chain = ChatPromptTemplate.from_messages([("system", "Be kind."), ("user", "{q}")]) | wrap(inner, [order])
    assert chain.invoke({"q": "Hello"}, THREAD).content == "Fine."


def test_bound_tools_are_those_of_the_frozen_prefix():
    """Tools that come and go are errata here too."""
    order, inner = Order(), Scripted(answers=[calling(("lookup", {"number": "7"})), "Known.", "Yes."])
    model = wrap(inner, [order])
    messages: list[Any] = [HumanMessage("Look 7 up")]
    messages.append(model.bind_tools([lookup, cancel]).invoke(messages, THREAD))
    messages.append(ToolMessage("It is known.", tool_call_id="c1"))
    order.status = "lost"
    messages.append(model.bind_tools([lookup, cancel]).invoke(messages, THREAD))
    messages.append(HumanMessage("And?"))
    model.bind_tools([lookup]).invoke(messages, THREAD)
    assert append_only(inner.calls) == [True, True]
    assert inner.calls[1].messages[-1].content.startswith("It is known.\n\nUpdate 1")
    assert updates_in(inner.calls[2])[-1] == "Update 2: the tool 'cancel' no longer applies."


def test_structured_output_of_a_wrapped_model():
    """`with_structured_output` binds a tool and parses its call."""

    class Verdict(BaseModel):
        """What came of it."""

        good: bool

    inner = Scripted(answers=[calling(("Verdict", {"good": True}))])
    assert wrap(inner, [Order()]).with_structured_output(Verdict).invoke("Is it?", THREAD) == Verdict(
        good=True
    )


def test_a_wrapped_model_in_a_graph_takes_the_graphs_thread():
    """Nodes need not pass the configuration on."""
    order, inner = Order(), Scripted()
    model = wrap(inner, [order])

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer")
    compiled = graph.compile(checkpointer=InMemorySaver())
    handler = AgentKVCallbackHandler()
    compiled.invoke({"messages": [HumanMessage("Hello")]}, {**THREAD, "callbacks": [handler]})
    order.status = "lost"
    result = compiled.invoke({"messages": [HumanMessage("And?")]}, {**THREAD, "callbacks": [handler]})
    assert append_only(inner.calls) == [True]
    assert len(updates_in(inner.calls[1])) == 1
    assert handler.session.calls == 2
    assert not [m for m in result["messages"] if "Update" in str(m.content)]


def test_a_graphs_message_stream_holds_each_answer_once():
    """The model inside does not stream a second time."""
    model = wrap(Scripted(answers=["One two three."]), [Order()])

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer").compile()
    given: Any = {"messages": [HumanMessage("Hello")]}
    chunks = [message.text for message, _ in graph.stream(given, THREAD, stream_mode="messages")]
    assert "".join(chunks).split() == ["One", "two", "three."]


def test_what_is_built_already_is_refused_with_what_works():
    """A compiled graph, and a model with tools bound."""
    agent = create_plain_agent(Scripted(), [lookup])
    with pytest.raises(ConfigurationError, match=r"(?s)CompiledStateGraph.*model = wrap\(model, segments\)"):
        wrap(agent, [Order()])
    with pytest.raises(ConfigurationError, match="wrap it first"):
        wrap(Scripted().bind_tools([lookup]), [Order()])
    with pytest.raises(ConfigurationError, match="wrapped already"):
        wrap(wrap(Scripted()))


def test_fields_of_graph_state_need_the_middleware():
    """A wrapped model does not see the graph's state."""
    with pytest.raises(FieldError, match="AgentKVMiddleware"):
        wrap(Scripted(), [from_state("order.status")])


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_modes_of_a_wrapped_model(mode: str):
    """The kill switch and the observer rewrite."""
    order, inner = Order(), Scripted()
    talk(wrap(inner, [order], mode=mode), order)
    assert "Order status: lost" in inner.calls[1].system
    assert updates_in(inner.calls[2]) == []


def test_create_agent_takes_langchains_arguments():
    """The middleware is the last; all other arguments are LangChain's own."""
    order, model = Order(), Scripted()
    agent = create_agent(
        model, [lookup], segments=[order], system_prompt="Be kind.", checkpointer=InMemorySaver(), name="desk"
    )
    agent.invoke({"messages": [("user", "Hello")]}, THREAD)
    order.status = "lost"
    result = agent.invoke({"messages": [("user", "And?")]}, THREAD)
    assert append_only(model.calls) == [True]
    assert len(updates_in(model.calls[1])) == 1
    assert result["messages"][-1].name == "desk"


def test_create_agent_refuses_agentkv_twice():
    """One middleware, and no wrapped model under it."""
    with pytest.raises(ConfigurationError, match="twice"):
        create_agent(Scripted(), [], middleware=[AgentKVMiddleware()])
    with pytest.raises(ConfigurationError, match="wrapped"):
        create_agent(wrap(Scripted()), [])


@pytest.mark.parametrize("store", STORES)
def test_a_store_holds_what_a_reducer_would(store: Any):
    """Openings replace what was before; quiet steps become part of the one before."""
    made, order, inner = store(), Order(), Scripted()
    model = wrap(inner, [order], ledger_store=made)
    talk(model, order)
    model.invoke([HumanMessage("Something else")], THREAD)
    for _ in range(3):
        model.invoke([HumanMessage("Something else"), AIMessage("Fine.")], THREAD)
    log = made.read("1")["agentkv_log"]
    assert [record["kind"] for record in log] == ["opening", "step"]
    assert log[0]["epoch"] == 2


def test_the_same_question_again_sends_the_same_prompt():
    """A node that is run again, or an answer that is asked for anew, opens no epoch."""
    order, inner, store = Order(), Scripted(), MemoryLedgerStore()
    model = wrap(inner, [order], ledger_store=store)
    history = [HumanMessage("Hello"), model.invoke([HumanMessage("Hello")], THREAD), HumanMessage("And?")]
    order.status = "lost"
    for _ in range(3):
        model.invoke(history, THREAD)
    assert len({tuple(call.texts) for call in inner.calls[1:]}) == 1
    order.status = "found"
    again = model.invoke(history, THREAD)
    assert again.response_metadata["agentkv"]["reason"] == ""
    assert [line[:8] for line in updates_in(inner.calls[-1])] == ["Update 1", "Update 2"]
    model.invoke([*history, again, HumanMessage("So?")], THREAD)
    assert append_only(inner.calls[-2:]) == [True]


def test_facts_that_changed_behind_results_open_an_epoch_when_asked_anew():
    """An erratum cannot be put in front of a result that was answered before."""
    order, inner = Order(), Scripted(answers=[calling(("lookup", {"number": "7"})), "Known."])
    model = wrap(inner, [order]).bind_tools([lookup])
    messages: list[Any] = [HumanMessage("Look 7 up")]
    messages += [model.invoke(messages, THREAD), ToolMessage("It is known.", tool_call_id="c1")]
    model.invoke(messages, THREAD)
    order.status = "lost"
    result = model.invoke(messages, THREAD)
    assert result.response_metadata["agentkv"]["reason"].startswith("facts changed behind tool results")
    assert "Order status: lost" in inner.calls[-1].system
