"""A chat model with agentkv around it, for any Runnable or LangGraph graph."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from agentkv.costs import Costs
from agentkv.errors import ConfigurationError
from agentkv.plan import Mode
from agentkv.profile import GENERIC, Profile
from agentkv.tokenizer import ChatTokenizer
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    SystemMessage,
    message_chunk_to_message,
)
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableBinding, RunnableConfig, ensure_config
from pydantic import ConfigDict, PrivateAttr

from langchain_agentkv.engine import AddedTools, Answered, Engine, Prepared, Unsupported
from langchain_agentkv.exact import SETTINGS_KEY, TokenExact, token_exact
from langchain_agentkv.fields import Scope, check_needs
from langchain_agentkv.models import forced_tool, identity, window_of
from langchain_agentkv.planning import Asked
from langchain_agentkv.recording import REPORT_KEY
from langchain_agentkv.reporting import aemit, emit
from langchain_agentkv.stores import LedgerStore, MemoryLedgerStore
from langchain_agentkv.toolset import Toolset

_THREAD: Final = "agentkv_thread"
_TOOLS: Final = "agentkv_tools"
_CHOICE: Final = "tool_choice"


class AgentKVChatModel(BaseChatModel):
    """A chat model whose prompt stays cached while facts change; made by `wrap`.

    The ledger is kept for each ``thread_id`` of the run's configuration. Without one, each call is an epoch
    of its own.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    inner: BaseChatModel
    """The model that answers."""
    _engine: Engine = PrivateAttr()
    _store: LedgerStore = PrivateAttr()

    @property
    def _llm_type(self) -> str:
        return f"agentkv-{self.inner._llm_type}"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return self.inner._identifying_params

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        return self.inner._get_ls_params(stop=stop, **{k: v for k, v in kwargs.items() if k not in _OURS})

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: Any = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Bind tools; what is sent are those of the frozen prefix."""
        return self.bind(**{_TOOLS: list(tools), _CHOICE: tool_choice}, **kwargs)

    def invoke(
        self,
        input: LanguageModelInput,  # noqa: A002 - LangChain's name
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """Answer; the ledger is that of the configuration's thread."""
        return super().invoke(input, config, stop=stop, **_with_thread(config, kwargs))

    async def ainvoke(
        self,
        input: LanguageModelInput,  # noqa: A002 - LangChain's name
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """As `invoke`."""
        return await super().ainvoke(input, config, stop=stop, **_with_thread(config, kwargs))

    def stream(
        self,
        input: LanguageModelInput,  # noqa: A002 - LangChain's name
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """As `invoke`, in pieces; an answer that is not read to its end is not recorded."""
        yield from super().stream(input, config, stop=stop, **_with_thread(config, kwargs))

    async def astream(
        self,
        input: LanguageModelInput,  # noqa: A002 - LangChain's name
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """As `stream`."""
        async for chunk in super().astream(input, config, stop=stop, **_with_thread(config, kwargs)):
            yield chunk

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        thread = kwargs.get(_THREAD)
        state = self._store.read(thread) if thread else {}
        prepared = self._engine.prepare(self._asked(messages, kwargs), state, Scope(), *self._known())
        model, given = self._bound(prepared, kwargs)
        start = time.perf_counter()
        result = model._generate(_sent(prepared), stop=stop, run_manager=run_manager, **given)
        done = _answered(prepared, result.generations[0].message, start)
        if thread and done.update:
            self._store.write(thread, done.update)
        emit(done.report)
        return _with_message(result, done.answer)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        thread = kwargs.get(_THREAD)
        state = await self._store.aread(thread) if thread else {}
        asked = self._asked(messages, kwargs)
        prepared = await self._engine.aprepare(asked, state, Scope(), *self._known())
        model, given = self._bound(prepared, kwargs)
        start = time.perf_counter()
        result = await model._agenerate(_sent(prepared), stop=stop, run_manager=run_manager, **given)
        done = _answered(prepared, result.generations[0].message, start)
        if thread and done.update:
            await self._store.awrite(thread, done.update)
        await aemit(done.report)
        return _with_message(result, done.answer)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        thread = kwargs.get(_THREAD)
        state = self._store.read(thread) if thread else {}
        prepared = self._engine.prepare(self._asked(messages, kwargs), state, Scope(), *self._known())
        model, given = self._bound(prepared, kwargs)
        start, whole = time.perf_counter(), None
        if prepared.rewrites or not _streams(model):
            result = model._generate(_sent(prepared), stop=stop, run_manager=run_manager, **given)
            done = _answered(prepared, result.generations[0].message, start)
            yield _as_chunk(done.answer)
        else:
            for chunk in model._stream(_sent(prepared), stop=stop, run_manager=run_manager, **given):
                whole = chunk if whole is None else whole + chunk
                yield chunk
            done = _answered(prepared, _summed(whole), start)
            yield _report_chunk(done)
        if thread and done.update:
            self._store.write(thread, done.update)
        emit(done.report)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        thread = kwargs.get(_THREAD)
        state = await self._store.aread(thread) if thread else {}
        asked = self._asked(messages, kwargs)
        prepared = await self._engine.aprepare(asked, state, Scope(), *self._known())
        model, given = self._bound(prepared, kwargs)
        start, whole = time.perf_counter(), None
        if prepared.rewrites or not _streams(model):
            result = await model._agenerate(_sent(prepared), stop=stop, run_manager=run_manager, **given)
            done = _answered(prepared, result.generations[0].message, start)
            yield _as_chunk(done.answer)
        else:
            async for chunk in model._astream(_sent(prepared), stop=stop, run_manager=run_manager, **given):
                whole = chunk if whole is None else whole + chunk
                yield chunk
            done = _answered(prepared, _summed(whole), start)
            yield _report_chunk(done)
        if thread and done.update:
            await self._store.awrite(thread, done.update)
        await aemit(done.report)

    def _known(self) -> tuple[int | None, TokenExact | None]:
        """Return what is known of the model before it is called."""
        return window_of(self.inner), token_exact(self.inner)

    def _asked(self, messages: list[BaseMessage], kwargs: Mapping[str, Any]) -> Asked:
        system = messages[0] if messages and isinstance(messages[0], SystemMessage) else None
        return Asked(
            messages=tuple(messages if system is None else messages[1:]),
            system=system,
            tools=Toolset.of(kwargs.get(_TOOLS) or ()),
            model=identity(self.inner),
            forced=forced_tool(kwargs.get(_CHOICE)),
        )

    def _bound(self, prepared: Prepared, kwargs: Mapping[str, Any]) -> tuple[BaseChatModel, dict[str, Any]]:
        """Return the model to call and the arguments to call it with."""
        given = {key: value for key, value in kwargs.items() if key not in _OURS}
        if prepared.settings:
            given[SETTINGS_KEY] = {**prepared.settings, "thread": kwargs.get(_THREAD) or ""}
        if not prepared.tools:
            return self.inner, given
        bound = self.inner.bind_tools(list(prepared.tools), tool_choice=kwargs.get(_CHOICE), **given)
        if isinstance(bound, RunnableBinding) and isinstance(bound.bound, BaseChatModel):
            return bound.bound, dict(bound.kwargs)
        raise ConfigurationError(
            f"{type(self.inner).__name__}.bind_tools returns a {type(bound).__name__} and no bound chat "
            "model, which cannot be wrapped: use AgentKVMiddleware"
        )


_OURS: Final = frozenset({_THREAD, _TOOLS, _CHOICE})


def wrap(
    model: Any,
    segments: Iterable[Any] = (),
    *,
    ledger_store: LedgerStore | None = None,
    profile: Profile = GENERIC,
    mode: Mode | str = Mode.ON,
    tokenizer: ChatTokenizer | None = None,
    unsupported_model_behavior: Unsupported = "warn",
    added_tools: AddedTools = "told",
    context_window: int | None = None,
    costs: Costs | None = None,
) -> AgentKVChatModel:
    """Return a chat model that tells the model what changed, for any Runnable or LangGraph graph.

    Parameters
    ----------
    model
        A chat model, before tools are bound.
    segments
        As of `AgentKVMiddleware`, but for fields that read the graph's state, context or store.
    ledger_store
        Where the ledger of each ``thread_id`` is kept; None keeps them in memory.
    profile, mode, tokenizer, unsupported_model_behavior, added_tools, context_window, costs
        As of `langchain_agentkv.engine.Engine`.

    Raises
    ------
    ConfigurationError
        It is no chat model, such as a compiled graph, or a part is malformed. The message holds what works.
    """
    if isinstance(model, RunnableBinding):
        raise ConfigurationError(
            "the model has arguments or tools bound to it already; wrap it first:\n"
            "    model = wrap(model, segments)\n"
            "    model = model.bind_tools(tools)"
        )
    if isinstance(model, AgentKVChatModel):
        raise ConfigurationError("the model is wrapped already; give all segments to one wrap")
    if not isinstance(model, BaseChatModel):
        raise ConfigurationError(
            f"a {type(model).__name__} cannot be wrapped: its model is built in. Wrap the model, then build "
            "with it:\n"
            "    model = wrap(model, segments)\n"
            "    graph = build_graph(model).compile()"
        )
    engine = Engine(
        segments,
        profile=profile,
        mode=mode,
        tokenizer=tokenizer,
        unsupported_model_behavior=unsupported_model_behavior,
        added_tools=added_tools,
        context_window=context_window,
        costs=costs,
    )
    check_needs(engine.declared.pulled, (), "a wrapped model")
    made = AgentKVChatModel(inner=model, profile=model.profile)
    made._engine = engine
    made._store = ledger_store or MemoryLedgerStore()
    return made


def _with_thread(config: RunnableConfig | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    thread = ensure_config(config).get("configurable", {}).get("thread_id")
    return kwargs if thread is None or _THREAD in kwargs else {**kwargs, _THREAD: str(thread)}


def _sent(prepared: Prepared) -> list[BaseMessage]:
    front = [] if prepared.system is None else [prepared.system]
    return [*front, *prepared.messages]


def _answered(prepared: Prepared, message: BaseMessage, start: float) -> Answered:
    if not isinstance(message, AIMessage):
        raise ConfigurationError(f"the model answered with a {type(message).__name__} and no AIMessage")
    return prepared.answered(message, time.perf_counter() - start)


def _with_message(result: ChatResult, message: AIMessage) -> ChatResult:
    first, *others = result.generations
    made = ChatGeneration(message=message, generation_info=first.generation_info)
    return ChatResult(generations=[made, *others], llm_output=result.llm_output)


def _streams(model: BaseChatModel) -> bool:
    kind = type(model)
    return kind._stream is not BaseChatModel._stream or kind._astream is not BaseChatModel._astream


def _summed(chunk: ChatGenerationChunk | None) -> AIMessage:
    made = AIMessage("") if chunk is None else message_chunk_to_message(chunk.message)
    return made if isinstance(made, AIMessage) else AIMessage(made.content)


def _as_chunk(message: AIMessage) -> ChatGenerationChunk:
    calls = [
        tool_call_chunk(name=call["name"], args=json.dumps(call["args"]), id=call["id"], index=index)
        for index, call in enumerate(message.tool_calls)
    ]
    told = message.model_dump(exclude={"type", "tool_calls", "invalid_tool_calls"})
    return ChatGenerationChunk(message=AIMessageChunk(**told, tool_call_chunks=calls))


def _report_chunk(done: Answered) -> ChatGenerationChunk:
    metadata = {REPORT_KEY: done.answer.response_metadata[REPORT_KEY]}
    return ChatGenerationChunk(message=AIMessageChunk(content="", response_metadata=metadata))
