"""The beginning of a turn, pure: `begin` decides what to send."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date

from agentkv.backends.base import PromptForm
from agentkv.costs import Costs
from agentkv.diff import Difference, compare
from agentkv.encode import Encoding, encode_ids, encode_messages, extend_ids, render_ids, render_told
from agentkv.entries import (
    Carrier,
    Erratum,
    Frozen,
    LedgerEntry,
    RebaseReason,
)
from agentkv.errors import ContextWindowError, LedgerMismatchError
from agentkv.inputs import Input, UserMessage, check_inputs
from agentkv.ledger import Ledger
from agentkv.outdated import outdated_keys
from agentkv.plan import AppendErratum, AppendSegment, Mode, Plan, Rebase, make_plan
from agentkv.prompt import Prompt
from agentkv.render import Carry, freeze, render_additions, render_inputs
from agentkv.salts import Namespace
from agentkv.segments import Deletion, Inline, Splicing
from agentkv.splicing import Layout, Shelf, lay_out, segment_splicing, told_texts
from agentkv.template import TemplateEncoder
from agentkv.tokenizer import WireMessage
from agentkv.tokens import TokenIds
from agentkv.traits import ModelTraits
from agentkv.wording import neutral


@dataclass(frozen=True, slots=True)
class PendingTurn:
    """A turn that is planned and rendered, and changes nothing until it is finished."""

    ledger: Ledger
    """The ledger that it continues."""
    entries: tuple[LedgerEntry, ...]
    """What it tells, to be recorded once it was told."""
    prompt: Prompt
    plan: Plan
    ids: TokenIds
    """The whole prompt."""
    common: int
    """Leading ids that were sent or generated before."""
    predicted_cached_tokens: int
    encoder: TemplateEncoder = field(repr=False)
    messages: tuple[WireMessage, ...] = ()
    """The whole prompt as chat messages, where the server renders them; `ids` are then our own rendering."""
    broken_by: str = ""
    """What rewrote the prefix, if anything did."""
    salt_check: str = ""
    """Digest of the salt that it is sent under; empty if it is not known."""
    known_ids: bool = True
    """Whether `ids` are those that the server reads; otherwise they are an estimate."""
    block_size: int = 1
    """Tokens of a block of the prefix cache."""
    layout: Layout = field(default_factory=Layout)
    """What of the prompt can be loaded from artifacts."""

    @property
    def frozen(self) -> Frozen:
        """The epoch's frozen prefix."""
        for entry in self.entries:
            if isinstance(entry, Frozen):
                return entry
        if self.ledger.state.frozen is None:  # pragma: no cover - begin always opens an epoch
            raise RuntimeError("a pending turn without an epoch")
        return self.ledger.state.frozen

    @property
    def erratum(self) -> str:
        """The text of the turn's errata; empty if it says nothing."""
        return "\n".join(entry.text for entry in self.entries if isinstance(entry, Erratum))

    @property
    def predicted_spliced_tokens(self) -> int:
        """Tokens that are loaded if the cache holds what is predicted."""
        return self.layout.spliced_tokens(self.predicted_cached_tokens)


def predict_cached(common: int, computed: int, length: int, block: int) -> int:
    """Return how many prompt tokens a prefix cache holds, by the rule of paged prefix caches.

    Parameters
    ----------
    common
        Leading tokens shared with what was sent and generated before.
    computed
        Tokens of it that have KV: prompt + generated - 1 after a completion.
    length
        Tokens of this prompt; the last is always computed.
    block
        Tokens per block; only whole blocks hit.
    """
    return max(0, min(common, computed, length - 1)) // block * block


