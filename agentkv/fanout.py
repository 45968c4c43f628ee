"""Several branches of one conversation, and the beginning that they share, computed once."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from typing import Final

from agentkv.backends.base import Prefiller, Request
from agentkv.conversation import Conversation
from agentkv.errors import AgentKVError, ConfigurationError, InputError
from agentkv.inputs import UserMessage
from agentkv.prompt import Prompt

_LOG: Final = logging.getLogger("agentkv")
_PLACEHOLDER: Final = UserMessage("…")


def branches(conversation: Conversation, count: int) -> list[Conversation]:
    """Return forks of a conversation.

    Raises
    ------
    ConfigurationError
        `count` is no number of branches.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigurationError(f"fan_out({count!r}): give a whole number of branches, at least 1")
    return [conversation.fork() for _ in range(count)]


def warming(conversation: Conversation, prompt: Prompt) -> Request | None:
    """Return the request that computes what all branches share; None if there is nothing to ask.

    It is the next turn with a message that stands for any: blocks up to it are the same in every branch.
    """
    if not isinstance(conversation.backend, Prefiller):
        return None
    sampling = replace(conversation.options.sampling, max_tokens=1)
    # While calls await their results the last answer has only just come, and all of it is in the cache.
    with suppress(InputError):
        planned = conversation.plan_turn(prompt, [_PLACEHOLDER], sampling)
        return conversation.request(planned.turn, sampling)
    return None


def warm(conversation: Conversation, request: Request) -> None:
    """Compute what all branches share. A failure is logged: the branches then compute it themselves."""
    if isinstance(conversation.backend, Prefiller):
        try:
            conversation.backend.prefill(request)
        except AgentKVError as error:
            _LOG.warning("the branches' common beginning was not computed ahead: %s", error)
