"""A plan's operations as ledger entries: what will be said, byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Final, TypeAlias

from agentkv.entries import (
    Carrier,
    Erratum,
    Frozen,
    LedgerEntry,
    Message,
    RebaseReason,
    SegmentAdded,
    Statement,
)
from agentkv.errors import TemplateError
from agentkv.inputs import Input, ToolResult, UserMessage
from agentkv.ledger import Ledger
from agentkv.plan import AppendErratum, AppendSegment, Mode
from agentkv.profile import Profile
from agentkv.prompt import Prompt
from agentkv.salts import Namespace
from agentkv.segments import Document, Inline, Skill, Text, TextSegment
from agentkv.template import Acceptance, TemplateTraits
from agentkv.tools import ToolSpec, as_text
from agentkv.wording import erratum_text, facts_list, neutral, snapshot_text, value_text

Addition: TypeAlias = AppendErratum | AppendSegment

_FENCE: Final = re.compile(r"<(?=\s*/\s*document)", re.IGNORECASE)
"""What would end a document's fence."""


@dataclass(frozen=True, slots=True)
class Carry:
    """What a rebase takes along from the conversation so far."""

    since: int = 0
    """Index of the first ledger entry that is kept."""
    summary: str | None = None
    """What stands for everything before it."""


def freeze(
    prompt: Prompt,
    ledger: Ledger,
    profile: Profile,
    template: TemplateTraits,
    *,
    reason: RebaseReason,
    fingerprint: str,
    carry: Carry,
    mode: Mode = Mode.ON,
    day: date | None = None,
    namespace: Namespace = Namespace.EXACT,
) -> Frozen:
    """Write the current values into the prefix of the next epoch.

    Only `Mode.ON` announces errata: the other modes send the prompt as the caller would have.
    """
    last = ledger.state.frozen
    schemas = [tool.schema for tool in prompt.tools]
    generation = 0 if last is None else last.generation + (reason is RebaseReason.ERASED)
    return Frozen(
        epoch=1 if last is None else last.epoch + 1,
        reason=reason,
        system="\n\n".join(_system_parts(prompt, profile, mode, tools_as_text=not template.tools)),
        tools=tuple(schemas) if template.tools else (),
        tool_texts={tool.name: tool.text for tool in prompt.tools},
        template_arguments=dict(prompt.template_arguments),
        segments={segment.key: segment.digest for segment in prompt.segments},
        texts={segment.key: _body(segment, prompt, profile) for segment in prompt.segments},
        fields={key: field.text for key, field in prompt.fields.items()},
        labels={key: field.label for key, field in prompt.fields.items()},
        fingerprint=fingerprint,
        namespace=namespace if last is None or namespace is Namespace.APPROXIMATE else last.namespace,
        generation=generation,
        day=day,
        since=carry.since,
        summary=carry.summary,
    )


def _system_parts(prompt: Prompt, profile: Profile, mode: Mode, *, tools_as_text: bool) -> Iterator[str]:
    if mode is Mode.ON and (prompt.fields or prompt.segments or prompt.tools):
        yield profile.wording.announcement
    for segment in prompt.segments:
        yield segment_text(segment, prompt, profile)
    if prompt.tools and tools_as_text:
        yield as_text([tool.schema for tool in prompt.tools])
    inline = prompt.inline_keys
    alone = [field for key, field in prompt.fields.items() if key not in inline]
    if alone:
        yield "## Current facts\n" + facts_list(alone, profile.wording)


def segment_text(segment: TextSegment, prompt: Prompt, profile: Profile) -> str:
    """Return a segment as it stands in the prompt, with current values; documents are fenced and quoted."""
    body = _body(segment, prompt, profile)
    match segment:
        case Skill():
            return f"## Skill: {segment.name}\n{body}"
        case Document():
            name = (
                json.dumps(segment.name, ensure_ascii=False).replace("<", r"\u003c").replace(">", r"\u003e")
            )
            return f"<document name={name}>\n{body}\n</document>"
        case _:
            return body


def _body(segment: TextSegment, prompt: Prompt, profile: Profile) -> str:
    """Return a segment's text as it stands in the prompt, without what encloses it."""
    text = _filled(segment.text, prompt, profile)
    if isinstance(segment, Document):
        text = _FENCE.sub("< ", text)
    elif not isinstance(segment.text, Inline):
        return text.strip()
    # Also for trusted text with fields in it: values side by side could make up a line.
    return neutral(text.strip(), profile.wording)


def _filled(text: Text, prompt: Prompt, profile: Profile) -> str:
    if not isinstance(text, Inline):
        return text
    return "".join(
        literal + ("" if key is None else value_text(prompt.fields[key].text, profile.wording))
        for literal, key in text.parts
    )


