"""What a summary says that is no longer true: values that were told once and were replaced since."""

from __future__ import annotations

import re
from collections.abc import Iterable

from agentkv.entries import Erratum, Frozen, LedgerEntry
from agentkv.redaction import REDACTED
from agentkv.segments import Field


def outdated_keys(
    summary: str, fields: Iterable[Field], entries: Iterable[LedgerEntry], *, most_chars: int
) -> tuple[str, ...]:
    """Return the keys of fields whose earlier values stand in a summary, as whole words in any case.

    A value that stands there for another reason is found too: stating what is true now does no harm.

    Parameters
    ----------
    fields
        The fields as declared now.
    entries
        The whole ledger, earlier epochs included.
    most_chars
        Fields with a longer value are left out: an erratum could not state them.
    """
    told = _told(entries)
    plain = summary.casefold()
    return tuple(
        field.key
        for field in fields
        if len(field.text) <= most_chars
        and any(_stands_in(plain, text) for text in told.get(field.key, ()) if text != field.text)
    )


def _told(entries: Iterable[LedgerEntry]) -> dict[str, set[str]]:
    told: dict[str, set[str]] = {}
    for entry in entries:
        match entry:
            case Frozen():
                stated: Iterable[tuple[str, str | None]] = entry.fields.items()
            case Erratum():
                stated = ((statement.key, statement.now) for statement in entry.statements)
            case _:
                continue
        for key, text in stated:
            if text is not None and text.strip() and text != REDACTED:
                told.setdefault(key, set()).add(text)
    return told


def _stands_in(plain: str, text: str) -> bool:
    wanted = text.strip().casefold()
    before = r"(?<!\w)" if re.match(r"\w", wanted) else ""
    after = r"(?!\w)" if re.search(r"\w\Z", wanted) else ""
    return wanted in plain and re.search(before + re.escape(wanted) + after, plain) is not None
