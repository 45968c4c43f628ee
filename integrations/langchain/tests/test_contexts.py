"""`AgentKVContext.wrap` and `create_agent`: a context's declarations for any model, graph or agent."""

from __future__ import annotations

from typing import Any

import pytest
from agentkv import AgentKVContext, AsyncAgentKVContext, Policy, Skill, Tools
from agentkv.errors import CapabilityError, ConfigurationError, SegmentError
from agentkv.testing import ScriptedBackend
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph

from agents import Order, lookup, report
from langchain_agentkv import ChatVLLM, from_state
from scripted import Scripted, append_only, updates_in

KEY = b"0123456789abcdef"
THREAD: Any = {"configurable": {"thread_id": "1"}}


def context(backend: Any = None, **options: Any) -> tuple[AgentKVContext, Order]:
    order = Order()
    ctx = AgentKVContext(backend or ScriptedBackend(), [Policy("You answer for a shop."), order], **options)
    return ctx, order


def said(agent: Any, text: str) -> dict[str, Any]:
    result: dict[str, Any] = agent.invoke({"messages": [("user", text)]}, THREAD)
    return result


def test_an_agent_of_a_context_tells_what_changes():
    """Bound objects, functions and fields that are set by key, read anew at every call."""
    ctx, order = context()
    days = iter(["Monday", "Monday", "Tuesday"])

    @ctx.field(label="Today")
    def today() -> str:
        return next(days)

    model = Scripted(answers=["One.", "Two.", "Three."])
    agent = ctx.create_agent(model, [lookup], system_prompt="Be kind.", checkpointer=InMemorySaver())
    said(agent, "1")
    order.status = "lost"
    assert report(said(agent, "2"))["told"] == ["order.status"]
    ctx.set("order.eta", "never")
    assert sorted(report(said(agent, "3"))["told"]) == ["order.eta", "today"]
    assert append_only(model.calls) == [True, True]


def test_a_segment_that_is_added_to_the_context_is_told():
    """The declaration is the context's, also after the agent was made."""
    ctx, _ = context()
    model = Scripted(answers=["One.", "Two."])
    agent = ctx.create_agent(model, checkpointer=InMemorySaver())
    said(agent, "1")
    ctx.add(Skill("returns", "Within thirty days."))
    said(agent, "2")
    assert append_only(model.calls) == [True]
    assert "Within thirty days." in model.calls[1].texts[-1]


def test_the_agents_own_arguments_are_handed_on():
    """A checkpointer, a system prompt, and what the middleware takes."""
    ctx, _ = context()
    model = Scripted(answers=["One."])
    agent = ctx.create_agent(model, [lookup], system_prompt="Be kind.", name="desk", mode="off")
    agent.invoke({"messages": [("user", "1")]})
    assert agent.name == "desk"
    assert model.calls[0].texts[0].startswith("Be kind.")
    assert [tool["function"]["name"] for tool in model.calls[0].tools] == ["lookup"]


def test_without_a_model_the_contexts_backend_answers():
    """On token ids, under the context's tenant, with its sampling."""
    backend = ScriptedBackend(["One.", "Two."])
    ctx, order = context(backend, tenant="a", salt_key=KEY)
    agent = ctx.create_agent(checkpointer=InMemorySaver())
    said(agent, "1")
    order.status = "lost"
    found = report(said(agent, "2"))
    assert found["cached_tokens"] == found["predicted_cached_tokens"] > 0
    assert {request.tenant for request in backend.requests} == {"a"}
    assert len({request.salt for request in backend.requests}) == 1


def test_a_wrapped_model_serves_any_graph():
    """Its ledger is kept for each thread."""
    ctx, order = context()
    model = Scripted(answers=["One.", "Two."])
    chat = ctx.wrap(model)
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [chat.invoke(state["messages"])]})
    graph.set_entry_point("model")
    compiled = graph.compile(checkpointer=InMemorySaver())
    said(compiled, "1")
    order.status = "lost"
    said(compiled, "2")
    assert append_only(model.calls) == [True]
    assert len(updates_in(model.calls[1])) == 1


async def test_async_fields_of_an_async_context_are_awaited():
    """They are read where the call is asynchronous."""
    ctx = AsyncAgentKVContext(ScriptedBackend(), [Policy("You answer for a shop.")])

    @ctx.field
    async def today() -> str:
        return "Monday"

    model = Scripted(answers=["One."])
    await ctx.wrap(model).ainvoke("Hello")
    assert "Monday" in model.calls[0].texts[0]


def test_the_contexts_mode_holds():
    """A context that is off leaves the agent as it is."""
    ctx, order = context(mode="off")
    model = Scripted(answers=["One.", "Two."])
    agent = ctx.create_agent(model, checkpointer=InMemorySaver())
    said(agent, "1")
    order.status = "lost"
    assert report(said(agent, "2"))["plan"] == "rewritten"


def test_fields_of_the_graphs_state_can_be_added():
    """In LangChain's terms, beside those of the context."""
    ctx, _ = context()
    model = Scripted(answers=["One."])
    agent = ctx.create_agent(model, fields=[from_state("topic")])
    agent.invoke({"messages": [("user", "1")]})
    assert "- Topic: none" in model.calls[0].texts[0]


def test_a_model_on_vllm_gets_the_contexts_tenant():
    """Its salt is made with the context's key."""
    ctx, _ = context(tenant="a", salt_key=KEY)
    chat = ctx.wrap(ChatVLLM(model="stub"))
    assert chat.inner.tenant == "a"
    assert chat.inner.cache_salt == ChatVLLM(model="stub", tenant="a", salt_key=KEY).cache_salt


def test_a_tenant_needs_a_model_that_keeps_tenants_apart():
    """Another tenant could measure what is cached."""
    ctx, _ = context(tenant="a")
    with pytest.raises(CapabilityError, match="Scripted keeps no tenants apart"):
        ctx.wrap(Scripted(answers=["One."]))


def test_a_contexts_tools_are_refused():
    """They belong to the agent, which runs them."""
    ctx = AgentKVContext(ScriptedBackend(), [Tools([lookup])])
    with pytest.raises(SegmentError, match=r"declares tools \(lookup\)"):
        ctx.create_agent(Scripted(answers=["One."]))


def test_a_compiled_graph_is_refused_with_what_works():
    """Its model is built in."""
    ctx, _ = context()
    graph = ctx.create_agent(Scripted(answers=["One."]))
    with pytest.raises(ConfigurationError, match="model = wrap"):
        ctx.wrap(graph)


def test_the_contexts_own_conversation_is_left_alone():
    """An agent's threads have ledgers of their own."""
    ctx, _ = context()
    ctx.wrap(Scripted(answers=["One."])).invoke([HumanMessage("Hello")], THREAD)
    assert len(ctx.ledger) == 0
