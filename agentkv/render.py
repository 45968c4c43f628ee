"""A plan's operations as ledger entries: what will be said, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

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
from agentkv.plan import AppendErratum, AppendSegment
from agentkv.profile import Profile
from agentkv.salts import Namespace
from agentkv.segments import Document, Inline, Prompt, Skill, Text, TextSegment
from agentkv.template import Acceptance, TemplateTraits
from agentkv.tools import ToolSpec, as_text
from agentkv.wording import erratum_text, facts_list, neutral, snapshot_text, value_text

Addition: TypeAlias = AppendErratum | AppendSegment


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
    namespace: Namespace = Namespace.EXACT,
) -> Frozen:
    """Write the current values into the prefix of the next epoch."""
    last = ledger.state.frozen
    schemas = [tool.schema for tool in prompt.tools]
    generation = 0 if last is None else last.generation + (reason is RebaseReason.ERASED)
    return Frozen(
        epoch=1 if last is None else last.epoch + 1,
        reason=reason,
        system="\n\n".join(_system_parts(prompt, profile, tools_as_text=not template.tools)),
        tools=tuple(schemas) if template.tools else (),
        tool_digests={tool.name: tool.digest for tool in prompt.tools},
        template_arguments=dict(prompt.template_arguments),
        segments={segment.key: segment.digest for segment in prompt.segments},
        texts={segment.key: _filled(segment.text, prompt, profile).strip() for segment in prompt.segments},
        fields={key: field.text for key, field in prompt.fields.items()},
        fingerprint=fingerprint,
        namespace=namespace if last is None else last.namespace,
        generation=generation,
        since=carry.since,
        summary=carry.summary,
    )


def _system_parts(prompt: Prompt, profile: Profile, *, tools_as_text: bool) -> Iterator[str]:
    if prompt.fields or prompt.segments:
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
    text = _filled(segment.text, prompt, profile).strip()
    match segment:
        case Skill():
            return f"## Skill: {segment.name}\n{text}"
        case Document():
            safe = neutral(text.replace("</document", "< /document"), profile.wording)
            return f"<document name={segment.name!r}>\n{safe}\n</document>"
        case _:
            return text


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
    carrier = choose_carrier(profile, template, has_user=any(m.role == "user" for m in messages))
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
                tools={tool.name: tool.digest for tool in operation.tools},
                texts={s.key: _filled(s.text, prompt, profile).strip() for s in operation.segments},
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
    statements = [Statement(key=change.key, now=change.now) for change in operation.changes]
    statements += [Statement(key=item.key, now=None) for item in operation.gone]
    if operation.snapshot:
        stated = {statement.key for statement in statements}
        statements += [
            Statement(key=key, now=field.text) for key, field in prompt.fields.items() if key not in stated
        ]
        text = snapshot_text(revision, ledger.state.fields, operation.gone, prompt, profile)
    else:
        statements += [Statement(key=key, now=prompt.fields[key].text) for key in operation.restated]
        text = erratum_text(
            revision, operation.changes, operation.gone, operation.restated, prompt, profile
        )
    return Erratum(
        revision=revision,
        statements=tuple(statements),
        text=text,
        carrier=carrier,
        snapshot=operation.snapshot,
    )


def choose_carrier(profile: Profile, template: TemplateTraits, *, has_user: bool) -> Carrier:
    """Return the profile's first carrier that the template was measured to take.

    Raises
    ------
    TemplateError
        The template takes none of them.
    """
    wanted = profile.carriers if has_user else profile.tool_carriers
    for carrier in wanted:
        if _accepts(template, carrier):
            return carrier
    raise TemplateError(
        f"the chat template takes none of the profile's carriers ({', '.join(wanted)}); "
        "add a folded carrier, which every template takes"
    )


def _accepts(template: TemplateTraits, carrier: Carrier) -> bool:
    match carrier:
        case Carrier.SYSTEM_BEFORE | Carrier.SYSTEM_AFTER:
            return template.late_system is Acceptance.ACCEPTED
        case Carrier.USER_BEFORE:
            return not template.alternation
        case Carrier.TOOL:
            return template.tool_role is Acceptance.ACCEPTED and not template.tool_in_tool_round_rewrites
        case Carrier.FOLDED_BEFORE | Carrier.FOLDED_AFTER | Carrier.FOLDED_TOOL:
            return True
