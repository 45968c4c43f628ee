"""Taking secrets out of what is stored."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar, assert_never

from agentkv.entries import (
    Entry,
    Erratum,
    Frozen,
    Generated,
    LedgerEntry,
    Message,
    SegmentAdded,
    ToolCallRecord,
)
from agentkv.errors import ConfigurationError
from agentkv.tools import loads
from agentkv.values import quoted

REDACTED: Final = "[redacted]"

_Record = TypeVar("_Record", bound=Entry)


def erased(entries: Iterable[LedgerEntry], keys: Sequence[str]) -> list[LedgerEntry]:
    """Return copies without any value or text that was ever told of these fields, segments and tools.

    Prefixes and errata that state one of them keep nothing of their text. In what was said and answered,
    and in the texts of others, every such value is searched, but for those that tell nothing by themselves:
    ``yes``, ``no``, ``none``, numbers of fewer than four digits, and what has fewer than three characters.
    """
    given = list(entries)
    secrets = [text for text in told_texts(given, keys) if _tells(text)]
    return [_without(entry, keys) for entry in redacted(given, secrets)]


def _tells(text: str) -> bool:
    least = 4 if text.strip().isdecimal() else 3
    return len(text.strip()) >= least and text not in ("yes", "none", "null", "true", "false")


def _without(entry: LedgerEntry, keys: Sequence[str]) -> LedgerEntry:
    match entry:
        case Erratum() if any(statement.key in keys for statement in entry.statements):
            said = tuple(
                s.model_copy(update={"now": REDACTED}) if s.key in keys and s.now is not None else s
                for s in entry.statements
            )
            return entry.model_copy(update={"text": REDACTED, "statements": said})
        case Frozen() if _shows(entry, keys):
            kept = tuple(t for t in entry.tools if f"tool:{t['function']['name']}" not in keys)
            return entry.model_copy(
                update={
                    "system": REDACTED,
                    "tools": kept,
                    "fields": _blanked(entry.fields, keys),
                    "texts": _blanked(entry.texts, keys),
                }
            )
        case SegmentAdded() if any(key in entry.texts for key in keys):
            return entry.model_copy(update={"text": REDACTED, "texts": _blanked(entry.texts, keys)})
        case _:
            return entry


def _shows(entry: Frozen, keys: Sequence[str]) -> bool:
    return any(
        key in entry.fields or key in entry.texts or key.removeprefix("tool:") in entry.tool_texts
        for key in keys
    )


def _blanked(texts: Mapping[str, str], keys: Sequence[str]) -> dict[str, str]:
    return {key: REDACTED if key in keys else text for key, text in texts.items()}


def told_texts(entries: Iterable[LedgerEntry], keys: Sequence[str]) -> Iterator[str]:
    """Yield every value and text that was ever told of these fields, segments and tools."""
    for entry in entries:
        match entry:
            case Frozen():
                yield from (entry.fields[key] for key in keys if key in entry.fields)
                yield from (entry.texts[key] for key in keys if key in entry.texts)
                yield from _tool_texts(entry.tool_texts, keys)
            case SegmentAdded():
                yield from (entry.texts[key] for key in keys if key in entry.texts)
                yield from _tool_texts(entry.tools, keys)
            case Erratum():
                yield from (s.now for s in entry.statements if s.key in keys and s.now is not None)
            case _:
                pass


def _tool_texts(digests: Mapping[str, str], keys: Sequence[str]) -> Iterator[str]:
    for name, digest in digests.items():
        told = loads(digest)
        if f"tool:{name}" in keys and isinstance(told, list):
            yield from (text for text in told[1:] if len(text) > 2)


def redacted(entries: Iterable[LedgerEntry], secrets: Iterable[str]) -> list[LedgerEntry]:
    """Return copies of `entries` in which every secret reads ``[redacted]``.

    What was said and shown is searched; names, keys, ids and digests are not. A secret is found as it is
    and as it stands in a JSON string; one that begins or ends with a letter or digit as a whole word only.
    Answers that held one lose their ids.
    """
    wanted = {form for secret in map(_text, secrets) if secret.strip() for form in _forms(secret)} - {
        REDACTED
    }
    if not wanted:
        return list(entries)
    pattern = re.compile("|".join(map(_whole, sorted(wanted, key=len, reverse=True))))
    return [_clean(entry, pattern) for entry in entries]


def _clean(entry: LedgerEntry, secrets: re.Pattern[str]) -> LedgerEntry:
    match entry:
        case Frozen():
            names = ("system", "tools", "tool_texts", "texts", "fields", "summary", "template_arguments")
            return _changed(entry, names, secrets)
        case Message():
            return _changed(entry, ("content",), secrets)
        case SegmentAdded():
            return _changed(entry, ("text", "texts", "tools"), secrets)
        case Erratum():
            said = tuple(_changed(statement, ("now",), secrets) for statement in entry.statements)
            return _changed(entry.model_copy(update={"statements": said}), ("text",), secrets)
        case Generated():
            calls = tuple(_clean_call(call, secrets) for call in entry.tool_calls)
            clean = _changed(entry.model_copy(update={"tool_calls": calls}), ("text", "reasoning"), secrets)
            return clean if clean == entry else clean.model_copy(update={"ids": None})
        case _:
            assert_never(entry)


def _changed(record: _Record, names: Sequence[str], secrets: re.Pattern[str]) -> _Record:
    return record.model_copy(update={name: _scrubbed(getattr(record, name), secrets) for name in names})


def _clean_call(call: ToolCallRecord, secrets: re.Pattern[str]) -> ToolCallRecord:
    arguments = secrets.sub(REDACTED, call.arguments)
    if not isinstance(loads(arguments), dict):
        # It stood outside a string, as a number does.
        arguments = json.dumps({"arguments": REDACTED})
    return call.model_copy(update={"arguments": arguments})


def _text(secret: object) -> str:
    if not isinstance(secret, str):
        raise ConfigurationError(f"a secret to redact is a {type(secret).__name__}; give its text")
    return secret


def _forms(secret: str) -> Iterator[str]:
    yield secret
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    yield json.dumps(secret)[1:-1]
    shown = quoted(secret)
    if shown != secret:
        yield shown[1:-1]


def _whole(secret: str) -> str:
    # In a JSON string the letter of an escape may stand before it.
    before = r"(?:(?<!\w)|(?<=\\[bfnrt])|(?<=\\u[0-9a-fA-F]{4}))" if re.match(r"\w", secret) else ""
    after = r"(?!\w)" if re.search(r"\w\Z", secret) else ""
    return f"{before}{re.escape(secret)}{after}"


def _scrubbed(value: Any, secrets: re.Pattern[str]) -> Any:
    match value:
        case str():
            return secrets.sub(REDACTED, value)
        case dict():
            return {key: _scrubbed(item, secrets) for key, item in value.items()}
        case list() | tuple():
            return type(value)(_scrubbed(item, secrets) for item in value)
        case _:
            return value
