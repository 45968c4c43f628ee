"""Any OpenAI-compatible server or gateway: chat messages, errata only."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, Unpack

from agentkv.backends.base import Capabilities, Completion, PromptForm, Request
from agentkv.backends.plain import PlainTokenizer
from agentkv.errors import (
    BackendAuthError,
    BackendRequestError,
    CapabilityError,
    MissingDependencyError,
)

try:
    from agentkv.backends import bodies
    from agentkv.backends.answers import AnswerReader
    from agentkv.backends.served import ServedBackend, check_tokens
    from agentkv.backends.serverinfo import ServedModel, choose_model, served_models
    from agentkv.http import Post, ServerOptions, ServerSettings
except ImportError as error:
    raise MissingDependencyError(
        f"OpenAIBackend needs httpx2 and tenacity ({error}): "
        "pip install 'agentkv-middleware[openai]', or '.[openai]' in a checkout"
    ) from error

if TYPE_CHECKING:
    from agentkv.tokenizer import ChatTokenizer

_NO_LIMIT: Final = 2**31 - 1
_UNSENT: Final = {"top_k": 0, "repetition_penalty": 1.0}
"""Options that are no part of OpenAI's, and the values at which they do nothing."""


class OpenAIBackend(ServedBackend):
    """Runs the model on any server that speaks OpenAI's chat completions.

    The server renders and tokenises the messages, so the client knows neither the prompt's ids nor what the
    cache holds of them, unless it is given the model's tokenizer. Without it numbers of new tokens are
    estimates, and cached tokens are reported as the server counts them but not predicted. Salts are not sent,
    so all conversations have to be of one tenant. Facts that change travel as errata; nothing is spliced.

    Parameters
    ----------
    base_url
        Address of the server, with or without a trailing ``/v1``.
    model
        What the server calls the model; None takes the only one that it lists.
    tokenizer
        The served model's, if the client has it: then prompts are counted and cached tokens predicted.
    context_window
        Most tokens of prompt and answer together; None takes what the server lists, else nothing is checked
        before the server does.
    block_size
        Tokens of a block of the server's prefix cache, for the prediction.
    routing_header
        Header that carries the routing key, by which a router keeps a conversation on its replica.
    limit_field
        The server's name for the most tokens of an answer: ``"max_tokens"`` or ``"max_completion_tokens"``.
    settings
        Fields of `ServerOptions`, such as ``api_key``, ``headers`` and ``deadline_s``.

    Raises
    ------
    ConfigurationError
        An argument is wrong.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        tokenizer: ChatTokenizer | None = None,
        *,
        context_window: int | None = None,
        block_size: int = 1,
        routing_header: str = "X-Session-ID",
        limit_field: str = "max_tokens",
        **settings: Unpack[ServerSettings],
    ) -> None:
        super().__init__(ServerOptions(base_url, **settings))
        check_tokens(block_size=block_size, context_window=context_window)
        self._asked = model
        self._tokenizer = PlainTokenizer() if tokenizer is None else tokenizer
        self._known_ids = tokenizer is not None
        self._window = context_window
        self._block_size = block_size
        self._routing_header = routing_header
        self._limit_field = limit_field
        self._found: ServedModel | None = None
        self._connecting = threading.Lock()

    def __repr__(self) -> str:
        return f"OpenAIBackend({self.url!r}, model={self._asked!r})"

    @property
    def capabilities(self) -> Capabilities:
        """What the server can do; it is asked for its models the first time.

        Raises
        ------
        BackendError
            It cannot be reached, or refuses the key.
        CapabilityError
            It serves no such model.
        """
        return Capabilities(
            name="openai",
            context_window=self._window or self._model().context_window or _NO_LIMIT,
            block_size=self._block_size,
            salts=False,
            prompts=PromptForm.MESSAGES,
            known_ids=self._known_ids,
        )

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The one given, or a stand-in that estimates."""
        return self._tokenizer

    @property
    def model(self) -> str:
        """What the server calls the model; raises as `capabilities`."""
        return self._model().name

    def _model(self) -> ServedModel:
        with self._connecting:
            if self._found is None:
                self._found = self._connect()
            return self._found

    def _connect(self) -> ServedModel:
        listed = self._http.get("/v1/models")
        if listed.is_success:
            return choose_model(served_models(self._http.value(listed)), self._asked, self.url)
        refusal = self._http.refusal("/v1/models", listed)
        if isinstance(refusal, BackendAuthError) and listed.status_code == 401:
            raise refusal
        if self._asked is None:
            raise CapabilityError(f"{self.url} lists no models ({refusal}): say which with model=")
        if isinstance(refusal, BackendRequestError | BackendAuthError):
            # Not every gateway lists its models.
            return ServedModel(self._asked, None, None)
        raise refusal

    def _check(self, request: Request) -> None:
        bodies.check_extra(request.options, frozenset(_UNSENT))
        bodies.check_tool_choice(request, PromptForm.MESSAGES)
        for name, off in _UNSENT.items():
            value = getattr(request.options, name)
            if value != off:
                raise CapabilityError(
                    f"option {name}={value!r}: not every OpenAI-compatible server knows it; if yours does, "
                    f"give it as extra={{{name!r}: {value!r}}}"
                )
        self._model()

    def _post(self, request: Request, reader: AnswerReader, answered: Any) -> Post:
        body = {
            "model": self.model,
            **bodies.sampling(request.options),
            **request.options.extra,
            **bodies.chat_fields(request),
        }
        if self._limit_field != "max_tokens":
            body[self._limit_field] = body.pop("max_tokens")
        return Post.json("/v1/chat/completions", body, {self._routing_header: bodies.routing_value(request)})

    def _reader(self, request: Request) -> AnswerReader:
        return AnswerReader(request)

    def _completed(self, request: Request, reader: AnswerReader, parsed: Any) -> Completion:
        return bodies.read_by_server(request, reader.completion())
