"""Why a prefix cache held less than it could have."""

from __future__ import annotations

from enum import StrEnum


class Miss(StrEnum):
    """Why fewer tokens were cached than the whole previous prompt and answer, or than predicted."""

    COLD = "first prompt of the conversation"
    REBASED = "a new epoch rewrote the prefix"
    TEMPLATE = "the chat template rewrote earlier messages"
    RENDERED = "the server wrote an earlier message otherwise than it was generated or sent"
    SALTED = "the salt is another one than that of the earlier turns: the key or the tenant changed"
    SHORT = "the prefix is shorter than a block"
    LOST = "evicted, not kept by this process, or another replica answered"
    EVICTED = "evicted: the server needed the room for other requests"
    RESTARTED = "the server was restarted: its cache began empty"
    DISABLED = "the server keeps no prefix cache: it is switched off"
    UNREPORTED = "cached tokens are not known: the server does not report them, or the answer was stopped"
    UNPREDICTED = "cached tokens were not predicted: the client has no tokenizer of the served model"
    SHARED = "another call had more of the prefix in the cache"
