"""Text that could be taken for an erratum, found however it is spelled, and quoted.

A line is compared by its skeleton: letters without case, accents, width, style and invisible characters, and
letters of other scripts as the Latin ones that they look like. Quoting a harmless line costs nothing.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Final

QUOTE: Final = "> "
"""Put before a line that is data."""

_SPELLED: Final = {
    "a": "аαᴀɑ",
    "b": "ьʙ",
    "c": "сϲᴄ",
    "d": "ԁᴅɗ",
    "e": "еεᴇҽ",
    "f": "ꜰ",
    "g": "ɡɢ",
    "h": "һʜн",
    "i": "іιɪı",
    "j": "јᴊ",
    "k": "кκᴋ",
    "l": "ӏʟ",
    "m": "мᴍ",
    "n": "пηɴ",
    "o": "оοσᴏօ",
    "p": "рρᴘ",
    "q": "ԛ",
    "r": "гʀ",
    "s": "ѕꜱ",
    "t": "тτᴛ",
    "u": "υսᴜʋ",
    "v": "νѵᴠ",
    "w": "ԝωᴡ",
    "x": "хχ",
    "y": "уγʏ",
    "z": "ᴢ",
}
_LATIN: Final = str.maketrans({other: latin for latin, others in _SPELLED.items() for other in others})
_INVISIBLE: Final = frozenset("\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Characters that show nothing although they count as letters or symbols."""
_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_DROPPED: Final = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Me", "Mn"})


def skeleton(text: str) -> str:
    """Return text as an eye reads it: folded, without what does not show."""
    text = _ANSI.sub("", text)
    if not text.isascii():
        text = "".join(
            c
            for c in unicodedata.normalize("NFKD", text)
            if c not in _INVISIBLE and (c.isspace() or unicodedata.category(c) not in _DROPPED)
        )
    else:
        text = "".join(c for c in text if c >= " " or c.isspace())
    return text.casefold().translate(_LATIN)


def quote_forgeries(text: str, word: str) -> str:
    """Put ``>`` before every line that begins like an erratum; everything else stays as it is.

    A line that is quoted already stays as it is too, so that quoting twice changes nothing.

    Parameters
    ----------
    word
        What an erratum's line begins with, before its number.
    """
    begins = _beginning(word)
    lines = text.splitlines(keepends=True)
    # The number may stand on a later line than the word.
    return "".join(
        QUOTE + line
        if not line.startswith(QUOTE) and begins.match(skeleton("".join(lines[i : i + 3])))
        else line
        for i, line in enumerate(lines)
    )


def holds_phrase(text: str, phrases: tuple[str, ...]) -> bool:
    """Whether one of `phrases` stands in a text, however it is spelled."""
    words = " ".join(re.findall(r"\w+", skeleton(text)))
    return any(f" {phrase} " in f" {words} " for phrase in _phrases(phrases))


@lru_cache(maxsize=64)
def _phrases(phrases: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(" ".join(re.findall(r"\w+", skeleton(phrase))) for phrase in phrases)


@lru_cache(maxsize=64)
def _beginning(word: str) -> re.Pattern[str]:
    letters = r"[\W_]*".join(re.escape(c) for c in skeleton(word) if c.isalnum())
    tag = r"</?[a-z][^<>()\n]{0,64}>"
    named = r"(?:no|nr|num|number|version|rev|revision)[\W_]*"
    number = rf"(?:{named})?(?:\d|[一二三四五六七八九十]|[ivxlcdm]+\s*[:.)])"
    # No two alternatives match at the same place, so that no line takes long to check.
    return re.compile(rf"(?:{tag}|\d+[.):]|\b[a-z]\)|[\W_])*{letters}(?:{tag}|[\W_])*{number}")