def render_inputs(inputs: Sequence[Input], ledger: Ledger, profile: Profile) -> list[Message]:
    """Return the turn's inputs as messages; lines that look like an erratum are quoted."""
    names = {call.id: call.name for call in ledger.state.open_calls}
    messages = []
    for item in inputs:
        match item:
            case UserMessage():
                messages.append(Message(role="user", content=neutral(item.content, profile.wording)))
            case ToolResult():
                content = neutral(item.content, profile.wording)
                name = names[item.call_id]
                messages.append(Message(role="tool", content=content, call_id=item.call_id, name=name))
    return messages


def render_additions(
    operations: Sequence[Addition],
    messages: Sequence[Message],
    prompt: Prompt,
    ledger: Ledger,
    profile: Profile,
    template: TemplateTraits,
) -> list[LedgerEntry]:
    """Return a turn's entries: its messages, with errata and segments where the carrier puts them."""
    if not operations:
        return list(messages)
    roles = {message.role for message in messages}
    carrier = choose_carrier(profile, template, has_user="user" in roles, in_round="tool" in roles)
    additions = [_addition(item, prompt, ledger, profile, carrier) for item in operations]
    if carrier in (Carrier.SYSTEM_BEFORE, Carrier.USER_BEFORE, Carrier.FOLDED_BEFORE):
        first = next(index for index, message in enumerate(messages) if message.role == "user")
        last_user = max(index for index, message in enumerate(messages) if message.role == "user")
        at = last_user if carrier is Carrier.FOLDED_BEFORE else first
        return [*messages[:at], *additions, *messages[at:]]
    return [*messages, *additions]


def _addition(
    operation: Addition, prompt: Prompt, ledger: Ledger, profile: Profile, carrier: Carrier
) -> SegmentAdded | Erratum:
    match operation:
        case AppendSegment():
            parts = [segment_text(segment, prompt, profile) for segment in operation.segments]
            if operation.tools:
                parts.append(_new_tools(operation.tools))
            return SegmentAdded(
                segments={segment.key: segment.digest for segment in operation.segments},
                tools={tool.name: tool.text for tool in operation.tools},
                texts={s.key: _body(s, prompt, profile) for s in operation.segments},
                text="\n\n".join(parts),
                carrier=carrier,
            )
        case AppendErratum():
            return _erratum(operation, prompt, ledger, profile, carrier)


def _new_tools(tools: Sequence[ToolSpec]) -> str:
    return as_text([tool.schema for tool in tools])


def _erratum(
    operation: AppendErratum, prompt: Prompt, ledger: Ledger, profile: Profile, carrier: Carrier
) -> Erratum:
    revision = ledger.state.revision + 1
    statements = [
        Statement(key=change.key, label=change.field.label, now=change.field.text)
        for change in operation.changes
    ]
    statements += [Statement(key=item.key, label=item.label, now=None) for item in operation.gone]
    if operation.snapshot:
        stated = {statement.key for statement in statements}
        statements += [
            Statement(key=key, label=field.label, now=field.text)
            for key, field in prompt.fields.items()
            if key not in stated
        ]
        text = snapshot_text(
            revision,
            operation.changes,
            ledger.state.fields,
            operation.gone,
            operation.replaced,
            prompt,
            profile,
        )
    else:
        statements += [
            Statement(key=key, label=prompt.fields[key].label, now=prompt.fields[key].text)
            for key in operation.restated
        ]
        text = erratum_text(
            revision,
            operation.changes,
            operation.gone,
            operation.restated,
            operation.replaced,
            prompt,
            profile,
        )
    return Erratum(
        revision=revision,
        statements=tuple(statements),
        text=text,
        carrier=carrier,
        snapshot=operation.snapshot,
    )


def choose_carrier(
    profile: Profile, template: TemplateTraits, *, has_user: bool, in_round: bool = False
) -> Carrier:
    """Return the profile's first carrier that the template was measured to take.

    Parameters
    ----------
    has_user
        Whether the turn brings a user message.
    in_round
        Whether it brings tool results, behind which the erratum comes.

    Raises
    ------
    TemplateError
        The template takes none of them.
    """
    wanted = profile.carriers if has_user else profile.tool_carriers
    for carrier in wanted:
        if _accepts(template, carrier, in_round=in_round):
            return carrier
    raise TemplateError(
        f"the chat template takes none of the profile's carriers ({', '.join(wanted)}); "
        "add a folded carrier, which every template takes"
    )


def _accepts(template: TemplateTraits, carrier: Carrier, *, in_round: bool) -> bool:
    match carrier:
        case Carrier.SYSTEM_BEFORE | Carrier.SYSTEM_AFTER:
            behind_results = not in_round or template.late_system_in_tool_round is Acceptance.ACCEPTED
            return template.late_system is Acceptance.ACCEPTED and behind_results
        case Carrier.USER_BEFORE:
            return not template.alternation
        case Carrier.TOOL:
            return template.tool_role is Acceptance.ACCEPTED and not template.tool_in_tool_round_rewrites
        case Carrier.FOLDED_BEFORE | Carrier.FOLDED_AFTER | Carrier.FOLDED_TOOL:
            return True
