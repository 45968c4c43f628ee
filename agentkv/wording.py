"""The text of errata: statements, lists and snapshots, in a profile's words."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

from agentkv.diff import Change, Gone
from agentkv.hunks import find_hunk
from agentkv.ledger import Told
from agentkv.lookalike import holds_phrase, quote_forgeries
from agentkv.profile import Profile, Wording
from agentkv.prompt import Prompt
from agentkv.segments import Field
from agentkv.values import quoted


def neutral(text: str, wording: Wording) -> str:
    """Quote the lines of `text` that could be taken for an erratum; everything else stays as it is."""
    return quote_forgeries(text, wording.word)


def value_text(text: str, wording: Wording) -> str:
    """Return a value as it stands inside a line of prompt.

    It is a JSON string where its text could end the line or, with words that statements are made of, be
    taken for one.
    """
    shown = quoted(text)
    if shown == text and holds_phrase(text, wording.phrases):
        shown = json.dumps(text, ensure_ascii=False)
    return neutral(shown, wording)


def facts_list(fields: Iterable[Field], wording: Wording) -> str:
    """Return fields as the list that stands in the frozen part."""
    return "\n".join(f"- {_line(field, wording)}" for field in fields)


def _line(field: Field, wording: Wording) -> str:
    return wording.line.format(label=field.label, new=value_text(field.text, wording))


def erratum_text(
    revision: int,
    changes: Iterable[Change],
    gone: Iterable[Gone],
    restated: Iterable[str],
    replaced: Iterable[str],
    prompt: Prompt,
    profile: Profile,
) -> str:
    """Return an erratum: a sentence for each statement, or the values as a list where that is shorter.

    Several statements are never longer than stating every field of the prompt.
    """
    wording = profile.wording
    header = wording.header.format(revision=revision)
    changes, restated = tuple(changes), tuple(restated)
    sentences = [
        header + _sentence(change, prompt, profile) + _voided([change], prompt, wording) for change in changes
    ]
    sentences += [
        header
        + wording.fresh.format(
            label=prompt.fields[key].label, new=value_text(prompt.fields[key].text, wording)
        )
        for key in restated
    ]
    tombstones = [header + wording.gone.format(label=item.label) for item in gone]
    tombstones += [header + wording.replaced.format(label=label) for label in replaced]
    stated = [change.field for change in changes]
    stated += [prompt.fields[key] for key in restated]
    short = all(len(field.text) <= profile.max_statement_chars for field in stated)
    if len(stated) > 1 and short:
        every = sum(len(_line(field, wording)) + 1 for field in prompt.fields.values())
        if sum(map(len, sentences)) + len(sentences) > every:
            sentences = [header.rstrip() + "\n" + "\n".join(_line(field, wording) for field in stated)]
            sentences += _voided_line(header, changes, prompt, wording)
    return "\n".join((*sentences, *tombstones))


def snapshot_text(
    revision: int,
    changes: Iterable[Change],
    told: Mapping[str, Told],
    gone: Iterable[Gone],
    replaced: Iterable[str],
    prompt: Prompt,
    profile: Profile,
) -> str:
    """Return an erratum that states every field told so far, with its current value.

    A long value stands in it as its length and digest, and what changed in it as a sentence of its own.
    """
    wording = profile.wording
    changes = tuple(changes)
    header = wording.header.format(revision=revision)
    lines = [header.rstrip()]
    for field in prompt.fields.values():
        if len(field.text) <= profile.max_statement_chars:
            lines.append(_line(field, wording))
        else:
            lines.append(wording.line.format(label=field.label, new=_measure(field.text)))
    lines += [header + _sentence(change, prompt, profile) for change in changes if _is_long(change, profile)]
    lines += _voided_line(header, changes, prompt, wording)
    lost = {key: was.label for key, was in told.items() if key not in prompt.fields and was.text is None}
    lost.update({item.key: item.label for item in gone})
    lines += [header + wording.gone.format(label=lost[key]) for key in sorted(lost)]
    lines += [header + wording.replaced.format(label=label) for label in replaced]
    return "\n".join(lines)


def _sentence(change: Change, prompt: Prompt, profile: Profile) -> str:
    wording, field = profile.wording, change.field
    label = field.label
    limit = profile.max_statement_chars
    if len(field.text) > limit and change.told is not None:
        sentence = _hunk_sentence(label, change.told, field.text, wording, sensitive=field.sensitive)
    else:
        new = value_text(field.text, wording)
        if change.told is None or field.sensitive or len(change.told) + len(field.text) > limit:
            sentence = wording.fresh.format(label=label, new=new)
        else:
            old = value_text(change.told, wording)
            sentence = wording.changed.format(label=label, old=old, new=new)
    return sentence


def _is_long(change: Change, profile: Profile) -> bool:
    return len(change.field.text) > profile.max_statement_chars


def _voided(changes: Sequence[Change], prompt: Prompt, wording: Wording) -> str:
    """Return the clause about what rested on values that were told and are no longer true."""
    changed = {change.key for change in changes if change.told is not None}
    labels = [f.label for f in prompt.fields.values() if not changed.isdisjoint(f.depends_on)]
    return wording.voided.format(labels=" and the ".join(labels)) if labels else ""


def _voided_line(header: str, changes: Sequence[Change], prompt: Prompt, wording: Wording) -> list[str]:
    clause = _voided(changes, prompt, wording).strip()
    return [header + clause] if clause else []


def _hunk_sentence(label: str, told: str, now: str, wording: Wording, *, sensitive: bool) -> str:
    hunk = find_hunk(told, now)
    old = f"{len(hunk.old)} characters" if sensitive else _part(hunk.old, wording)
    new = _part(hunk.new, wording)
    return (
        f"in the {label}, from character {hunk.start} on, {old} is replaced by {new}. "
        f"It now has {_measure(now)}."
    )


def _part(text: str, wording: Wording) -> str:
    return value_text(text, wording) if text else "nothing"


def _measure(text: str) -> str:
    return f"{len(text)} characters, SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"
