"""The plan of one model call: a pure function of the request, what is true and what was told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentkv.backends.base import Capabilities, PromptForm
from agentkv.costs import Costs
from agentkv.encode import render_ids, render_told
from agentkv.entries import Carrier, Erratum, Frozen, Generated, LedgerEntry, RebaseReason, SegmentAdded
from agentkv.errors import LedgerError
from agentkv.inputs import Input, UserMessage
from agentkv.ledger import Ledger
from agentkv.plan import Mode, Rebase
from agentkv.prompt import Prompt
from agentkv.render import Carry
from agentkv.splicing import Shelf
from agentkv.template import TemplateEncoder
from agentkv.tokens import TokenIds
from agentkv.tools import ToolSpec
from agentkv.traits import ModelTraits
from agentkv.turn import PendingTurn, begin
from langchain_core.messages import AIMessage, BaseMessage, SystemMessage, ToolMessage

from langchain_agentkv.canonical import chains, digest
from langchain_agentkv.conversation import Group, entries_of, groups, inputs_of, place
from langchain_agentkv.reasons import Reason
from langchain_agentkv.records import FrozenPart, Opening, Said, Step, Told
from langchain_agentkv.rendering import quoted, system_message, with_said
from langchain_agentkv.toolset import Toolset

NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Asked:
    """A model call as the agent, or whoever calls a wrapped model, asks for it."""

    messages: tuple[BaseMessage, ...]
    """Without the leading system message."""
    system: SystemMessage | None = None
    tools: Toolset = field(default_factory=Toolset)
    model: str = ""
    """Which model it is."""
    form: str = ""
    """Digest of the response format, where there is one."""
    forced: str = ""
    """Name of a tool that has to be called."""
    binds_added: bool = False
    """Whether a tool that was added has to be bound at once, in a new epoch, and is not told in the text."""


@dataclass(frozen=True, slots=True)
class Change:
    """What in a request is not as it was recorded."""

    reasons: tuple[str, ...] = ()
    """Why a new epoch has to be opened, in words; empty if none has to."""
    kept: int = 0
    """Leading messages that are as recorded."""
    edited: bool = False
    """Whether somebody changed the last answer."""
    again: bool = False
    """Whether the last answer is gone and asked for anew."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A call that is planned; nothing is recorded until it is answered."""

    system: SystemMessage | None
    """The system message to send."""
    messages: tuple[BaseMessage, ...]
    """The messages to send behind it."""
    tools: tuple[object, ...]
    """The tools to bind."""
    asked: Asked
    told: Told | None
    pending: PendingTurn
    frozen: FrozenPart
    said: tuple[Said, ...]
    """What is said with this call."""
    new: int
    """Index of the first message that was not recorded before."""
    change: Change
    reason: str
    """Why an epoch was opened; empty if none was."""
    chain: tuple[str, ...] = ()
    """The `chains` of the request's messages."""
    postponed: bool = False
    """Whether something is to be said and there is no message to carry it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What a token-exact model has to be told of the call; empty for other models."""
    salt_moved: bool = False
    """Whether the last call had another salt, so that nothing of it is cached."""

    @property
    def turn(self) -> int:
        """Number of the call, from 1."""
        return 1 + (0 if self.told is None else self.told.turns)

    @property
    def system_digest(self) -> str:
        """Digest of the agent's own system message; empty if it has none."""
        return _system_digest(self.asked)

    @property
    def told_tools(self) -> frozenset[str]:
        """Names of all tools that the prompt shows, those that were withdrawn included."""
        return frozenset(self.bound_tools | self.text_tools)

    @property
    def bound_tools(self) -> frozenset[str]:
        """Names of the tools that are bound."""
        return frozenset(schema["function"]["name"] for schema in self.frozen.tools)

    @property
    def text_tools(self) -> frozenset[str]:
        """Names of the tools that stand in the text alone."""
        state = self.pending.ledger.append(self.pending.entries, ids=None, computed=0).state
        return frozenset(state.tools) - self.bound_tools


def capabilities(window: int | None) -> Capabilities:
    """Return what is known of a chat model: it takes messages, and its ids are not ours to know."""
    return Capabilities(
        name="langchain",
        context_window=window or NO_LIMIT,
        block_size=1,
        salts=False,
        prompts=PromptForm.MESSAGES,
        known_ids=False,
    )


