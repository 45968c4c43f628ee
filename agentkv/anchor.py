"""What a chunk is compiled behind, so that its KV is like that of a chunk in a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from agentkv.errors import ConfigurationError, TemplateError
from agentkv.template import TemplateEncoder
from agentkv.tokenizer import ChatTokenizer
from agentkv.tokens import TokenIds

ANCHOR: Final = (
    "You are the assistant of a company and answer for it. Be brief, friendly and exact, and say only "
    "what the text below and the conversation tell you. Use a tool when you need what you do not know, "
    "and read its result before you answer. Current facts may be updated in the course of the "
    "conversation: the latest statement of a fact is the one that holds. Never promise what the rules do "
    "not allow. The instructions for the tasks that you may have to do follow, each under a heading of "
    "its own."
)
"""The default: a prompt's usual beginning, of about a hundred tokens."""


def anchor_ids(tokenizer: ChatTokenizer, text: str = ANCHOR) -> tuple[int, ...]:
    """Return the tokens of a prompt that begins with `text`, up to where a chunk would follow it.

    Parameters
    ----------
    text
        Text of the system message; empty for no anchor at all.

    Raises
    ------
    ConfigurationError
        It is no text.
    """
    if not isinstance(text, str):
        raise ConfigurationError(f"the anchor is a {type(text).__name__}; give its text, or '' for none")
    if not text.strip():
        return ()
    body = text.strip() + "\n\n"
    try:
        encoder = TemplateEncoder(tokenizer)
        openings: list[Sequence[int]] = [
            encoder.opening(
                [{"role": "system", "content": body + probe}, {"role": "user", "content": "Hello"}]
            )
            for probe in ("# Returns", "Parcels are", "7 days")
        ]
    except TemplateError:
        return tuple(tokenizer.encode(body))
    first, *others = (TokenIds(opening) for opening in openings)
    return tuple(first.tolist(0, min(first.common_prefix(other) for other in others)))
