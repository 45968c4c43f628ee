"""The in-place edit: tokens of a conversation's prompt are replaced, and the KV behind them is kept.

It is a splice whose artifact is the conversation itself (arXiv 2606.17107): what stands behind the edit is
moved by the change in length. That KV was computed while the old tokens stood there, so it is approximate.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentkv.backends.base import Request, Usage
from agentkv.backends.runner import Meter, ModelRunner
from agentkv.errors import BackendError, CapabilityError, ConfigurationError
from agentkv.salts import is_approximate
from agentkv.tokens import TokenIds


def edit(runner: ModelRunner, request: Request, *, start: int, stop: int, ids: Sequence[int]) -> Usage:
    """Edit a prompt in place; see `TransformersBackend.edit`."""
    if not is_approximate(request.salt):
        raise CapabilityError(
            "an edit keeps KV that was computed behind the old tokens, but the request's namespace is exact: "
            "use a salt of Namespace.APPROXIMATE, or send the edited prompt"
        )
    if not 0 <= start <= stop <= len(request.ids):
        raise ConfigurationError(
            f"tokens [{start}, {stop}) are not within the prompt of {len(request.ids)} tokens"
        )
    edited = TokenIds([*request.ids.tolist(0, start), *ids, *request.ids.tolist(stop)])
    runner.check_prompt(edited, room=0)
    # Asked now, because it raises for a model that cannot do this.
    _ = runner.movable
    with runner.opened(request, room=max(0, len(edited) - len(request.ids))) as entry:
        held = len(entry.ids)
        # The last token of a prompt is always computed.
        last = min(held, len(request.ids) - 1)
        if last < min(stop, len(request.ids) - 1):
            raise BackendError(
                f"conversation {request.conversation!r} has KV for the first {held} of its "
                f"{len(request.ids)} prompt tokens, which does not cover the edit of [{start}, {stop}): send "
                "the edited prompt instead"
            )
        behind = entry.state.span(stop, last) if stop < last else None
        meter = Meter(len(edited), cached=min(start, held, len(edited) - 1))
        runner.cut(entry, meter.cached)
        if behind is not None:
            runner.compute(entry, edited, start + len(ids), meter)
            try:
                runner.append(entry, behind, edited, meter)
            except Exception as error:
                runner.drop(entry)
                raise runner.failure(
                    "what stands behind the edit could not be moved", entry, error
                ) from error
        runner.finish(entry, edited, meter)
        return meter.usage
