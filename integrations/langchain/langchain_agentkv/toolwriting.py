"""Tools for a model whose chat template knows none: they are written into the system text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from agentkv.errors import TemplateError
from agentkv.tokenizer import ChatTokenizer, WireMessage
from agentkv.tools import as_text

_FORM: Final = "tools in the system text/1"


class ToolWritingTokenizer:
    """A tokenizer whose chat template shows tools and calls, whatever the model's own does.

    Tools stand behind the system text, or in front of the first user's where the template takes no system
    message; calls stand in the answers' text.
    """

    def __init__(self, inner: ChatTokenizer) -> None:
        self._inner = inner
        mark = f"{inner.fingerprint} {_FORM}"
        self.fingerprint: Final = hashlib.sha256(mark.encode()).hexdigest()

    @property
    def inner(self) -> ChatTokenizer:
        """The model's own tokenizer."""
        return self._inner

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Those of the model's tokenizer."""
        return self._inner.control_tokens

    @property
    def eos_ids(self) -> frozenset[int]:
        """Those of the model's tokenizer."""
        return self._inner.eos_ids

    def encode(self, text: str) -> list[int]:
        """Encode plain text."""
        return self._inner.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids."""
        return self._inner.decode(ids)

    def render(
        self,
        messages: Sequence[WireMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **template_arguments: Any,
    ) -> str:
        """Render messages; raises `TemplateError` as the model's own template does."""

        def rendered(given: Iterable[WireMessage]) -> str:
            return self._inner.render(
                list(given), add_generation_prompt=add_generation_prompt, **template_arguments
            )

        plain = [_with_calls(message) for message in messages]
        if not tools:
            return rendered(plain)
        try:
            return rendered(_behind_system(plain, as_text(tools)))
        except TemplateError:
            return rendered(_before_user(plain, as_text(tools)))


def _with_calls(message: WireMessage) -> WireMessage:
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [written_call(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    made = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**made, "content": "\n".join([*filter(None, [message.get("content")]), *written])}


def written_call(name: str, arguments: object) -> str:
    """Return a call in the form that `agentkv.tools.as_text` asks for.

    Parameters
    ----------
    arguments
        An object, or its JSON.
    """
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {text}}}</tool_call>'


def _behind_system(messages: Sequence[WireMessage], text: str) -> list[WireMessage]:
    if messages and messages[0].get("role") == "system":
        own = messages[0].get("content")
        return [{**messages[0], "content": f"{own}\n\n{text}" if own else text}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _before_user(messages: Sequence[WireMessage], text: str) -> list[WireMessage]:
    made: list[WireMessage] = []
    front = text
    for message in messages:
        if front and message.get("role") == "user":
            made.append({**message, "content": f"{front}\n\n{message.get('content') or ''}"})
            front = ""
        else:
            made.append(message)
    return made
