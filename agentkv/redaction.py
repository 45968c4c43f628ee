"""Taking secrets out of what is stored."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from pydantic import TypeAdapter

from agentkv.entries import Erratum, Frozen, Generated, LedgerEntry, SegmentAdded

REDACTED: Final = "[redacted]"

_ENTRY: Final[TypeAdapter[LedgerEntry]] = TypeAdapter(LedgerEntry)


def told_texts(entries: Iterable[LedgerEntry], keys: Sequence[str]) -> Iterator[str]:
    """Yield every value and text that was ever told of these fields and segments."""
    for entry in entries:
        match entry:
            case Frozen():
                yield from (entry.fields[key] for key in keys if key in entry.fields)
                yield from (entry.texts[key] for key in keys if key in entry.texts)
            case SegmentAdded():
                yield from (entry.texts[key] for key in keys if key in entry.texts)
            case Erratum():
                yield from (s.now for s in entry.statements if s.key in keys and s.now is not None)
            case _:
                pass


def redacted(entries: Iterable[LedgerEntry], secrets: Iterable[str]) -> list[LedgerEntry]:
    """Return copies of `entries` in which every secret reads ``[redacted]``.

    A secret is found as it is and as it stands in a JSON string; one that begins or ends with a letter
    or digit is found as a whole word only. Answers that held one lose their ids.
    """
    wanted = {form for secret in secrets if secret.strip() for form in _forms(secret)} - {REDACTED}
    if not wanted:
        return list(entries)
    pattern = re.compile("|".join(map(_whole, sorted(wanted, key=len, reverse=True))))
    made = []
    for entry in entries:
        plain = entry.model_dump(mode="json")
        clean = _scrubbed(plain, pattern)
        if isinstance(entry, Generated) and clean != plain:
            clean["ids"] = None
        made.append(_ENTRY.validate_python(clean))
    return made


def _forms(secret: str) -> Iterator[str]:
    yield secret
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    yield json.dumps(secret)[1:-1]


def _whole(secret: str) -> str:
    before = r"(?<!\w)" if re.match(r"\w", secret) else ""
    after = r"(?!\w)" if re.search(r"\w\Z", secret) else ""
    return f"{before}{re.escape(secret)}{after}"


def _scrubbed(value: Any, secrets: re.Pattern[str]) -> Any:
    match value:
        case str():
            return secrets.sub(REDACTED, value)
        case dict():
            return {_scrubbed(key, secrets): _scrubbed(item, secrets) for key, item in value.items()}
        case list():
            return [_scrubbed(item, secrets) for item in value]
        case _:
            return value
