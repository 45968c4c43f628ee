"""A planned call of a token-exact model: the ids to send, what of them is cached, and what is spliced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from agentkv.costs import Costs
from agentkv.entries import Erratum, Frozen, SegmentAdded
from agentkv.plan import Prime, Splice
from agentkv.profile import Profile
from agentkv.salts import Namespace
from agentkv.splicing import Layout, lay_out, segment_splicing, told_texts
from agentkv.tokens import TokenIds
from agentkv.tools import ToolSpec
from agentkv.turn import predict_cached
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from langchain_agentkv.exact import TokenExact, Written, written_answer
from langchain_agentkv.planning import Planned
from langchain_agentkv.records import FrozenPart, Said
from langchain_agentkv.rendering import quoted, system_message, with_said
from langchain_agentkv.stamps import salt_check, stamp_of


@dataclass(frozen=True, slots=True)
class _Before:
    """The last call of the conversation."""

    ids: TokenIds = field(default_factory=TokenIds)
    """Of its prompt and answer."""
    computed: int = 0
    """How many of them have KV, if nothing was evicted."""
    answer: BaseMessage | None = None


def exactly(planned: Planned, exact: TokenExact, profile: Profile, costs: Costs) -> Planned:
    """Return a planned call with the ids that will be sent, and with what the model has to be told of it.

    Raises
    ------
    AgentKVError
        The prompt cannot be encoded.
    """
    part, pending = planned.frozen, planned.pending
    front = () if planned.system is None else (planned.system,)
    written = exact.write([*front, *planned.messages], _schemas(part))
    before = _before(planned, exact, profile, written, len(front))
    common = written.ids.common_prefix(before.ids)
    salted = salt_check(exact.salt(part.entry.namespace, part.entry.generation))
    stamp = None if before.answer is None else stamp_of(before.answer)
    moved = stamp is not None and stamp.salt not in ("", salted)
    block = exact.backend.capabilities.block_size
    cached = 0 if moved else predict_cached(common, before.computed, len(written.ids), block)
    layout = _laid_out(planned, exact, written.ids, costs, cached)
    steps = tuple(step for step in pending.plan if not isinstance(step, Prime | Splice))
    pending = replace(
        pending,
        ledger=pending.ledger.append((), ids=before.ids, computed=before.computed),
        ids=written.ids,
        common=common,
        predicted_cached_tokens=cached,
        plan=(*steps, *layout.operations(cached)),
        known_ids=True,
        block_size=block,
        layout=layout,
    )
    settings = {
        "namespace": part.entry.namespace.value,
        "generation": part.entry.generation,
        "expected_cached_tokens": cached,
        "splices": [asdict(item.splice) for item in layout.placed],
        "added": [dict(schema) for schema in _added(planned)],
    }
    return replace(planned, pending=pending, settings=settings, salt_moved=moved)


def _before(planned: Planned, exact: TokenExact, profile: Profile, written: Written, front: int) -> _Before:
    """Return what was sent and answered last, as far as its messages are still there."""
    told, messages = planned.told, planned.asked.messages
    if told is None:
        return _Before()
    count = told.last.count
    answer = messages[count] if count < len(messages) else None
    start = None if planned.reason or written.starts is None else written.starts.get(count + front)
    if start is not None and answer is not None:
        return _answered(written.ids.prefix(start), answer, exact)
    if told.frozen.system != planned.system_digest:
        # Only the digest of another system message is known.
        return _Before(answer=answer)
    kept = min(planned.change.kept, count)
    wording, controls = profile.wording, exact.tokenizer.control_tokens
    plain = [quoted(message, wording, controls) for message in messages[:kept]]
    system = system_message(planned.asked.system, told.frozen.entry.system)
    sent = with_said(plain, [said for said in told.said if said.at < kept])
    lead: list[BaseMessage] = [] if system is None else [system]
    told_before, tools = [*lead, *sent], _schemas(told.frozen)
    if kept < count:
        # Of what stood behind only the digest is known: the part counts that any message would follow.
        one, other = (exact.write([*told_before, HumanMessage(text)], tools).ids for text in "ab")
        shared = one.common_prefix(other)
        return _Before(one.prefix(shared), shared, answer)
    ids = exact.write(told_before, tools).ids
    if not isinstance(answer, AIMessage):
        return _Before(ids, len(ids), answer)
    return _answered(ids, answer, exact)


def _answered(prompt: TokenIds, answer: BaseMessage, exact: TokenExact) -> _Before:
    ids = prompt.extend(_generated(answer, exact))
    # The last sampled token has no KV.
    return _Before(ids, max(0, len(ids) - 1), answer)


def _generated(answer: BaseMessage, exact: TokenExact) -> Sequence[int]:
    """Return what was generated, also where somebody edited the message since."""
    stamp = stamp_of(answer)
    if stamp is not None:
        return stamp.ids
    text = written_answer(answer) if isinstance(answer, AIMessage) else ""
    return exact.traits().encoder(exact.template_arguments).assistant(text)


def _laid_out(planned: Planned, exact: TokenExact, ids: TokenIds, costs: Costs, cached: int) -> Layout:
    entry, shelf = planned.frozen.entry, exact.shelf()
    if shelf is None or entry.namespace is not Namespace.APPROXIMATE:
        return Layout()
    opened = bool(planned.reason) or planned.told is None
    before = () if opened or planned.told is None else planned.told.said
    new: list[Frozen | Erratum | SegmentAdded] = [entry] if opened else []
    new += _entries(planned.said)
    return lay_out(
        ids,
        told_texts([entry, *_entries(before), *_entries(planned.said)]),
        segment_splicing(planned.pending.prompt, shelf),
        shelf,
        planned.pending.encoder,
        costs,
        block=exact.backend.capabilities.block_size,
        cached=cached,
        new={key for key, _ in told_texts(new)},
    )


def _entries(said: Iterable[Said]) -> list[Erratum | SegmentAdded]:
    return [item.entry for item in said]


def _schemas(part: FrozenPart) -> list[dict[str, Any]]:
    return [ToolSpec.of(schema).schema for schema in part.tools]


def _added(planned: Planned) -> list[Mapping[str, Any]]:
    """Return the tools that were told in the text, in the form in which a model may call them."""
    known = planned.asked.tools.schemas
    return [ToolSpec.of(known[name]).schema for name in sorted(planned.text_tools) if name in known]
