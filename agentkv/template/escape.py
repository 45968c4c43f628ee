"""Text that no tokenizer takes for a control token, for prompts that are rendered as messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

from agentkv.errors import TemplateError

BREAK: Final = "\u200b"
"""A zero-width space, put behind the first character of what reads as a control token."""


def escaped(text: str, control_tokens: Iterable[str]) -> str:
    """Return `text` with a zero-width space inside everything that reads as a control token.

    A server renders and tokenises messages as one text, so data is kept from being structure by its letters
    alone. Where token ids are sent, nothing needs to be escaped.

    Raises
    ------
    TemplateError
        The text holds a control token of a single character, which cannot be broken.
    """
    pattern = _pattern(frozenset(control_tokens))
    while pattern is not None and (found := pattern.search(text)) is not None:
        if len(found[0]) < 2:
            raise TemplateError(
                f"the text holds {found[0]!r}, which is a control token of a single character and cannot be "
                "escaped: remove it, or use a backend that takes token ids"
            )
        text = pattern.sub(lambda match: match[0][0] + BREAK + match[0][1:], text)
    return text


def escaped_schema(schema: Any, control_tokens: Iterable[str]) -> Any:
    """Return a tool's schema with each of its strings `escaped`.

    Raises
    ------
    TemplateError
        A key holds a control token; it cannot be escaped, as calls have to name it.
    """
    match schema:
        case str():
            return escaped(schema, control_tokens)
        case Mapping():
            for key in schema:
                if escaped(key, control_tokens) != key:
                    raise TemplateError(f"a tool has a key {key!r} that holds a control token: rename it")
            return {key: escaped_schema(item, control_tokens) for key, item in schema.items()}
        case list() | tuple():
            return [escaped_schema(item, control_tokens) for item in schema]
        case _:
            return schema


@lru_cache(maxsize=32)
def _pattern(control_tokens: frozenset[str]) -> re.Pattern[str] | None:
    if not control_tokens:
        return None
    return re.compile("|".join(map(re.escape, sorted(control_tokens, key=len, reverse=True))))
