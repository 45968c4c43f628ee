"""A streamed answer, put together from the chunks of an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any, Final

from agentkv.backends.base import Completion, Delta, FinishReason, RawToolCall, Request, Usage
from agentkv.backends.connector import SpliceCall
from agentkv.errors import BackendError
from agentkv.reasoning import ReasoningSplitter
from agentkv.tokens import TokenIds

_REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
    "function_call": FinishReason.TOOL_CALLS,
}


class AnswerReader:
    """Reads one answer; text and chat completions alike.

    Parameters
    ----------
    request
        What was asked.
    splitter
        Takes reasoning out of the text; None where the server does.
    splices
        What the call says to a connector; the prompts that it sends along have answers of their own.
    """

    def __init__(
        self,
        request: Request,
        splitter: ReasoningSplitter | None = None,
        splices: SpliceCall | None = None,
    ) -> None:
        self._request = request
        self._splitter = splitter
        self.splices: Final = splices
        self._choices_before = 0 if splices is None else len(splices.primes)
        self._started = perf_counter()
        self._first: float | None = None
        self._last = self._started
        self._raw: list[str] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._ids: list[int] = []
        self._told_ids = False
        self._prompt_ids: list[int] | None = None
        self._calls: dict[int, dict[str, str]] = {}
        self._finish: str | None = None
        self._usage: Mapping[str, Any] | None = None
        self.stopped_by_string = False
        """Whether the answer was cut before a stop string."""

    @property
    def ids(self) -> tuple[int, ...] | None:
        """Every generated id so far; None if the server names none."""
        return tuple(self._ids) if self._told_ids else None

    @property
    def finish_reason(self) -> str | None:
        """In the server's word."""
        return self._finish

    @property
    def raw(self) -> str:
        """The text so far as the server sent it, reasoning that it did not take out included."""
        return "".join(self._raw)

    def feed(self, chunk: Mapping[str, Any]) -> Delta | None:
        """Take a chunk; returns what it adds to the answer, if anything.

        Raises
        ------
        BackendError
            The server gave the call up, or the chunk has not OpenAI's form.
        """
        try:
            return self._chunk(chunk)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise BackendError(
                "the server streamed a chunk that has not OpenAI's form "
                f"({type(error).__name__}); nothing was recorded"
            ) from error

    def _chunk(self, chunk: Mapping[str, Any]) -> Delta | None:
        if chunk.get("usage"):
            self._usage = chunk["usage"]
        if chunk.get("prompt_token_ids"):
            self._prompt_ids = list(chunk["prompt_token_ids"])
        for choice in chunk.get("choices") or ():
            if choice.get("index", 0) == self._choices_before:
                return self._choice(choice)
        return None

    def _choice(self, choice: Mapping[str, Any]) -> Delta | None:
        reason = choice.get("finish_reason")
        if reason in ("abort", "error"):
            raise BackendError(f"the server gave the call up ({reason}); nothing was recorded, ask again")
        self._finish = reason or self._finish
        self.stopped_by_string |= isinstance(choice.get("stop_reason"), str)
        part = choice.get("delta") or choice
        ids = tuple(choice.get("token_ids") or ())
        self._told_ids |= choice.get("token_ids") is not None
        text = part.get("text" if part is choice else "content") or ""
        reasoning = part.get("reasoning") or part.get("reasoning_content") or ""
        if not isinstance(text, str) or not isinstance(reasoning, str):
            raise TypeError("a piece of the answer is no text")
        for call in part.get("tool_calls") or ():
            self._call(call)
        if not (ids or text or reasoning or part.get("tool_calls")):
            return None
        self._last = perf_counter()
        self._first = self._first or self._last
        self._ids += ids
        self._raw.append(text)
        if self._splitter is not None:
            piece = self._splitter.push(text)
            text, reasoning = piece.text, reasoning + piece.reasoning
        self._text.append(text)
        self._reasoning.append(reasoning)
        return Delta(text, ids, reasoning)

    def _call(self, call: Mapping[str, Any]) -> None:
        place = call.get("index")
        kept = self._calls.setdefault(len(self._calls) if place is None else int(place), {})
        function = call.get("function") or {}
        kept["id"] = kept.get("id") or call.get("id") or ""
        kept["name"] = kept.get("name") or function.get("name") or ""
        kept["arguments"] = kept.get("arguments", "") + (function.get("arguments") or "")

    def rest(self) -> Delta | None:
        """Return what was held back as the possible beginning of a tag, at the end of the answer."""
        if self._splitter is None:
            return None
        piece = self._splitter.flush()
        self._text.append(piece.text)
        self._reasoning.append(piece.reasoning)
        return Delta(piece.text, (), piece.reasoning) if piece.text or piece.reasoning else None

    def completion(self, tool_calls: tuple[RawToolCall, ...] | None = None) -> Completion:
        """Return the whole answer.

        Parameters
        ----------
        tool_calls
            Those that were parsed apart; None takes the ones of the stream, if there are any.

        Raises
        ------
        BackendError
            The stream ended without a finish reason.
        """
        if self._finish is None:
            raise BackendError("the server ended the answer without a finish reason; nothing was recorded")
        if tool_calls is None and self._calls:
            tool_calls = tuple(
                RawToolCall(call["id"], call["name"], call["arguments"])
                for _, call in sorted(self._calls.items())
            )
        reason = _REASONS.get(self._finish, FinishReason.STOP)
        now = perf_counter()
        return Completion(
            text="".join(self._text),
            ids=self.ids,
            finish_reason=FinishReason.TOOL_CALLS if tool_calls else reason,
            usage=self._counted(),
            ttft_s=(self._first or now) - self._started,
            duration_s=(self._last if self._first else now) - self._started,
            tool_calls=tool_calls,
            reasoning="".join(self._reasoning),
            prompt_ids=None if self._prompt_ids is None else TokenIds(self._prompt_ids),
            counted=self._counts_cached(),
        )

    def _counts_cached(self) -> bool:
        if self._choices_before:
            # The usage sums up all prompts of the call.
            return False
        details = (self._usage or {}).get("prompt_tokens_details")
        return isinstance(details, Mapping) and details.get("cached_tokens") is not None

    def _counted(self) -> Usage:
        if self._choices_before:
            prompt_tokens = len(self._request.ids)
            return Usage(prompt_tokens, 0, prompt_tokens, generated_tokens=len(self._ids))
        usage = self._usage or {}
        prompt = usage.get("prompt_tokens")
        if prompt is None:
            prompt = len(self._prompt_ids if self._prompt_ids is not None else self._request.ids)
        details = usage.get("prompt_tokens_details") or {}
        cached = min(int(details.get("cached_tokens") or 0), int(prompt))
        return Usage(
            prompt_tokens=int(prompt),
            cached_tokens=cached,
            computed_tokens=int(prompt) - cached,
            generated_tokens=int(usage.get("completion_tokens") or len(self._ids)),
        )
