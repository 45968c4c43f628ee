"""A chat model over any backend that takes token ids: nothing sent or generated is tokenised again."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, Self

from agentkv.backends.base import (
    AsyncBackend,
    Backend,
    Completion,
    Delta,
    Event,
    Request,
    SamplingOptions,
    SpliceSpec,
)
from agentkv.errors import BackendError, ConfigurationError
from agentkv.options import sampling_of
from agentkv.salts import Namespace, process_key
from agentkv.segments import Splicing
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig, ensure_config, run_in_executor
from pydantic import ConfigDict, Field, SecretBytes

from langchain_agentkv.answering import Pieces, Reading, message_of, repaired
from langchain_agentkv.constraining import held
from langchain_agentkv.exact import SETTINGS_KEY, TokenExact, tool_schemas
from langchain_agentkv.stamps import Stamp, salt_check, short

_THREAD: Final = "agentkv_thread"
_UNUSED: Final = frozenset({"strict", "parallel_tool_calls", "stream", "ls_structured_output_format"})
"""Arguments that LangChain passes to any model, and that change no answer here."""


class ChatAgentKV(BaseChatModel):
    """A model that is sent token ids: embedded in this process, or on a vLLM server.

    Each answer keeps its ids in its response metadata, and the next prompt goes on from them. So a prompt
    begins with the ids of the one before it, whoever kept the messages meanwhile. With `AgentKVMiddleware` or
    `wrap` the reports also say how many tokens were predicted to be cached, and compiled skills and documents
    are spliced where the backend can.

    `ChatVLLM` is its counterpart for servers that take messages only.

    Parameters
    ----------
    backend
        Any backend of agentkv that takes token ids. None makes a `VLLMBackend` of `base_url` and `model`.

    Raises
    ------
    ConfigurationError
        There is neither a backend nor an address, or an option is out of range.

    ::

        model = ChatAgentKV(backend=TransformersBackend.from_pretrained("smollm2-135m"))
        model = ChatAgentKV(model="Qwen/Qwen3-8B", base_url="http://127.0.0.1:8000")
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, ignored_types=(cached_property,))

    backend: Any = Field(default=None, exclude=True, repr=False)
    model: str | None = None
    """The model's name on the server; for a backend in this process, what it is called in traces."""
    base_url: str | None = None
    """Address of a vLLM server, where no backend is given."""
    tenant: str = "default"
    """Whose conversations these are; prefix caches are never shared between tenants."""
    salt_key: SecretBytes | None = None
    """Secret of at least 16 bytes that salts are made with; None makes one that this process keeps."""
    splicing: Splicing = Splicing.AUTO
    """Whether compiled skills and documents are spliced, where they do not say it themselves."""
    template_arguments: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, such as ``{"enable_thinking": False}``."""
    max_tokens: int = 512
    """Most tokens of an answer."""
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] | None = None
    constrain: Literal["auto", "always", "never"] = "auto"
    """Whether calls are held to the tools' schemas where this process runs the model: ``"auto"`` if
    llguidance is installed, ``"always"`` requires it. Servers hold calls to schemas by themselves where one
    is required."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Here and not in a validator, where pydantic would make another error of ours.
        if self.backend is None:
            if self.base_url is None:
                raise ConfigurationError(
                    "ChatAgentKV has no backend: give backend=TransformersBackend(...), or the base_url of a "
                    "vLLM server"
                )
            from agentkv.backends import VLLMBackend

            self.backend = VLLMBackend(self.base_url, self.model)
        # Not by its protocol: that would ask a server for what it can do.
        if isinstance(self.backend, type) or not hasattr(self.backend, "stream"):
            raise ConfigurationError(f"{self.backend!r} is no backend; give an instance of one")
        self._sampling()
        self.token_exact.salt()

    @cached_property
    def token_exact(self) -> TokenExact:
        """How the model is sent token ids."""
        key = process_key() if self.salt_key is None else self.salt_key.get_secret_value()
        arguments = dict(self.template_arguments)
        return TokenExact(self.backend, self.tenant, key, self.splicing, arguments, self.max_tokens)

    def for_tenant(self, tenant: str, salt_key: bytes) -> Self:
        """Return the same model for another tenant, whose conversations never share KV with this one's."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**given, "tenant": tenant, "salt_key": SecretBytes(salt_key)})

    @property
    def _llm_type(self) -> str:
        return "agentkv"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        name = type(self.backend).__name__
        return {"model": self.model, "backend": name, "tenant": self.tenant, **self._options()}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "agentkv"
        params["ls_model_name"] = kwargs.get("model") or self.model or type(self.backend).__name__
        return params

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: Any = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Bind functions that the model may call.

        Parameters
        ----------
        tools
            Functions, LangChain tools, pydantic classes or schemas.
        tool_choice
            ``"auto"``, ``"none"``, ``"any"`` or ``"required"``, True, or the name of a tool.

        Raises
        ------
        ConfigurationError
            A tool is none that can be called here, or the choice names none of them.
        """
        schemas = tool_schemas(tools)
        choice = _choice(tool_choice, [schema["function"]["name"] for schema in schemas])
        more = {} if choice is None else {"tool_choice": choice}
        return self.bind(tools=list(schemas), **more, **kwargs)

    def invoke(
        self,
        input: LanguageModelInput,  # noqa: A002 - LangChain's name
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """Answer; the KV is kept for the configuration's ``thread_id``."""
        return repaired(super().invoke(input, config, stop=stop, **_with_thread(config, kwargs)))

    async def ainvoke(
        self,
        input: LanguageModelInput,  # noqa: A002 - LangChain's name
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """As `invoke`."""
        return repaired(await super().ainvoke(input, config, stop=stop, **_with_thread(config, kwargs)))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(messages, stop, kwargs)
        return _result(message_of(_completion(call.backend.stream(call.request)), call.reading))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = await run_in_executor(None, self._call, messages, stop, kwargs)
        if isinstance(call.backend, AsyncBackend):
            async for event in call.backend.astream(call.request):
                if isinstance(event, Completion):
                    return _result(message_of(event, call.reading))
            raise _unfinished()
        completion = await run_in_executor(None, lambda: _completion(call.backend.stream(call.request)))
        return _result(message_of(completion, call.reading))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self._call(messages, stop, kwargs)
        pieces = Pieces(call.reading)
        for event in call.backend.stream(call.request):
            chunk = _chunk(pieces, event)
            if chunk is not None:
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
            if isinstance(event, Completion):
                return
        raise _unfinished()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = await run_in_executor(None, self._call, messages, stop, kwargs)
        pieces = Pieces(call.reading)
        async for event in _events(call):
            chunk = _chunk(pieces, event)
            if chunk is not None:
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
            if isinstance(event, Completion):
                return
        raise _unfinished()

    def _call(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, given: Mapping[str, Any]
    ) -> _Call:
        """Return what to ask of the backend."""
        kwargs = {key: value for key, value in given.items() if key not in _UNUSED}
        thread = kwargs.pop(_THREAD, None)
        settings = kwargs.pop(SETTINGS_KEY, {})
        tools = tool_schemas(kwargs.pop("tools", ()))
        if stop:
            kwargs["stop"] = tuple(stop)
        options = sampling_of(self._sampling(), {k: v for k, v in kwargs.items() if v is not None})
        exact = self.token_exact
        written = exact.write(messages, tools)
        salt = exact.salt(Namespace(settings.get("namespace", "exact")), settings.get("generation", 0))
        known = [*tools, *settings.get("added", ())]
        named = [tool["function"]["name"] for tool in known]
        request = Request(
            ids=written.ids,
            conversation=_conversation(settings.get("thread") or thread or _thread(None), messages),
            salt=salt,
            options=options,
            tools=tuple(known),
            rendered_tools=tools,
            template_arguments=exact.template_arguments,
            expected_cached_tokens=settings.get("expected_cached_tokens", 0),
            tenant=self.tenant,
            splices=tuple(SpliceSpec(**splice) for splice in settings.get("splices", ())),
        )
        reading = Reading(
            turn=1 + sum(isinstance(message, AIMessage) for message in messages),
            tools=named if named and options.tool_choice != "none" else None,
            stamp=Stamp((), short(exact.tokenizer.fingerprint), "", salt_check(salt), written.day),
            name=self._name(),
        )
        backend, request = held(self.backend, request, self.constrain)
        return _Call(backend, request, reading)

    def _name(self) -> str:
        served = getattr(self.backend, "model", None)
        name = self.model or (served if isinstance(served, str) else self.backend.capabilities.name)
        return str(name)

    def _options(self) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed")
        return {name: getattr(self, name) for name in names}

    def _sampling(self) -> SamplingOptions:
        return SamplingOptions(**self._options(), stop=tuple(self.stop or ()))


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a backend."""

    backend: Backend
    request: Request
    reading: Reading


def _choice(choice: Any, names: Sequence[str]) -> str | None:
    """Return a tool choice as `SamplingOptions` takes it."""
    if choice is None or choice is False or choice == "auto":
        return None
    if choice in (True, "any", "required"):
        return "required"
    if isinstance(choice, Mapping):
        choice = choice.get("function", choice).get("name")
    if choice == "none" or choice in names:
        return str(choice)
    known = ", ".join(names) or "none"
    raise ConfigurationError(f"tool_choice={choice!r} names no tool; tools are: {known}")


def _events(call: _Call) -> AsyncIterator[Event]:
    if isinstance(call.backend, AsyncBackend):
        return call.backend.astream(call.request)
    return _threaded(call.backend.stream(call.request))


async def _threaded(events: Iterator[Event]) -> AsyncIterator[Event]:
    while (event := await run_in_executor(None, lambda: next(events, None))) is not None:
        yield event


def _completion(events: Iterator[Event]) -> Completion:
    for event in events:
        if isinstance(event, Completion):
            return event
    raise _unfinished()


def _unfinished() -> BackendError:
    return BackendError("the backend ended a call without a completion; the call can be made again")


def _chunk(pieces: Pieces, event: Event) -> ChatGenerationChunk | None:
    message = pieces.push(event) if isinstance(event, Delta) else pieces.last(event)
    return None if message is None else ChatGenerationChunk(message=message)


def _result(message: AIMessage) -> ChatResult:
    return ChatResult(generations=[ChatGeneration(message=message)])


def _with_thread(config: RunnableConfig | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    thread = _thread(config)
    return {**kwargs, _THREAD: thread} if thread and _THREAD not in kwargs else kwargs


def _thread(config: RunnableConfig | None) -> str:
    return str(ensure_config(config).get("configurable", {}).get("thread_id") or "")


def _conversation(thread: str, messages: Sequence[BaseMessage]) -> str:
    """Return where a conversation's KV is kept: apart for each thread, and for each agent in it."""
    first = "\n".join(str(message.content) for message in messages[:2])
    return hashlib.sha256(f"{thread}\n{first}".encode()).hexdigest()[:32]
