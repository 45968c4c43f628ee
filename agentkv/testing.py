"""A scripted backend for tests: it answers what it is told and counts cached tokens as a prefix cache does.

It runs no model. Its tokenizer makes one token of each UTF-8 byte, so that token counts are plain to see.

::

    backend = ScriptedBackend(["Hello.", "It was delivered."])
    with AgentKVContext(backend, [Policy("Be brief."), order]) as ctx:
        ctx.ask("Hi")
        order.status = "delivered"
        ctx.ask("Where is my parcel?")
    assert "delivered" in backend.prompts[-1]
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from agentkv.backends.base import (
    Capabilities,
    Completion,
    Delta,
    Event,
    FinishReason,
    PromptForm,
    Request,
    Usage,
)
from agentkv.errors import ContextWindowError
from agentkv.tokenizer import WireMessage
from agentkv.tokens import TokenIds
from agentkv.turn import predict_cached

_START: Final = "<|start|>"
_END: Final = "<|end|>"
_CONTROL: Final = {_START: 256, _END: 257}


class ByteTokenizer:
    """One token for each UTF-8 byte, two control tokens, and a plain chat template that knows tools."""

    fingerprint: Final = hashlib.sha256(b"agentkv.testing.ByteTokenizer/1").hexdigest()
    control_tokens: Final[Mapping[str, int]] = _CONTROL
    eos_ids: Final = frozenset({_CONTROL[_END]})

    def encode(self, text: str) -> list[int]:
        """Encode text; the control tokens' texts become their ids."""
        if "<|" not in text:
            return list(text.encode())
        ids: list[int] = []
        while text:
            found = [(at, token) for token in _CONTROL if (at := text.find(token)) >= 0]
            if not found:
                break
            at, token = min(found)
            ids += text[:at].encode()
            ids.append(_CONTROL[token])
            text = text[at + len(token) :]
        return [*ids, *text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids; control tokens are left out, and incomplete characters are marked."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def render(
        self,
        messages: Sequence[WireMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **template_arguments: Any,
    ) -> str:
        """Render messages; template arguments are written into the first line."""
        parts = []
        if template_arguments.pop("strftime_now", None) is not None or template_arguments:
            settings = {
                k: v for k, v in template_arguments.items() if isinstance(v, str | int | float | bool)
            }
            if settings:
                parts.append(f"{_START}settings\n{json.dumps(settings, sort_keys=True)}{_END}\n")
        if tools:
            listed = "\n".join(json.dumps(tool, sort_keys=True, ensure_ascii=False) for tool in tools)
            parts.append(f"{_START}tools\n{listed}{_END}\n")
        for message in messages:
            content = message.get("content") or ""
            for call in message.get("tool_calls") or ():
                content += f"<tool_call>{json.dumps(call['function'], ensure_ascii=False)}</tool_call>"
            parts.append(f"{_START}{message['role']}\n{content}{_END}\n")
        if add_generation_prompt:
            parts.append(f"{_START}assistant\n")
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class Scripted:
    """One scripted answer."""

    text: str = ""
    ids: tuple[int, ...] | None = None
    """Ids to generate instead of those of `text`."""
    error: BaseException | None = None
    """Raised after `fail_after` deltas."""
    fail_after: int = 0
    closes: bool = True
    """Whether the answer ends with the end-of-turn token."""
    read_tokens: int | None = None
    """What the server says it read, if not the whole prompt."""


Answer: TypeAlias = str | Scripted | Callable[[Request], str | Scripted]
"""An answer, or a function that gives it for a request."""


class ScriptedBackend:
    """Answers from a script and behaves like a paged prefix cache; runs no model.

    Parameters
    ----------
    answers
        One for each call, in order; the last is repeated for ever.
    block_size, context_window
        As `Capabilities`.
    prefill_s
        What `Completion.ttft_s` says for each computed prompt token, in seconds; no time passes.
    capacity
        How many sequences the cache holds for each salt; the least recently used is evicted.
    tokenizer
        Tokenizer and chat template; `ByteTokenizer` by default.
    prompts
        With `PromptForm.MESSAGES` it renders the messages of each request itself, as a chat endpoint does.
    served
        What it renders them with, if that is another template than the client's.

    Raises
    ------
    ValueError
        There is no answer.
    """

    def __init__(
        self,
        answers: Iterable[Answer] = ("OK.",),
        *,
        block_size: int = 1,
        context_window: int = 1_000_000,
        prefill_s: float = 0.0,
        capacity: int = 64,
        tokenizer: Any = None,
        prompts: PromptForm = PromptForm.IDS,
        served: Any = None,
    ) -> None:
        script = list(answers)
        if not script:
            raise ValueError("a scripted backend needs at least one answer")
        self._answers = itertools.chain(script, itertools.repeat(script[-1]))
        self._prefill_s = prefill_s
        self._capacity = capacity
        self._sequences: dict[str, list[tuple[TokenIds, int]]] = {}
        self._lock = threading.Lock()
        self.tokenizer: Any = tokenizer or ByteTokenizer()
        self._served: Any = served or self.tokenizer
        self.capabilities = Capabilities(
            name="scripted", context_window=context_window, block_size=block_size, prompts=prompts
        )
        self.requests: list[Request] = []
        """Every request so far."""

    @property
    def prompts(self) -> list[str]:
        """Every prompt so far as text, without control tokens."""
        return [self.tokenizer.decode(request.ids.tolist()) for request in self.requests]

    def stream(self, request: Request) -> Iterator[Event]:
        """Give the next scripted answer, one token at a time.

        Raises
        ------
        ContextWindowError
            Prompt and answer exceed the context window.
        """
        read = self._rendered(request)
        length = len(request.ids)
        if length + request.options.max_tokens > self.capabilities.context_window:
            raise ContextWindowError(
                f"{length} prompt tokens and {request.options.max_tokens} for the answer exceed the window "
                f"of {self.capabilities.context_window}"
            )
        with self._lock:
            self.requests.append(request)
            answer = next(self._answers)
            cached = self._cached(read)
        scripted = answer(request) if callable(answer) else answer
        if isinstance(scripted, str):
            scripted = Scripted(scripted)
        return self._events(read, scripted, cached)

    def prefill(self, request: Request) -> Usage:
        """Put a prompt into the cache; no answer of the script is used."""
        read = self._rendered(request)
        with self._lock:
            cached = self._cached(read)
        self._remember(read, ())
        return Usage(len(read.ids), cached, len(read.ids) - cached)

    def release(self, conversation: str) -> None:
        """Keep everything: a prefix cache does not know conversations."""

    def evict(self) -> None:
        """Drop everything that is cached."""
        with self._lock:
            self._sequences.clear()

    def _rendered(self, request: Request) -> Request:
        """Return the request with the ids that the server reads."""
        if self.capabilities.prompts is PromptForm.IDS:
            return request
        text = self._served.render(
            request.messages,
            tools=request.rendered_tools,
            add_generation_prompt=True,
            **request.template_arguments,
        )
        return replace(request, ids=TokenIds(self._served.encode(text)))

    def _events(self, request: Request, scripted: Scripted, cached: int) -> Iterator[Event]:
        length = len(request.ids)
        ids = list(scripted.ids) if scripted.ids is not None else self.tokenizer.encode(scripted.text)
        closing = sorted(self.tokenizer.eos_ids)[:1] if scripted.closes else []
        room = request.options.max_tokens
        ids, closing = ids[:room], closing if len(ids) < room else []
        given: list[int] = []
        shown = ""
        done = False
        try:
            for index, token in enumerate(ids):
                if scripted.error is not None and index >= scripted.fail_after:
                    raise scripted.error
                given.append(token)
                text = self.tokenizer.decode(given)
                whole = text if not text.endswith("\ufffd") else shown
                yield Delta(whole[len(shown) :], (token,))
                shown = whole
            if scripted.error is not None:
                raise scripted.error
            rest = self.tokenizer.decode(given)[len(shown) :]
            if rest:
                yield Delta(rest, ())
            done = True
        finally:
            if not done:
                self._remember(request, given)
        given += closing
        self._remember(request, given)
        read = length if scripted.read_tokens is None else scripted.read_tokens
        yield Completion(
            text=self.tokenizer.decode(given),
            ids=tuple(given),
            finish_reason=FinishReason.STOP if closing else FinishReason.LENGTH,
            usage=Usage(
                prompt_tokens=read,
                cached_tokens=min(cached, read),
                computed_tokens=read - min(cached, read),
                generated_tokens=len(given),
            ),
            ttft_s=(read - min(cached, read)) * self._prefill_s,
            duration_s=(read - min(cached, read)) * self._prefill_s,
            prompt_ids=request.ids if self.capabilities.prompts is PromptForm.MESSAGES else None,
        )

    def _cached(self, request: Request) -> int:
        block = self.capabilities.block_size
        most = 0
        for ids, computed in self._sequences.get(request.salt, ()):
            most = max(
                most, predict_cached(request.ids.common_prefix(ids), computed, len(request.ids), block)
            )
        return most

    def _remember(self, request: Request, generated: Sequence[int]) -> None:
        with self._lock:
            kept = self._sequences.setdefault(request.salt, [])
            ids = request.ids.extend(generated)
            kept[:] = [item for item in kept if item[0].common_prefix(ids) < len(item[0])]
            kept.append((ids, len(request.ids) + max(0, len(generated) - 1)))
            del kept[: -self._capacity]