def changed(asked: Asked, told: Told, found: Sequence[str], mode: Mode) -> Change:
    """Compare a request with what was recorded.

    Parameters
    ----------
    found
        The `chains` of the request's messages.
    """
    last, messages = told.last, asked.messages
    reasons: list[str] = []
    kept, edited, again = last.count + 1, False, False
    if not _as_recorded(last, found):
        marks: list[Opening | Step] = [told.opening, *told.steps]
        kept = max((mark.count for mark in marks if _as_recorded(mark, found)), default=0)
        reasons.append(f"{Reason.HISTORY} behind its first {kept} messages")
    elif last.count == len(messages):
        kept, again = last.count, True
    elif digest(messages[last.count]) != last.answer:
        edited = isinstance(messages[last.count], AIMessage)
        if not edited:
            kept = last.count
            reasons.append(f"{Reason.HISTORY}: its last answer is gone")
    part = told.frozen
    if part.mode != mode.value:
        reasons.append(Reason.MODE)
    if part.model != asked.model:
        reasons.append(Reason.MODEL)
    if part.system != _system_digest(asked):
        reasons.append(Reason.SYSTEM)
    if part.form != _form(asked):
        reasons.append(Reason.FORM)
    bound = {schema["function"]["name"] for schema in part.tools}
    if asked.forced and asked.forced not in bound:
        reasons.append(Reason.FORCED)
    if asked.binds_added and asked.tools.names - bound:
        reasons.append(Reason.ADDED)
    return Change(tuple(str(reason) for reason in reasons), kept, edited=edited, again=again)


def _as_recorded(record: Opening | Step, found: Sequence[str]) -> bool:
    return record.count < len(found) and found[record.count] == record.chain


def plan(
    asked: Asked,
    told: Told | None,
    prompt: Prompt,
    traits: ModelTraits,
    costs: Costs | None = None,
    *,
    mode: Mode = Mode.ON,
    room: int = 256,
    damaged: bool = False,
    shelf: Shelf | None = None,
) -> Planned:
    """Plan one model call.

    Parameters
    ----------
    asked
        The request, as it would be sent without agentkv.
    told
        What was recorded in this epoch; None before the first call.
    prompt
        Segments and fields that are true now, without tools.
    traits
        The model's template, limits and profile; in message mode.
    room
        Tokens to keep free for the answer.
    damaged
        Whether there was a record that could not be read.
    shelf
        The artifacts that can be spliced; None splices nothing.

    Raises
    ------
    AgentKVError
        The conversation is none that can be extended; it can still be sent as it is.
    """
    found = tuple(chains(asked.messages))
    change = Change() if told is None else changed(asked, told, found, mode)
    encoder = traits.encoder(prompt.template_arguments)
    controls, wording = encoder.tokenizer.control_tokens, traits.profile.wording
    messages = tuple(quoted(message, wording, controls) for message in asked.messages)
    make = _Maker(
        asked=asked,
        told=told,
        prompt=replace(prompt, tools=_sorted(asked.tools.specs)),
        traits=traits,
        costs=costs or Costs(),
        mode=mode,
        room=room,
        messages=messages,
        newest=groups(messages)[-1],
        encoder=encoder,
        chain=found,
        shelf=shelf,
    )
    planned = make(change)
    if planned is None:
        planned = make(replace(change, reasons=(str(Reason.ANSWERED),)))
    if planned is None:  # pragma: no cover - a new epoch can always be told
        raise LedgerError("a new epoch could not be planned")
    if damaged and planned.reason == RebaseReason.FIRST.value:
        return replace(planned, reason=str(Reason.DAMAGED))
    return planned


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes the plan of a call for what changed in its request."""

    asked: Asked
    told: Told | None
    prompt: Prompt
    traits: ModelTraits
    costs: Costs
    mode: Mode
    room: int
    messages: tuple[BaseMessage, ...]
    newest: Group
    encoder: TemplateEncoder
    chain: tuple[str, ...]
    shelf: Shelf | None

    def __call__(self, change: Change) -> Planned | None:
        """Return the plan; None if what changed cannot be said in messages that were answered before."""
        told, newest, messages = self.told, self.newest, self.messages
        empty = newest.start == newest.end
        # What was answered before is part of the ledger already, and the core wants something to answer.
        nothing = empty or (change.again and not change.reasons)
        given: Sequence[Input] = [UserMessage("")] if nothing else inputs_of(messages, newest)
        ledger, carry, rebase = _ledger(told, change, messages, newest, self.encoder)
        pending = begin(
            self.prompt,
            given,
            ledger,
            self.traits,
            self.costs,
            room=self.room,
            rebase=rebase,
            carry=carry,
            shelf=self.shelf,
        )
        opened = next((step.reason for step in pending.plan if isinstance(step, Rebase)), None)
        additions = [entry for entry in pending.entries if isinstance(entry, Erratum | SegmentAdded)]
        if nothing and additions and opened is None and not empty and not _has_user(messages, newest):
            return None
        if empty:
            pending = replace(pending, entries=tuple(e for e in pending.entries if isinstance(e, Frozen)))
        said = () if empty else _said(additions, messages, newest)
        before: tuple[Said, ...] = ()
        if opened is not None or told is None:
            frozen = _frozen_part(pending.frozen, self.asked, self.mode)
        else:
            frozen, before = told.frozen, told.said
        return Planned(
            system=system_message(self.asked.system, frozen.entry.system),
            messages=tuple(with_said(messages, [*before, *said])),
            tools=tuple(self.asked.tools.bound(frozen.tools)),
            asked=self.asked,
            told=told,
            pending=pending,
            frozen=frozen,
            said=said,
            new=newest.start if opened is not None or told is None else change.kept,
            change=change,
            reason="" if opened is None else "; ".join(change.reasons) or opened.value,
            chain=self.chain,
            postponed=empty and bool(additions) and opened is None,
        )


def _has_user(messages: Sequence[BaseMessage], group: Group) -> bool:
    return any(not isinstance(message, ToolMessage) for message in messages[group.start : group.end])


def _sorted(specs: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
    return tuple(sorted(specs, key=lambda spec: spec.name))


def _ledger(
    told: Told | None,
    change: Change,
    messages: Sequence[BaseMessage],
    newest: Group,
    encoder: TemplateEncoder,
) -> tuple[Ledger, Carry | None, RebaseReason | None]:
    """Return the conversation up to the newest group as a ledger, and what a new epoch takes along."""
    if told is None:
        history = list(entries_of(messages, (), 0, newest.start))
        return Ledger().append(history, ids=TokenIds(), computed=0), Carry(since=0), None
    opening: list[LedgerEntry] = [_revision(told.opening.revision)] if told.opening.revision else []
    start = _entry(told.frozen, since=len(opening))
    if change.reasons:
        # All that was said in the epoch counts on, though its messages may be gone.
        said = [item.entry.revision for item in told.said if isinstance(item.entry, Erratum)]
        opening = [_revision(number) for number in said[-1:]] or opening
        history = list(entries_of(messages, (), 0, newest.start))
        made = Ledger().append([*opening, start, *history], ids=TokenIds(), computed=0)
        ids = _before(told, messages, change.kept, encoder)
        made = made.append((), ids=ids, computed=max(0, len(ids) - 1))
        return made, Carry(since=len(opening) + 1), RebaseReason.REQUESTED
    before = told.opening.count
    entries = [*entries_of(messages, told.said, 0, before), start]
    entries += entries_of(messages, told.said, before, change.kept)
    made = Ledger().append([*opening, *entries], ids=TokenIds(), computed=0)
    ids = _ids(made, encoder)
    later = entries_of(messages, (), change.kept, newest.start)
    return made.append(later, ids=ids, computed=max(0, len(ids) - 1)), None, None


def _entry(part: FrozenPart, *, since: int) -> Frozen:
    """Return the epoch's beginning with its tools."""
    tools = tuple(spec.schema for spec in _sorted([ToolSpec.of(schema) for schema in part.tools]))
    return part.entry.model_copy(update={"tools": tools, "since": since})


