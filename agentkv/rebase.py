"""A rebase that the caller asked for, until the turn that makes it is planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentkv.entries import Carrier, Erratum, Message, RebaseReason, Statement
from agentkv.errors import ConfigurationError
from agentkv.ledger import Ledger
from agentkv.redaction import erased
from agentkv.render import Carry


@dataclass(frozen=True, slots=True, eq=False)
class RebaseRequest:
    """What was asked for. Two requests are never equal: a turn does away with the one it made only.

    Raises
    ------
    ConfigurationError
        `keep_last` is negative, or a summary does not say how much it replaces.
    """

    reason: RebaseReason
    summary: str | None = None
    keep_last: int | None = None

    def __post_init__(self) -> None:
        if self.keep_last is None and self.summary is not None:
            raise ConfigurationError(
                "a summary needs keep_last: how many of the last user turns stay as they are"
            )
        if self.keep_last is not None and self.keep_last < 0:
            raise ConfigurationError(f"keep_last is {self.keep_last}; give 0 or more user turns")

    def carry(self, ledger: Ledger) -> Carry | None:
        """Return what the new epoch takes along from `ledger`; None for all that the last one did.

        Turns that an earlier summary replaced stay replaced. A turn whose tool calls await their results
        is kept in any case.
        """
        if self.keep_last is None:
            return None
        last, open_calls = ledger.state.frozen, ledger.state.open_calls
        floor, earlier = (0, None) if last is None else (last.since, last.summary)
        users = [
            index
            for index, entry in enumerate(ledger.since(floor), start=floor)
            if isinstance(entry, Message) and entry.role == "user"
        ]
        keep = max(self.keep_last, 1 if open_calls else 0)
        if keep >= len(users):
            return Carry(floor, earlier if self.summary is None else self.summary)
        return Carry(users[-keep] if keep else len(ledger), self.summary)

    def erased(self, ledger: Ledger, keys: Sequence[str], current: Mapping[str, str]) -> RebaseRequest:
        """Return a request whose summary holds no value or text of these fields, segments and tools.

        Parameters
        ----------
        current
            Key to current text of those that are fields: it counts as told, also if it was not yet.
        """
        if self.summary is None:
            return self
        told = Erratum(
            revision=0,
            statements=tuple(Statement(key=key, label=key, now=text) for key, text in current.items()),
            text="",
            carrier=Carrier.USER_BEFORE,
        )
        for entry in erased([*ledger, told, Message(role="user", content=self.summary)], keys)[-1:]:
            if isinstance(entry, Message):
                return replace(self, summary=entry.content)
        return self  # pragma: no cover - a message goes in last and comes out last
