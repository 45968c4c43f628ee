"""A stand-in tokenizer, for servers whose tokenizer the client does not have.

It estimates. Ids are good for comparing one prompt with another and for counting; no model knows them.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from agentkv.errors import TemplateError
from agentkv.tokenizer import WireMessage

_START: Final = "<|agentkv:start|>"
_END: Final = "<|agentkv:end|>"
_WIDESPREAD: Final = (
    *("<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|endoftext|>", "<|end_of_text|>", "<|begin_of_text|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    *("<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|observation|>", "<|end|>", "<|start|>"),
    *("<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
    *("<|start_of_role|>", "<|end_of_role|>", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>"),
    *("<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "[gMASK]", "<sop>", "<eop>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "<<SYS>>", "<</SYS>>"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<turn|>", "<|turn>"),
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
)
"""Texts that open or end a message in widespread chat templates; which of them the served one knows is not
known, so none of them is left whole in data."""
_CONTROL: Final = {_START: 0, _END: 1, **{text: place for place, text in enumerate(_WIDESPREAD, start=2)}}
_FIRST_ID: Final = 128
"""Ids below are kept for control tokens."""
_MOST_KNOWN: Final = 1 << 16

# Real vocabularies have long pieces of Latin words, shorter ones of numbers and of other alphabets, and from
# U+2E80 on about one for each character.
_WORDS: Final = r"[^\W\d\u0250-\U0010ffff]{1,4}|\d{1,2}|[^\W\d\u2e80-\U0010ffff]{1,2}"
_PIECE: Final = re.compile(
    "|".join(map(re.escape, _CONTROL))
    + rf"| {{0,15}}(?:{_WORDS}|[^\w\s]|[\u2e80-\U0010ffff])"
    + r"|\r?\n| {1,16}|\s"
)
_FOLLOWS: Final[Mapping[str, frozenset[str | None]]] = {
    "system": frozenset({None}),
    "user": frozenset({None, "system", "assistant", "tool"}),
    "assistant": frozenset({None, "system", "user", "assistant", "tool"}),
    "tool": frozenset({"assistant", "tool"}),
}
"""The roles that each role may stand behind; None is the beginning."""


class PlainTokenizer:
    """Estimates the tokens of an OpenAI-compatible server's model.

    One id stands for at most four characters of a word (two of a number, two outside the Latin script) with
    the spaces before them, or for one punctuation mark, line break or ideograph. It is a 31-bit digest of
    that piece, so it is the same in every process, and one pair of pieces in two billion shares it. Prompts
    can be compared and counted with such ids, within a factor of two of the small model's tokenizer on
    English prose and JSON, but never sent.

    The chat template takes only what servers take alike: a system message at the beginning, answers between
    the messages of users, and tool results behind an answer. Other places are refused, so that updates are
    folded into messages that are sent anyway.

    What reads as a control token of a widespread chat template counts as one, so that it is broken up in
    data; those of other templates are not known.
    """

    fingerprint: Final = hashlib.sha256(b"agentkv.backends.plain.PlainTokenizer/1").hexdigest()
    control_tokens: Final[Mapping[str, int]] = _CONTROL
    eos_ids: Final = frozenset({_CONTROL[_END]})

    def __init__(self) -> None:
        self._known: OrderedDict[int, str] = OrderedDict()
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Encode text; the control tokens' texts become their ids."""
        pieces = _PIECE.findall(text)
        ids = [_id_of(piece) for piece in pieces]
        with self._lock:
            for id_, piece in zip(ids, pieces, strict=True):
                if id_ >= _FIRST_ID:
                    self._known[id_] = piece
                    self._known.move_to_end(id_)
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids; control tokens are left out.

        Only pieces that this instance has encoded are known, and of those the 65,536 used last; others are
        shown as U+FFFD.
        """
        with self._lock:
            return "".join(self._known.get(id_, "\ufffd") for id_ in ids if id_ >= _FIRST_ID)

    def render(
        self,
        messages: Sequence[WireMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **template_arguments: Any,
    ) -> str:
        """Render messages; template arguments are ignored, as what a server does with them is not known.

        Raises
        ------
        TemplateError
            A role is unknown, a message stands where some server refuses it, such as a system message that
            is not the first or a second user message in a row, or a content is not a string.
        """
        parts = []
        if tools:
            listed = "\n".join(json.dumps(tool, sort_keys=True, ensure_ascii=False) for tool in tools)
            parts.append(_block("tools", listed))
        _check_order([message.get("role") for message in messages])
        for role, group in groupby(messages, key=lambda message: message["role"]):
            parts += _blocks(role, list(group))
        if add_generation_prompt:
            parts.append(f"{_START}assistant\n")
        return "".join(parts)


def _id_of(piece: str) -> int:
    control = _CONTROL.get(piece)
    if control is not None:
        return control
    digest = zlib.crc32(piece.encode(errors="surrogatepass")) & 0x7FFFFFFF
    return digest if digest >= _FIRST_ID else digest + _FIRST_ID


def _check_order(roles: Sequence[Any]) -> None:
    before: str | None = None
    for number, role in enumerate(roles):
        if role not in _FOLLOWS:
            known = ", ".join(_FOLLOWS)
            raise TemplateError(f"message {number} has the role {role!r}: use one of {known}")
        if before not in _FOLLOWS[role]:
            place = "at the beginning" if before is None else f"behind a message of the role {before!r}"
            raise TemplateError(
                f"message {number} ({role}) stands {place}, which not every server takes: fold its text into "
                "another message"
            )
        before = role


def _blocks(role: str, messages: Sequence[WireMessage]) -> Iterator[str]:
    """Write messages of one role in a row."""
    for number, message in enumerate(messages, start=1):
        # Results of one round count each other, so that an update, which answers no call, is not sent as one
        # more: servers refuse a result without a call.
        title = f"tool {number} of {len(messages)}" if role == "tool" else role
        yield _block(title, _body(message))


def _block(title: str, body: str) -> str:
    return f"{_START}{title}\n{body}{_END}\n"


def _body(message: WireMessage) -> str:
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise TemplateError(
            f"a content of the role {message['role']!r} is a {type(content).__name__}: give one string"
        )
    calls = [_call(call.get("function")) for call in message.get("tool_calls") or ()]
    return "\n".join([*([content] if content else []), *calls])


def _call(function: Any) -> str:
    if not isinstance(function, Mapping) or not {"name", "arguments"} <= function.keys():
        raise TemplateError(f"a tool call has the function {function!r}: give its name and its arguments")
    name, arguments = json.dumps(function["name"], ensure_ascii=False), function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>{{"name": {name}, "arguments": {text}}}</tool_call>'