def _revision(number: int) -> Erratum:
    """Return what stands for all errata of earlier epochs: their number."""
    return Erratum(revision=number, statements=(), text="", carrier=Carrier.FOLDED_AFTER)


def _ids(ledger: Ledger, encoder: TemplateEncoder) -> TokenIds:
    entries = list(ledger.epoch_entries())
    if isinstance(entries[-1], Generated):
        return render_told(entries, encoder)
    return render_ids(entries, encoder)


def _before(told: Told, messages: Sequence[BaseMessage], kept: int, encoder: TemplateEncoder) -> TokenIds:
    """Return the ids of the prompt that was sent, as far as its messages are still there."""
    start = _entry(told.frozen, since=0)
    said = [item for item in told.said if item.at < kept]
    return render_ids([start, *entries_of(messages[:kept], said)], encoder)


def _said(
    additions: Sequence[Erratum | SegmentAdded], messages: Sequence[BaseMessage], newest: Group
) -> tuple[Said, ...]:
    return tuple(Said(at=place(entry.carrier, messages, newest), entry=entry) for entry in additions)


def _frozen_part(entry: Frozen, asked: Asked, mode: Mode) -> FrozenPart:
    # Where the template writes no tools they are part of the system text, and none is bound.
    names = sorted(asked.tools.schemas) if entry.tools else ()
    return FrozenPart(
        entry=entry.model_copy(update={"tools": ()}),
        tools=tuple(asked.tools.schemas[name] for name in names),
        system=_system_digest(asked),
        model=asked.model,
        form=_form(asked),
        mode=mode.value,
    )


def _system_digest(asked: Asked) -> str:
    return "" if asked.system is None else digest(asked.system)


def _form(asked: Asked) -> str:
    parts = [part for part in (asked.form, asked.tools.native_digest) if part]
    return "+".join(parts)