def begin(
    prompt: Prompt,
    inputs: Iterable[Input],
    ledger: Ledger,
    traits: ModelTraits,
    costs: Costs,
    *,
    room: int = 256,
    mode: Mode = Mode.ON,
    rebase: RebaseReason | None = None,
    carry: Carry | None = None,
    shelf: Shelf | None = None,
) -> PendingTurn:
    """Compare, plan, render and encode one turn.

    Parameters
    ----------
    prompt
        What is true now.
    inputs
        What the user and tools said since the last answer.
    ledger
        What the model was told.
    room
        Tokens to keep free for the answer.
    rebase
        A new epoch that the caller asks for.
    carry
        What a new epoch takes along; by default what the last one did.
    shelf
        The artifacts that can be spliced; None splices nothing.

    Raises
    ------
    InputError
        The inputs do not fit the open tool calls.
    SegmentError
        A segment shows a field that is not declared.
    ContextWindowError
        Even a new epoch and the answer's room exceed the context window.
    LedgerMismatchError
        A loaded ledger renders other ids than those it was saved with.
    TemplateError
        The chat template refuses a message.
    """
    prompt.check()
    told = check_inputs(inputs, ledger.state)
    ledger, rebase = _readied(ledger, traits, rebase)
    difference = compare(prompt, ledger)
    asked = "\n".join(item.content for item in told if isinstance(item, UserMessage))
    window = traits.capabilities.context_window
    plan = make_plan(
        difference,
        prompt,
        ledger,
        traits.profile,
        costs,
        asked=asked,
        window=window,
        mode=mode,
        requested=rebase,
    )
    make = _Maker(
        prompt, told, ledger, traits, difference, mode, carry, costs, shelf if mode is Mode.ON else None
    )
    pending = make(make.corrected(plan))
    if len(pending.ids) + room > window and not any(isinstance(step, Rebase) for step in plan):
        pending = make(make.corrected((Rebase(RebaseReason.WINDOW),)))
    if len(pending.ids) + room > window:
        raise ContextWindowError(
            f"the prompt has {len(pending.ids)} tokens and its answer needs {room} more, but the context "
            f"window is {window}: shorten the history (rebase with a summary), remove segments or lower "
            "max_tokens"
        )
    return pending


def _readied(
    ledger: Ledger, traits: ModelTraits, rebase: RebaseReason | None
) -> tuple[Ledger, RebaseReason | None]:
    """Encode a ledger that was loaded; a redacted one, or one of another tokenizer, opens a new epoch."""
    frozen = ledger.state.frozen
    if frozen is None:
        return ledger, rebase
    redacted = ledger.ids is None and ledger.check is None
    if frozen.fingerprint != traits.fingerprint:
        return ledger.without_ids(), RebaseReason.ERASED if redacted else RebaseReason.MODEL
    if redacted:
        return ledger, RebaseReason.ERASED
    if ledger.ids is not None:
        return ledger, rebase
    encoder = traits.encoder(frozen.template_arguments, frozen.day)
    if traits.encoding(encoder) is Encoding.TOKENS:
        return ledger.encoded(encode_ids(ledger.epoch_entries(), encoder)), rebase
    # Here ids serve the prediction only: a date that the template writes may differ from the one it wrote.
    with suppress(LedgerMismatchError):
        ledger = ledger.encoded(render_told(ledger.epoch_entries(), encoder))
    return ledger, rebase


