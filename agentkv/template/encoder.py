"""Messages to token ids, where a conversation only ever grows by its new messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, Final

from agentkv.errors import TemplateError
from agentkv.template.pieces import Piece, PieceTokenizer
from agentkv.template.probes import measure
from agentkv.template.shape import Render, Shape, StrayTextError, compile_shape
from agentkv.template.slots import MOST_SLOTS, Json, Slotting, filled, mark
from agentkv.template.traits import Acceptance, TemplateTraits
from agentkv.tokenizer import ChatTokenizer, WireMessage

_MOST_SHAPES: Final = 512
_ANSWER: Final = mark(MOST_SLOTS - 1)
_SYSTEM: Final = mark(MOST_SLOTS - 2)
_QUESTION: Final = mark(MOST_SLOTS - 3)
_FIRST_CALL: Final = MOST_SLOTS - 400
_MOST_CALLS: Final = 100


@dataclass(frozen=True, slots=True)
class _Tail:
    """What follows an answer, and how the answer's end is recognised in generated ids."""

    shape: Shape
    close_ids: tuple[int, ...]


class TemplateEncoder:
    """Encodes a conversation turn by turn: what was sent or generated is never rendered or tokenised again.

    Parameters
    ----------
    tokenizer
        The model's tokenizer and chat template.
    traits
        What the template does; measured here if not given.
    template_arguments
        Further arguments of the template, such as ``enable_thinking`` or a pinned date
        (`agentkv.template.pinned_date`); fixed for the encoder's life, as a change moves the prefix.

    Raises
    ------
    TemplateError
        There is no chat template, or it refuses even a single user message.

    Notes
    -----
    Data is data: a message, an argument or a tool's description that holds a control token's text is sent as
    ordinary tokens that decode to the same text.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        traits: TemplateTraits | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._arguments = dict(template_arguments or {})
        self.traits: Final = traits or measure(tokenizer, template_arguments=self._arguments)
        self._pieces = PieceTokenizer(tokenizer)
        self._openings: dict[str, Shape] = {}
        self._tails: dict[str, _Tail] = {}
        self._chunks: dict[str, list[int]] = {}

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer that is used."""
        return self._tokenizer

    def opening(
        self, messages: Sequence[WireMessage], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Encode a conversation's first messages, the opening of the answer included.

        A leading system message that the template refuses or drops is folded into the first user message.

        Raises
        ------
        TemplateError
            The template refuses or drops a message, or has no place for tools.
        """
        if tools and not self.traits.tools:
            raise TemplateError(
                f"the chat template does not show tools ({len(tools)} given): describe them in the system "
                "message"
            )
        slotting = Slotting(self._pieces.holds_control)
        shaped = slotting.messages(self.folded(messages))
        shaped_tools = slotting.tools(tools) if tools else None
        key = json.dumps([shaped, shaped_tools], ensure_ascii=False)
        shape = self._openings.get(key)
        if shape is None:
            shape = compile_shape(
                lambda fill: self._render(filled(shaped, fill), filled(shaped_tools, fill)),
                slotting.slots,
                self._pieces,
            )
            _remember(self._openings, key, shape)
        return self._pieces.encode(shape.pieces(slotting.slots), continues=False)

    def extension(self, generated: Sequence[int], messages: Sequence[WireMessage]) -> list[int]:
        """Encode what follows an answer: the rest of its close, new messages, the opening of the next answer.

        Parameters
        ----------
        generated
            Ids of the last answer, as the model made them. Where they already end with the close of an answer
            or a part of it, that part is not repeated.
        messages
            What is new, in order; results of one tool round first and together.

        Raises
        ------
        TemplateError
            The template refuses or drops one of the messages in this place.
        """
        if not messages:
            raise TemplateError("a turn adds no message: give at least one")
        slotting = Slotting(self._pieces.holds_control)
        shaped = slotting.messages(messages)
        key = json.dumps(shaped, ensure_ascii=False)
        tail = self._tails.get(key)
        if tail is None:
            tail = self._compile_tail(shaped, slotting)
            _remember(self._tails, key, tail)
        ids = self._pieces.encode(tail.shape.pieces(slotting.slots), continues=True)
        return ids[self._given(generated, ids, tail.close_ids) :]

    def assistant(self, text: str) -> list[int]:
        """Encode an answer's text whose ids are not known; no control id can come from it."""
        return self._pieces.encode([Piece(text, is_data=True)], continues=True)

    def chunk(self, text: str) -> list[int]:
        """Encode a text that is compiled on its own, as `assistant`; remembered for later turns."""
        ids = self._chunks.get(text)
        if ids is None:
            ids = self.assistant(text)
            _remember(self._chunks, text, ids)
        return ids

    def render_all(
        self, messages: Sequence[WireMessage], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Render and tokenise the whole conversation anew, as a server does with messages.

        For comparison, and for templates that are not append-only. Unlike the other methods this one gives
        control tokens in data their power, as such servers do.

        Raises
        ------
        TemplateError
            The template refuses the messages.
        """
        return self._tokenizer.encode(self._render(messages, tools))

    @cached_property
    def canonical(self) -> bool:
        """Whether opening and extension give the very ids of the rendered whole, measured on plain text."""
        first: list[WireMessage] = [{"role": "user", "content": "What is new?"}]
        if self.traits.leading_system is Acceptance.ACCEPTED:
            first.insert(0, {"role": "system", "content": "Be brief, and kind."})
        answer = "Nothing. It is quiet."
        more: list[WireMessage] = [{"role": "user", "content": "Good\n  night!"}]
        opening, extension = self.opening(first), self.extension([], more)
        whole = self.render_all([*first, {"role": "assistant", "content": answer}, *more])
        between = whole[len(opening) : len(whole) - len(extension)]
        return (
            self.render_all(first) == opening
            and whole == [*opening, *between, *extension]
            and self._tokenizer.decode(between).endswith(answer)
        )

    def _render(
        self, messages: Sequence[WireMessage], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        return self._tokenizer.render(
            messages, tools=tools or None, add_generation_prompt=True, **self._arguments
        )

    def folded(self, messages: Sequence[WireMessage]) -> Sequence[WireMessage]:
        """Return messages with the leading system text in the first user's, where the template takes none.

        Raises
        ------
        TemplateError
            There is no user message behind it.
        """
        if not messages or messages[0].get("role") != "system":
            return messages
        if self.traits.leading_system not in (Acceptance.REFUSED, Acceptance.DROPPED):
            return messages
        if len(messages) < 2 or messages[1].get("role") != "user":
            raise TemplateError(
                f"the chat template takes no system message ({self.traits.leading_system}): let a user "
                "message follow it, so that it can be folded into that"
            )
        system, user = messages[0].get("content") or "", messages[1].get("content") or ""
        return [{**messages[1], "content": f"{system}\n\n{user}" if system else user}, *messages[2:]]

    def _given(self, generated: Sequence[int], ids: Sequence[int], close: tuple[int, ...]) -> int:
        """Count the leading ids of the close that the answer already ends with."""
        for count in range(min(len(close), len(ids), len(generated)), 0, -1):
            if list(generated[-count:]) == list(ids[:count]):
                return count
        ended = bool(generated) and generated[-1] in self._tokenizer.eos_ids
        return 1 if ended and ids and ids[0] in self._pieces.control_ids and close[:1] == (ids[0],) else 0

    def _compile_tail(self, shaped: Sequence[dict[str, Json]], slotting: Slotting) -> _Tail:
        stray: StrayTextError | None = None
        failed: TemplateError | None = None
        for base in self._bases(shaped):
            if stray and "tool_calls" not in base[-1]:
                # Behind a plain answer such text would be missing without a word.
                break
            try:
                cut, close = self._cut(base)
                shape = compile_shape(self._tail_of(base, shaped, cut), slotting.slots, self._pieces)
            except StrayTextError as error:
                stray = error if "tool_calls" in base[-1] else stray
                failed = error
            except TemplateError as error:
                failed = error
            else:
                return _Tail(shape, tuple(self._tokenizer.encode(close)))
        raise stray or failed or TemplateError("the chat template takes no further messages")

    def _tail_of(
        self, base: Sequence[WireMessage], shaped: Sequence[dict[str, Json]], cut: Callable[[str], str]
    ) -> Render:
        return lambda fill: cut(self._render([*base, *filled(shaped, fill)]))

    def _bases(self, shaped: Sequence[dict[str, Json]]) -> Iterator[list[WireMessage]]:
        """Yield conversations for new messages to follow, likeliest first; all end with a marked answer."""
        user: WireMessage = {"role": "user", "content": _QUESTION}
        system: WireMessage = {"role": "system", "content": _SYSTEM}
        plain: WireMessage = {"role": "assistant", "content": _ANSWER}
        leads: list[list[WireMessage]] = [[user]]
        if self.traits.leading_system not in (Acceptance.REFUSED, Acceptance.DROPPED):
            leads.insert(0, [system, user])
        results = list(takewhile(lambda message: message["role"] == "tool", shaped))
        if results:
            for arguments in ({"q": _ANSWER}, json.dumps({"q": _ANSWER})):
                for lead in leads:
                    yield [*lead, _calling(results, arguments)]
        for lead in leads:
            yield [*lead, plain]

    def _cut(self, base: list[WireMessage]) -> tuple[Callable[[str], str], str]:
        """Find how to cut off all before an answer's close, and the close.

        Returns
        -------
        tuple
            A function from rendered text to what follows the answer, and the answer's close.
        """
        close = self.traits.assistant_close
        if not base[-1].get("tool_calls"):
            return _behind_answer, close
        alone = self._tokenizer.render(base, add_generation_prompt=False, **self._arguments)
        ending = _behind_answer(alone)
        if not close or not ending.endswith(close):
            # Some formats end a call with a token of its own.
            close = _last_control(ending, self._tokenizer.control_tokens)
        kept = len(ending) - len(close)

        def cut(text: str) -> str:
            tail = _behind_answer(text)
            if not tail.startswith(ending[:kept] + close):
                raise TemplateError("the chat template rewrites a tool call once its result is there")
            return tail[kept:]

        return cut, close


def _calling(results: Sequence[Mapping[str, Json]], arguments: Json) -> WireMessage:
    """Build an answer with as many calls as there are results; only the last holds the answer's mark."""
    if len(results) > _MOST_CALLS:
        raise TemplateError(f"{len(results)} tool results in one turn: send at most {_MOST_CALLS}")
    calls: list[Json] = []
    for number, result in enumerate(results):
        own = arguments if number == len(results) - 1 else ({} if isinstance(arguments, dict) else "{}")
        name = result.get("name") or mark(_FIRST_CALL + 2 * number)
        call_id = result.get("tool_call_id") or mark(_FIRST_CALL + 2 * number + 1)
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": own}})
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _behind_answer(text: str) -> str:
    at = text.rfind(_ANSWER)
    if at < 0:
        raise TemplateError("the chat template drops the answer that new messages follow")
    return text[at + len(_ANSWER) :]


def _last_control(text: str, controls: Mapping[str, int]) -> str:
    """Return `text` from its last control token on; empty if it holds none."""
    at = max((text.rfind(control) for control in controls), default=-1)
    return text[at:] if at >= 0 else ""


def _remember(cache: dict[str, Any], key: str, value: object) -> None:
    if len(cache) >= _MOST_SHAPES:
        cache.clear()
    cache[key] = value
