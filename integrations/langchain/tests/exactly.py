"""What the tests of token-exact models share: a scripted backend with a template that knows no tools."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from agentkv.backends.base import Request
from agentkv.testing import ByteTokenizer, ScriptedBackend
from agentkv.tokens import TokenIds

from langchain_agentkv import ChatAgentKV


class PlainByteTokenizer(ByteTokenizer):
    """As `ByteTokenizer`, but its template writes neither tools nor calls."""

    fingerprint: Any = hashlib.sha256(b"plain bytes").hexdigest()

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **template_arguments: Any,
    ) -> str:
        plain = [{"role": m["role"], "content": m.get("content")} for m in messages]
        return super().render(plain, add_generation_prompt=add_generation_prompt, **template_arguments)


def model(answers: Iterable[Any], *, options: dict[str, Any] | None = None, **backend: Any) -> ChatAgentKV:
    """Return a token-exact model on a scripted backend."""
    return ChatAgentKV(backend=ScriptedBackend(answers, **backend), **(options or {}))


def requests(chat: ChatAgentKV) -> list[Request]:
    """Return what the model's backend was asked."""
    found: list[Request] = chat.backend.requests
    return found


def prompts(chat: ChatAgentKV) -> list[str]:
    """Return the prompts as text, control tokens left out."""
    found: list[str] = chat.backend.prompts
    return found


def generated(chat: ChatAgentKV, text: str) -> list[int]:
    """Return the ids that a scripted answer is made of."""
    tokenizer = chat.backend.tokenizer
    return [*tokenizer.encode(text), *tokenizer.eos_ids]


def extends(before: TokenIds, answer: Sequence[int], after: TokenIds) -> bool:
    """Tell whether a prompt begins with the one before it and its answer, id for id."""
    whole = before.extend(answer)
    return after.common_prefix(whole) == len(whole)


def all_extend(chat: ChatAgentKV, answers: Sequence[str]) -> list[bool]:
    """Tell of each prompt but the first whether it extends the one before and its answer."""
    asked = requests(chat)
    return [
        extends(a.ids, generated(chat, text), b.ids)
        for (a, b), text in zip(pairwise(asked), answers, strict=False)
    ]