@dataclass(frozen=True, slots=True)
class _Maker:
    """Turns a plan into a pending turn."""

    prompt: Prompt
    inputs: Sequence[Input]
    ledger: Ledger
    traits: ModelTraits
    difference: Difference
    mode: Mode
    carry: Carry | None
    costs: Costs
    shelf: Shelf | None

    def corrected(self, plan: Plan) -> Plan:
        """Return a plan that states what is true where a rebase's summary holds earlier values."""
        carried = self._carried(self.ledger)
        rebases = any(isinstance(step, Rebase) for step in plan)
        if not rebases or self.mode is not Mode.ON or carried.summary is None:
            return plan
        most = self.traits.profile.max_statement_chars
        wrong = outdated_keys(carried.summary, self.prompt.fields.values(), self.ledger, most_chars=most)
        return (*plan, AppendErratum(restated=wrong)) if wrong else plan

    def __call__(self, plan: Plan) -> PendingTurn:
        ledger, profile = self.ledger, self.traits.profile
        messages = render_inputs(self.inputs, self.ledger, profile)
        rebase = next((step for step in plan if isinstance(step, Rebase)), None)
        day = self._day(fresh=rebase is not None)
        encoder = self.traits.encoder(self.prompt.template_arguments, day)
        before_them: tuple[LedgerEntry, ...] = ()
        if rebase is not None:
            ledger = self._requoted(self._erased(ledger, rebase))
            before_them = (self._frozen(ledger, rebase, encoder, day),)
            if self._carried(ledger).since >= len(ledger):
                # The summary is folded into this very message, and a correction has to stand behind it.
                profile = profile.model_copy(update={"carriers": (Carrier.FOLDED_BEFORE,)})
        additions = [step for step in plan if isinstance(step, AppendErratum | AppendSegment)]
        rendered = render_additions(additions, messages, self.prompt, ledger, profile, encoder.traits)
        entries = (*before_them, *(_counted(entry, encoder) for entry in rendered))
        encoding, sent = self.traits.encoding(encoder), self.traits.capabilities.prompts
        ids = _encode(ledger, entries, encoder, encoding, fresh=rebase is not None)
        wire: Iterable[WireMessage] = ()
        if sent is PromptForm.MESSAGES:
            wire = encode_messages(_continued(ledger, entries), encoder)
        erased = rebase is not None and rebase.reason is RebaseReason.ERASED
        before = None if erased else self.ledger.ids
        common = 0 if before is None else ids.common_prefix(before)
        block = self.traits.capabilities.block_size
        cached = predict_cached(common, ledger.computed, len(ids), block)
        layout = self._laid_out(ledger, entries, ids, encoder, cached)
        return PendingTurn(
            ledger=ledger,
            entries=entries,
            prompt=self.prompt,
            plan=(*plan, *layout.operations(cached)),
            ids=ids,
            common=common,
            predicted_cached_tokens=cached,
            encoder=encoder,
            messages=tuple(wire),
            broken_by="" if rebase is None else _broken_by(self.prompt, self.difference),
            known_ids=self.traits.capabilities.known_ids,
            block_size=block,
            layout=layout,
        )

    def _laid_out(
        self,
        ledger: Ledger,
        entries: Sequence[LedgerEntry],
        ids: TokenIds,
        encoder: TemplateEncoder,
        cached: int,
    ) -> Layout:
        if self.shelf is None or not self.traits.capabilities.known_ids:
            return Layout()
        continued = list(_continued(ledger, entries))
        frozen = continued[0]
        if not isinstance(frozen, Frozen) or frozen.namespace is not Namespace.APPROXIMATE:
            return Layout()
        return lay_out(
            ids,
            told_texts(continued),
            segment_splicing(self.prompt, self.shelf),
            self.shelf,
            encoder,
            self.costs,
            block=self.traits.capabilities.block_size,
            cached=cached,
            new={key for key, _ in told_texts(entries)},
        )

    def _erased(self, ledger: Ledger, rebase: Rebase) -> Ledger:
        if rebase.reason is not RebaseReason.ERASED:
            return ledger
        return ledger.erase(*(item.key for item in self.difference.gone if item.deletion is Deletion.HARD))

    def _requoted(self, ledger: Ledger) -> Ledger:
        """Quote what was said under another wording, whose errata began otherwise."""
        frozen, wording = ledger.state.frozen, self.traits.profile.wording
        if frozen is None or self.mode is not Mode.ON or wording.announcement in frozen.system:
            return ledger
        return ledger.requoted(lambda text: neutral(text, wording))

    def _carried(self, ledger: Ledger) -> Carry:
        last = ledger.state.frozen
        if self.carry is None:
            return Carry() if last is None else Carry(last.since, last.summary)
        summary = self.carry.summary
        wording = self.traits.profile.wording
        return Carry(self.carry.since, None if summary is None else neutral(summary, wording))

    def _day(self, *, fresh: bool) -> date | None:
        frozen = self.ledger.state.frozen
        if fresh or frozen is None:
            return self.traits.day(self.prompt.template_arguments)
        return frozen.day

    def _frozen(self, ledger: Ledger, rebase: Rebase, encoder: TemplateEncoder, day: date | None) -> Frozen:
        return freeze(
            self.prompt,
            ledger,
            self.traits.profile,
            encoder.traits,
            reason=rebase.reason,
            fingerprint=self.traits.fingerprint,
            carry=self._carried(ledger),
            day=day,
            mode=self.mode,
            namespace=Namespace.EXACT
            if self.shelf is None or self.shelf.splicing is Splicing.NEVER
            else Namespace.APPROXIMATE,
        )


def _counted(entry: LedgerEntry, encoder: TemplateEncoder) -> LedgerEntry:
    if not isinstance(entry, Erratum):
        return entry
    return entry.model_copy(update={"tokens": len(encoder.tokenizer.encode(entry.text))})


def _encode(
    ledger: Ledger,
    entries: Sequence[LedgerEntry],
    encoder: TemplateEncoder,
    encoding: Encoding,
    *,
    fresh: bool,
) -> TokenIds:
    last = ledger.state.generated
    if encoding is Encoding.MESSAGES:
        return render_ids(_continued(ledger, entries), encoder)
    if fresh or last is None or ledger.ids is None:
        return encode_ids(_continued(ledger, entries), encoder)
    return extend_ids(ledger.ids, last, entries, encoder)


def _continued(ledger: Ledger, entries: Sequence[LedgerEntry]) -> Iterable[LedgerEntry]:
    return ledger.append(entries, ids=None, computed=0).epoch_entries()


def _broken_by(prompt: Prompt, difference: Difference) -> str:
    names = []
    for change in difference.changes:
        shown = [s.key for s in prompt.segments if isinstance(s.text, Inline) and change.key in s.text.keys]
        names.append(change.key + (f" in {', '.join(shown)}" if shown else ""))
    names += [segment.key for segment in difference.segments]
    names += [f"tool:{tool.name}" for tool in difference.tools]
    names += [gone.key for gone in difference.gone if gone.deletion is not Deletion.DORMANT]
    return ", ".join(names)
