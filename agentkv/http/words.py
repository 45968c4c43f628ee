"""A server's own words, fit for an error message: one line, short, and nothing of what was sent to it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

_MOST: Final = 400
_ECHO: Final = re.compile(r"""(?:(['"])input\1\s*:\s*|\binput_value=)""")
"""Where validation errors repeat what was sent."""
_CLOSING: Final[Mapping[str, str]] = {"(": ")", "[": "]", "{": "}"}


def words(body: str) -> str:
    """Return what a server says in an error, in one line, shortened, without what was sent to it."""
    try:
        said = _message(json.loads(body))
    except ValueError:
        said = body
    said = " ".join(_without_echoes(said).split())
    return said if len(said) <= _MOST else f"{said[:_MOST]}…"


def _message(loaded: Any) -> str:
    while isinstance(loaded, Mapping):
        for key in ("error", "message", "detail", "msg"):
            if loaded.get(key):
                loaded = loaded[key]
                break
        else:
            break
    return loaded if isinstance(loaded, str) else json.dumps(loaded, ensure_ascii=False)


def _without_echoes(said: str) -> str:
    kept, at = [], 0
    while (found := _ECHO.search(said, at)) is not None:
        kept.append(f"{said[at : found.end()]}…")
        at = _end_of_value(said, found.end())
    return "".join((*kept, said[at:]))


def _end_of_value(text: str, at: int) -> int:
    """Return where a value that Python or JSON wrote ends; the text's end where that cannot be told."""
    if text.startswith("input_value=", at - len("input_value=")):
        # pydantic cuts long ones in their midst, so that neither quotes nor brackets are closed.
        return _found(text.find(", input_type=", at), text)
    awaited: list[str] = []
    while at < len(text):
        letter = text[at]
        if letter in "'\"":
            at = _end_of_quote(text, at)
            continue
        if letter in _CLOSING:
            awaited.append(_CLOSING[letter])
        elif awaited and letter == awaited[-1]:
            awaited.pop()
        elif not awaited and letter in ",)]}\n":
            return at
        at += 1
    return at


def _end_of_quote(text: str, at: int) -> int:
    quote, at = text[at], at + 1
    while at < len(text) and text[at] != quote:
        at += 2 if text[at] == "\\" else 1
    return min(at + 1, len(text))


def _found(at: int, text: str) -> int:
    return len(text) if at < 0 else at
