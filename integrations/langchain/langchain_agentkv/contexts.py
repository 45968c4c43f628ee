"""agentkv's contexts in LangChain: their segments, fields and options for any model, graph or agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentkv.conversation import Conversation
from agentkv.errors import CapabilityError, SegmentError
from langchain_core.language_models import BaseChatModel
from pydantic import SecretBytes

from langchain_agentkv.chat_model import ChatAgentKV
from langchain_agentkv.fields import FieldSource
from langchain_agentkv.live import LivePrompt
from langchain_agentkv.tenants import Tenanted
from langchain_agentkv.wrapping import AgentKVChatModel, wrap


def wrap_model(conversation: Conversation, model: Any = None, **options: Any) -> AgentKVChatModel:
    """Return a chat model that tells what changes in a context; see `langchain_agentkv.wrap`.

    Parameters
    ----------
    model
        A chat model; None takes the context's own backend.

    Raises
    ------
    SegmentError
        The context declares tools, which belong to the model.
    CapabilityError
        The context has a tenant, and the model cannot keep tenants apart.
    """
    return wrap(_model(conversation, model), [_live(conversation)], **_options(conversation, options))


def create_context_agent(
    conversation: Conversation,
    model: Any = None,
    tools: Sequence[Any] | None = None,
    *,
    fields: Sequence[FieldSource] = (),
    **agent: Any,
) -> Any:
    """Return LangChain's agent that tells what changes in a context; see `langchain_agentkv.create_agent`.

    Parameters
    ----------
    fields
        Further ones in LangChain's terms, such as those of `from_state`.
    conversation, model, tools, agent
        As of `wrap_model` and `langchain_agentkv.create_agent`; so are the errors.
    """
    from langchain_agentkv.agents import create_agent

    given = _options(conversation, agent)
    parts = [_live(conversation), *fields]
    return create_agent(_model(conversation, model), tools, segments=parts, **given)


def _live(conversation: Conversation) -> LivePrompt:
    if conversation.prompt.tools:
        names = ", ".join(tool.name for tool in conversation.prompt.tools)
        raise SegmentError(
            f"the context declares tools ({names}), which belong to the agent here: leave Tools out of its "
            "segments, and give them to create_agent or bind_tools"
        )
    return LivePrompt(conversation)


def _options(conversation: Conversation, given: dict[str, Any]) -> dict[str, Any]:
    options = conversation.options
    return {"profile": options.profile, "mode": conversation.mode, "costs": conversation.costs, **given}


def _model(conversation: Conversation, model: Any) -> Any:
    """Return the model with the context's tenant, or one over the context's backend."""
    options = conversation.options
    mark = {"tenant": options.tenant, "salt_key": SecretBytes(options.salt_key)}
    if model is None:
        sampling = options.sampling
        return ChatAgentKV(
            backend=conversation.backend,
            splicing=options.splicing,
            template_arguments=dict(conversation.prompt.template_arguments),
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            repetition_penalty=sampling.repetition_penalty,
            seed=sampling.seed,
            stop=list(sampling.stop) or None,
            **mark,
        )
    if options.tenant == "default" or not isinstance(model, BaseChatModel | str):
        return model
    if isinstance(model, Tenanted):
        return model.for_tenant(options.tenant, options.salt_key)
    name = model if isinstance(model, str) else type(model).__name__
    raise CapabilityError(
        f"{name} keeps no tenants apart, so tenant {options.tenant!r} could read from another tenant's cache "
        "by its timing: use ChatAgentKV or ChatVLLM"
    )
