"""What a ledger is made of: a closed union of plain, frozen records."""

from __future__ import annotations

from datetime import date
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from agentkv.salts import Namespace


class RebaseReason(StrEnum):
    """Why an epoch was opened."""

    FIRST = "first turn"
    REQUESTED = "requested"
    COST = "standing errata cost more than a rebase"
    SHARE = "errata take too much of the context window"
    SUPERSEDED = "a field was superseded too often"
    LARGE = "a changed value is too long for an erratum"
    WINDOW = "the context window would overflow"
    POLICY = "a policy was added, changed or withdrawn"
    WITHDRAWN = "a segment was withdrawn"
    ERASED = "something was erased"
    CRITICAL = "a critical field changed and the model heeds errata too rarely"
    MODEL = "the model, tokenizer or template arguments changed"
    REWRITE = "the mode rewrites the prompt"
    UNANNOUNCED = "the prefix does not announce errata"


class Carrier(StrEnum):
    """The role and place that an erratum travels in."""

    SYSTEM_BEFORE = "system message before the user's"
    SYSTEM_AFTER = "system message after the user's"
    USER_BEFORE = "user message before the user's"
    FOLDED_BEFORE = "folded into the user's message, before its text"
    FOLDED_AFTER = "folded into the user's message, after its text"
    TOOL = "tool message after the round's results"
    FOLDED_TOOL = "folded into the round's last result"


class Entry(BaseModel):
    """One record of a ledger."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Frozen(Entry):
    """The beginning of an epoch: the frozen prefix."""

    kind: Literal["frozen"] = "frozen"
    epoch: int
    """Counts from 1."""
    reason: RebaseReason
    system: str
    """Text of the system message."""
    tools: tuple[dict[str, Any], ...]
    """Schemas that the template renders; empty where they are part of `system`."""
    tool_texts: dict[str, str]
    """Tool name to the tool's canonical JSON."""
    template_arguments: dict[str, Any]
    segments: dict[str, str]
    """Segment key to the digest of its declared text."""
    texts: dict[str, str]
    """Segment key to its text as it stands in `system`, so that it can be erased."""
    fields: dict[str, str]
    """Field key to the canonical text that the prefix shows."""
    labels: dict[str, str]
    """Field key to its label."""
    fingerprint: str
    """Digest of tokenizer and template."""
    namespace: Namespace = Namespace.EXACT
    generation: int = 0
    """Counts the salts of this conversation; a hard deletion moves on to the next."""
    day: date | None = None
    """What the template is told as the current date, if it writes one."""
    since: int = 0
    """Index of the first entry whose messages and answers are carried into this epoch."""
    summary: str | None = None
    """What stands for everything before `since`."""


class Message(Entry):
    """What the user or a tool said."""

    kind: Literal["message"] = "message"
    role: Literal["user", "tool"]
    content: str
    call_id: str | None = None
    name: str | None = None
    """The tool whose result it is."""


class SegmentAdded(Entry):
    """A skill, document or tool that came after the prefix was frozen."""

    kind: Literal["segment"] = "segment"
    segments: dict[str, str]
    """Segment key to the digest of its declared text."""
    tools: dict[str, str] = {}
    """Tool name to the tool's canonical JSON."""
    texts: dict[str, str] = {}
    """Segment key to its text as it stands in `text`."""
    text: str
    carrier: Carrier


class Statement(Entry):
    """One field's change, as it was said."""

    key: str
    label: str
    now: str | None
    """Canonical text, or None if the field, segment or tool no longer holds."""


class Erratum(Entry):
    """An appended statement of current values."""

    kind: Literal["erratum"] = "erratum"
    revision: int
    """Counts from 1 and never goes back."""
    statements: tuple[Statement, ...]
    text: str
    carrier: Carrier
    snapshot: bool = False
    """Whether it states every field told so far."""
    tokens: int = 0
    """Its size in the context."""


class ToolCallRecord(Entry):
    """A tool call of an answer."""

    id: str
    name: str
    arguments: str
    """As the model wrote them; malformed ones in the stable form of `agentkv.tools`."""
    valid: bool = True
    available: bool = True
    """Whether the tool was still declared when the call was made."""


class Generated(Entry):
    """What the model said."""

    kind: Literal["generated"] = "generated"
    text: str
    ids: tuple[int, ...] | None
    """Every generated id as generated, or None where the server does not say."""
    tool_calls: tuple[ToolCallRecord, ...] = ()
    reasoning: str = ""
    stopped: bool = False
    """Whether the caller stopped the stream and kept what had come."""
    prompt_tokens: int = 0
    salt_check: str = ""
    """Digest of the salt that it was asked under: under another one nothing of it is cached."""


LedgerEntry: TypeAlias = Annotated[
    Frozen | Message | SegmentAdded | Erratum | Generated, Field(discriminator="kind")
]
"""Anything a ledger records."""
