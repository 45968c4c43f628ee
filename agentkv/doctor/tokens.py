"""Checks that client and server mean the same ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from agentkv.backends.connecting import SAMPLE
from agentkv.doctor.findings import Outcome, failed, ok, unchecked, warning
from agentkv.doctor.session import Session
from agentkv.errors import BackendRequestError, CapabilityError, TemplateError
from agentkv.tokenizer import ChatTokenizer, WireMessage

TOOLS: Final[Sequence[Mapping[str, Any]]] = (
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Looks an order up; \"quoted\" <b>text</b> & 'more', né 1.",
            "parameters": {
                "type": "object",
                "properties": {"order": {"type": "string", "description": "Its number."}},
                "required": ["order"],
            },
        },
    },
)
_MESSAGES: Final[Sequence[WireMessage]] = (
    {"role": "user", "content": "Where is\n\nmy  parcel? 你好 €"},
    {"role": "assistant", "content": "On its way."},
    {"role": "user", "content": "Since when?"},
)
_TEXTS: Final[Mapping[str, str]] = {
    "plain text": SAMPLE,
    "white space": " a\t\tb  c   d\r\ne\n\n\nf\u00a0g\u2003h \n ",
    "unicode": "e\u0301 é ﬁ Ⅷ １２ Ünïcödé मानक عربي 🇫🇷 👩‍👩‍👧 \u200b\ufeff𝔘",
    "code": 'def f(x):\n    return {"a": [x, 1.50e-3]}  # !=\n\t\tpass',
}
_TOKENIZER_FIX: Final = "give --tokenizer FOLDER_OR_ID: the served model's (to VLLMBackend: tokenizer=)"


def texts(tokenizer: ChatTokenizer) -> Iterator[tuple[str, str]]:
    """Yield texts that tokenizers split differently, each with what is hard about it."""
    yield from _TEXTS.items()
    controls = sorted(tokenizer.control_tokens)
    if controls:
        yield "texts of control tokens", "a".join(controls[:64]) + " " + " ".join(controls[:64])


def tokenizer(session: Session) -> Outcome:
    """Whether the client's tokenizer gives the server's ids."""
    try:
        local = session.tokenizer
    except CapabilityError as error:
        return failed(str(error), _TOKENIZER_FIX)
    compared = 0
    for name, text in texts(local):
        theirs, ours = session.tokenized(text), local.encode(text)
        if theirs is None:
            return unchecked("the server does not tokenise (no /tokenize): its ids cannot be compared")
        if theirs != ours:
            return failed(
                f"of {name} {_differing(theirs, ours)}",
                _TOKENIZER_FIX,
            )
        compared += len(ours)
    return ok(f"{compared} ids of {len(_TEXTS)} texts and of control tokens are the same on both sides")


def messages(session: Session) -> Outcome:
    """Whether the client's chat template gives the ids that the server renders."""
    local, served = session.tokenizer, session.template
    if served.path is None:
        return unchecked("the server renders no messages (neither a render endpoint nor /tokenize)")
    same = []
    for name, tools in (("plain", None), ("with tools", TOOLS)):
        try:
            theirs = served.ids(_MESSAGES, tools=tools)
        except TemplateError as error:
            if tools is None:
                return warning(
                    f"the server refuses messages: {error}", "give it a chat template: --chat-template"
                )
            continue
        ours = local.encode(local.render(_MESSAGES, tools=tools, add_generation_prompt=True))
        if theirs != ours:
            return warning(
                f"of messages ({name}) {_differing(theirs, ours)}",
                "give the served template to the client: tokenizer=HuggingFaceTokenizer.from_pretrained(..., "
                "chat_template=...); else the model reads another form than chat requests have",
            )
        same.append(name)
    return ok(f"messages ({' and '.join(same)}) are rendered to the same ids on both sides")


def _differing(theirs: Sequence[int], ours: Sequence[int]) -> str:
    pairs = enumerate(zip(theirs, ours, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(theirs), len(ours)))
    return f"the server makes {len(theirs)} ids, the client {len(ours)}; they part at index {at}"


def prompts(session: Session) -> Outcome:
    """Whether prompts of token ids are taken."""
    try:
        sample = session.ids_sample
    except BackendRequestError as error:
        return failed(
            f"refused: {error}",
            "use a server whose /v1/completions takes ids, as vLLM's does; else messages only",
        )
    if sample.prompt_tokens is None:
        return failed("the answer does not tell prompt_tokens", "let the gateway pass usage on")
    if sample.prompt_tokens != 16:
        return failed(
            f"of 16 ids the server read {sample.prompt_tokens}",
            "let the gateway pass prompt and add_special_tokens on as they are",
        )
    return ok("/v1/completions takes them")


def generated(session: Session) -> Outcome:
    """Whether the ids of an answer come back."""
    sample = session.ids_sample
    if sample.ids:
        return ok("they come back (return_token_ids)")
    return warning(
        "no ids come back: an answer is encoded anew, and the next turn may lose it from the cache",
        "use vLLM 0.10.2 or newer, and let the gateway pass return_token_ids on",
    )
