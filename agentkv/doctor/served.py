"""The chat template that a server renders with, as a tokenizer that can be measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Final

from agentkv.backends.bodies import wire_message
from agentkv.backends.parsing import RENDER
from agentkv.errors import BackendError, CapabilityError, TemplateError
from agentkv.http import HttpClient, Post
from agentkv.tokenizer import ChatTokenizer, WireMessage

_HELLO: Final[Sequence[WireMessage]] = ({"role": "user", "content": "Hello"},)
_REFUSALS: Final = frozenset({400, 422, 500})
"""How servers answer where the template raises."""
_TOKENIZE: Final = "/tokenize"


class ServedTemplate:
    """A `ChatTokenizer` whose template is the server's: it renders there, so it shows what requests become.

    Parameters
    ----------
    http
        Reaches the server.
    model
        The served name.
    tokenizer
        The client's tokenizer, if there is one: for control tokens, and to decode where the server does not.
    """

    def __init__(self, http: HttpClient, model: str, tokenizer: ChatTokenizer | None = None) -> None:
        self._http = http
        self._model = model
        self._local = tokenizer
        self._rendered: dict[str, list[int] | TemplateError] = {}

    @cached_property
    def path(self) -> str | None:
        """The endpoint that renders: that of chat requests, or ``/tokenize``; None if neither answers."""
        for path in (RENDER, _TOKENIZE):
            if self._answer(path, {"messages": list(_HELLO)}).is_success:
                return path
        return None

    @property
    def fingerprint(self) -> str:
        """Empty: what a server has cannot be digested."""
        return ""

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Those of the client's tokenizer."""
        return {} if self._local is None else self._local.control_tokens

    @property
    def eos_ids(self) -> frozenset[int]:
        """Those of the client's tokenizer."""
        return frozenset() if self._local is None else self._local.eos_ids

    def encode(self, text: str) -> list[int]:
        """Encode as the server does."""
        body = {"prompt": text, "add_special_tokens": False}
        return self._ids(self._http.value(self._answer(_TOKENIZE, body)))

    def decode(self, ids: Sequence[int]) -> str:
        """Decode as the server does; control tokens are kept.

        Raises
        ------
        CapabilityError
            Neither the server nor the client can.
        """
        answer = self._answer("/detokenize", {"tokens": list(ids)})
        if answer.is_success:
            return str(self._http.value(answer).get("prompt", ""))
        if self._local is None:
            raise CapabilityError(f"{self._http.url} decodes no ids, and there is no tokenizer here")
        return decoded(self._local, ids)

    def render(
        self,
        messages: Sequence[WireMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **template_arguments: Any,
    ) -> str:
        """Have the server render messages; a clock among the arguments cannot be sent and is left out.

        Raises
        ------
        TemplateError
            The server refuses the messages; its words are in the message.
        CapabilityError
            It renders nothing at all.
        BackendError
            It cannot be asked.
        """
        arguments = {name: value for name, value in template_arguments.items() if not callable(value)}
        ids = self.ids(messages, tools=tools, add_generation_prompt=add_generation_prompt, **arguments)
        if self._local is not None:
            # Decoding can lose or add white space; a text that encodes to the very ids is the exact one.
            with suppress(TemplateError):
                text = self._local.render(
                    messages, tools=tools, add_generation_prompt=add_generation_prompt, **arguments
                )
                if self._local.encode(text) == ids:
                    return text
        return self.decode(ids)

    def ids(
        self,
        messages: Sequence[WireMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tool_choice: str | None = None,
        **template_arguments: Any,
    ) -> list[int]:
        """As `render`, to ids."""
        body: dict[str, Any] = {
            "messages": [wire_message(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        if tools:
            body["tools"] = [dict(tool) for tool in tools]
        if tool_choice is not None:
            body["tool_choice"] = tool_choice
        if template_arguments:
            body["chat_template_kwargs"] = template_arguments
        key = json.dumps(body)
        if key not in self._rendered:
            self._rendered[key] = self._asked(body)
        found = self._rendered[key]
        if isinstance(found, TemplateError):
            raise found
        return found

    def _asked(self, body: Mapping[str, Any]) -> list[int] | TemplateError:
        if self.path is None:
            raise CapabilityError(f"{self._http.url} renders no messages: neither {RENDER} nor {_TOKENIZE}")
        answer = self._answer(self.path, body)
        if self.path == RENDER and "tools" in body and "tool_choice" not in body and not answer.is_success:
            # Without a tool parser a request with tools is refused before its template is looked at.
            answer = self._answer(_TOKENIZE, body)
        if answer.status_code in _REFUSALS:
            return TemplateError(str(self._http.refusal(self.path, answer)))
        return self._ids(self._http.value(answer))

    def _answer(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._http.try_post(Post.json(path, {"model": self._model, **body}))

    def _ids(self, value: Any) -> list[int]:
        found = (value.get("token_ids") or value.get("tokens")) if isinstance(value, Mapping) else None
        if not isinstance(found, list):
            raise BackendError(f"{self._http.url} tells no ids of what it renders or encodes")
        return found


def decoded(tokenizer: ChatTokenizer, ids: Sequence[int]) -> str:
    """Decode ids, control tokens included."""
    texts = {id_: text for text, id_ in tokenizer.control_tokens.items()}
    parts: list[str] = []
    run: list[int] = []
    for id_ in [*ids, None]:
        if id_ is not None and id_ not in texts:
            run.append(id_)
            continue
        if run:
            parts.append(tokenizer.decode(run))
            run = []
        if id_ is not None:
            parts.append(texts[id_])
    return "".join(parts)
