"""Why an epoch was opened, where the conversation or the request is to blame and not a field."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """What another middleware, the graph's state or the caller changed."""

    SYSTEM = "the system message changed"
    HISTORY = "the history changed"
    ANSWERED = "facts changed behind tool results that are to be answered anew"
    MODEL = "the model changed"
    FORM = "the response format or the provider's own tools changed"
    ADDED = "a tool was added that has to be bound"
    FORCED = "a tool is forced that is not bound yet"
    MODE = "the mode changed"
    DAMAGED = "the stored ledger cannot be read"
