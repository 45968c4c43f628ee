"""The end of a turn, pure: `finish` records what was told and what it cost."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from agentkv.answer import recorded_answer
from agentkv.backends.base import Completion
from agentkv.errors import TemplateError, TruncationDetectedError
from agentkv.kv.refusals import Refusal
from agentkv.ledger import Ledger
from agentkv.miss import Miss
from agentkv.plan import AppendErratum, Plan, Rebase
from agentkv.report import TurnReport
from agentkv.tokens import TokenIds
from agentkv.turn import PendingTurn, predict_cached


def finish(
    pending: PendingTurn,
    completion: Completion,
    *,
    stopped: bool = False,
    calls: bool = True,
    cached_counts: bool = True,
    would_have_cached_tokens: int | None = None,
) -> tuple[Ledger, TurnReport]:
    """Record a whole completion, or what came of one that the caller stopped and keeps.

    Parameters
    ----------
    calls
        Whether tool calls are looked for: not where the caller allowed none.
    cached_counts
        Whether the completion's cached tokens were observed.

    Raises
    ------
    TruncationDetectedError
        The server read fewer prompt tokens than were sent.
    """
    usage = completion.usage
    if pending.known_ids and usage.prompt_tokens < len(pending.ids):
        raise TruncationDetectedError(
            f"{len(pending.ids)} prompt tokens were sent, but the server read {usage.prompt_tokens}: it cut "
            "the prompt; raise its context length or lower the prompt's size"
        )
    tools = _tool_names(pending) if calls else None
    answer = recorded_answer(
        completion,
        turn=pending.ledger.state.turns + 1,
        tools=tools,
        stopped=stopped,
        salt_check=pending.salt_check,
    )
    generated = answer.ids if answer.ids is not None else pending.encoder.assistant(answer.text)
    prompt = _read(pending, completion)
    ids = prompt.ids.extend(generated)
    miss, broken_by = _cause(pending, completion, prompt, cached_counts=cached_counts)
    # The last sampled token has no KV; a stream stopped before its first may not have read the prompt.
    nothing = prompt.predicted if stopped else len(ids)
    computed = len(ids) - 1 if generated else nothing
    ledger = pending.ledger.append([*pending.entries, answer], ids=ids, computed=computed)
    state = ledger.state
    report = TurnReport(
        turn=state.turns,
        epoch=pending.frozen.epoch,
        plan=pending.plan,
        erratum=pending.erratum,
        revision=state.revision,
        prompt_tokens=usage.prompt_tokens,
        new_tokens=len(prompt.ids) - prompt.common,
        predicted_cached_tokens=prompt.predicted,
        cached_tokens=usage.cached_tokens,
        spliced_tokens=usage.spliced_tokens,
        computed_tokens=usage.computed_tokens,
        generated_tokens=usage.generated_tokens,
        ttft_s=completion.ttft_s,
        duration_s=completion.duration_s,
        miss=miss,
        broken_by=broken_by,
        would_have_cached_tokens=would_have_cached_tokens,
        predicted_spliced_tokens=pending.predicted_spliced_tokens,
        refused=_refused(pending, completion),
        corrected=_corrected(pending.plan),
    )
    return ledger, report


def _refused(pending: PendingTurn, completion: Completion) -> tuple[tuple[str, Refusal], ...]:
    keys = {item.splice: item.key for item in pending.layout.placed}
    refused = ((keys[item.splice], item.reason) for item in completion.refused if item.splice in keys)
    return (*pending.layout.left, *refused)


def _corrected(plan: Plan) -> tuple[str, ...]:
    if not any(isinstance(step, Rebase) for step in plan):
        return ()
    return tuple(key for step in plan if isinstance(step, AppendErratum) for key in step.restated)


def _tool_names(pending: PendingTurn) -> frozenset[str] | None:
    declared = frozenset(tool.name for tool in pending.prompt.tools)
    told = pending.ledger.state.tools or pending.frozen.tool_texts
    return declared if told or declared else None


def _salted(pending: PendingTurn) -> bool:
    last = pending.ledger.state.generated
    return last is not None and last.salt_check not in ("", pending.salt_check)


@dataclass(frozen=True, slots=True)
class _Read:
    """The prompt as the server read it."""

    ids: TokenIds
    common: int
    """Leading ids that were sent or generated before."""
    predicted: int
    """Cached tokens by the rule."""
    known: bool
    """Whether `ids` are the server's and no estimate."""


def _read(pending: PendingTurn, completion: Completion) -> _Read:
    told, before = completion.prompt_ids, pending.ledger.ids
    if told is None:
        return _Read(pending.ids, pending.common, pending.predicted_cached_tokens, pending.known_ids)
    common = 0 if before is None else told.common_prefix(before)
    if pending.known_ids:
        return _Read(told, min(pending.common, common), pending.predicted_cached_tokens, known=True)
    # The client could only estimate; now that the ids are known, so is what the cache should have held.
    held = 0 if _salted(pending) else common
    predicted = predict_cached(held, pending.ledger.computed, len(told), pending.block_size)
    return _Read(told, common, predicted, known=True)


def _cause(
    pending: PendingTurn, completion: Completion, prompt: _Read, *, cached_counts: bool
) -> tuple[Miss | None, str]:
    """Return why not everything that was sent before was cached, and which part of the prompt broke it."""
    cached, predicted = completion.usage.cached_tokens, prompt.predicted
    before = pending.ledger.ids
    if not cached_counts:
        return Miss.UNREPORTED, pending.broken_by
    if not prompt.known:
        return Miss.UNPREDICTED, pending.broken_by
    at = prompt.ids.common_prefix(pending.ids)
    if pending.known_ids and at < len(pending.ids):
        # The server's template is not the client's.
        return Miss.RENDERED, _message_at(pending, at)
    if cached > predicted:
        return Miss.SHARED, pending.broken_by
    if cached < predicted:
        return completion.lost or Miss.LOST, pending.broken_by
    if pending.ledger.state.frozen is None:
        return Miss.COLD, pending.broken_by
    if any(isinstance(step, Rebase) for step in pending.plan):
        return Miss.REBASED, pending.broken_by
    if _salted(pending):
        return Miss.SALTED, pending.broken_by
    if before is not None and prompt.common < len(before):
        if pending.messages:
            return Miss.RENDERED, pending.broken_by or _message_at(pending, prompt.common)
        return Miss.TEMPLATE, pending.broken_by
    return (Miss.SHORT if predicted == 0 else None), pending.broken_by


def _message_at(pending: PendingTurn, at: int) -> str:
    """Name the message that holds a prompt's token at this index, by our own rendering."""
    if not pending.known_ids:
        return ""
    tools = pending.frozen.tools
    for index, message in enumerate(pending.messages):
        with suppress(TemplateError):
            if len(pending.encoder.render_all(pending.messages[: index + 1], tools=tools)) > at:
                return f"message {index} ({message['role']})"
    return ""
