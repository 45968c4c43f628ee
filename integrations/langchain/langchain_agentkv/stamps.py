"""What an answer keeps of its call: the ids as they were generated, and what the call cost.

Both are plain JSON in the message's response metadata, so that they live where the message lives: in a
graph's state, in a checkpoint, in a fork. Nothing else has to be kept of a token-exact conversation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Final

from agentkv.backends.base import Completion, RefusedSplice, SpliceSpec
from agentkv.kv.refusals import Refusal
from agentkv.miss import Miss
from langchain_core.messages import AIMessage, BaseMessage

from langchain_agentkv.canonical import digest

STAMP_KEY: Final = "agentkv_tokens"
"""Where a message's response metadata holds its `Stamp`."""
CALL_KEY: Final = "agentkv_call"
"""Where it holds what its call cost."""
_DIGITS: Final = 16


@dataclass(frozen=True, slots=True)
class Stamp:
    """The ids of an answer, and what they are good for."""

    ids: tuple[int, ...]
    """Every generated id, the end-of-turn token included."""
    of: str
    """Beginning of the tokenizer's fingerprint."""
    digest: str
    """Of the message as it was answered: another one was edited, and has other ids."""
    salt: str = ""
    """Digest of the salt that it was asked under."""
    day: date | None = None
    """The date that the template was told, if it writes one."""

    def dumped(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        day = {} if self.day is None else {"day": self.day.isoformat()}
        return {"ids": list(self.ids), "of": self.of, "digest": self.digest, "salt": self.salt, **day}


@dataclass(frozen=True, slots=True)
class Cost:
    """What was observed of a call, beside the message's usage."""

    spliced_tokens: int = 0
    ttft_s: float | None = None
    """None where only the whole answer was timed."""
    lost: Miss | None = None
    counted: bool = True
    refused: tuple[RefusedSplice, ...] = field(default=())


def short(fingerprint: str) -> str:
    """Return what a stamp keeps of a fingerprint."""
    return fingerprint[:_DIGITS]


def salt_check(salt: str) -> str:
    """Return a salt's digest, which tells whether another call had the same."""
    return hashlib.sha256(salt.encode()).hexdigest()[:_DIGITS]


def stamp_of(message: BaseMessage) -> Stamp | None:
    """Return a message's stamp; None if it has none, or one that cannot be read."""
    kept = message.response_metadata.get(STAMP_KEY)
    if not isinstance(message, AIMessage) or not isinstance(kept, Mapping):
        return None
    try:
        day = kept.get("day")
        return Stamp(
            ids=tuple(int(token) for token in kept["ids"]),
            of=str(kept["of"]),
            digest=str(kept["digest"]),
            salt=str(kept.get("salt", "")),
            day=None if day is None else date.fromisoformat(day),
        )
    except (KeyError, TypeError, ValueError):
        return None


def ids_of(message: BaseMessage, fingerprint: str) -> tuple[int, ...] | None:
    """Return an answer's ids; None if another tokenizer made them, or the message was edited since."""
    stamp = stamp_of(message)
    if stamp is None or stamp.of != short(fingerprint) or stamp.digest != digest(message):
        return None
    return stamp.ids


def restamped(before: AIMessage, after: AIMessage) -> AIMessage:
    """Return a message that we changed ourselves, as one that was answered so."""
    stamp = stamp_of(before)
    if after is before or stamp is None or stamp.digest != digest(before):
        return after
    kept = {**after.response_metadata[STAMP_KEY], "digest": digest(after)}
    return after.model_copy(update={"response_metadata": {**after.response_metadata, STAMP_KEY: kept}})


def dumped_cost(completion: Completion) -> dict[str, Any]:
    """Return what a call cost as plain JSON values."""
    refused = [
        {
            "artifact": item.splice.artifact,
            "start": item.splice.start,
            "stop": item.splice.stop,
            "offset": item.splice.offset,
            "reason": item.reason.value,
        }
        for item in completion.refused
    ]
    return {
        "spliced_tokens": completion.usage.spliced_tokens,
        "ttft_s": round(completion.ttft_s, 6),
        "lost": None if completion.lost is None else completion.lost.value,
        "counted": completion.counted,
        "refused": refused,
    }


def cost_of(message: BaseMessage) -> Cost:
    """Return what an answer says of its call."""
    kept = message.response_metadata.get(CALL_KEY)
    if not isinstance(kept, Mapping):
        return Cost()
    lost = kept.get("lost")
    return Cost(
        spliced_tokens=kept.get("spliced_tokens", 0),
        ttft_s=kept.get("ttft_s"),
        lost=None if lost is None else Miss(lost),
        counted=kept.get("counted", True),
        refused=tuple(
            RefusedSplice(
                SpliceSpec(item["artifact"], item["start"], item["stop"], item["offset"]),
                Refusal(item["reason"]),
            )
            for item in kept.get("refused", ())
        ),
    )
