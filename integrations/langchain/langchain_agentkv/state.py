"""The graph state in which the ledger is kept: private, plain JSON, written in proportion to what is new."""

from __future__ import annotations

from typing import Annotated, Any, Final, NotRequired

from agentkv.errors import MissingDependencyError

try:
    from langchain.agents.middleware.types import AgentState, PrivateStateAttr
    from langgraph.channels.delta import DeltaChannel
except ImportError as error:
    raise MissingDependencyError(
        f"AgentKVMiddleware needs langchain and langgraph ({error}): pip install 'langchain-agentkv[agents]'"
    ) from error

from langchain_agentkv.recording import AGAIN_EVERY
from langchain_agentkv.records import joined, latest

# A checkpoint stores what a step wrote, and the whole log so many calls apart: reading never goes far back.
_FROZEN: Final = DeltaChannel(latest, dict, snapshot_frequency=1)
_LOG: Final = DeltaChannel(joined, list, snapshot_frequency=AGAIN_EVERY)

FrozenChannel = Annotated[dict[str, Any], _FROZEN, PrivateStateAttr]
"""What is written once an epoch, and again now and then."""
LogChannel = Annotated[list[dict[str, Any]], _LOG, PrivateStateAttr]
"""What grows by one record a call."""


class AgentKVState(AgentState[Any]):
    """What the middleware adds to an agent's state."""

    agentkv_frozen: NotRequired[FrozenChannel]
    agentkv_log: NotRequired[LogChannel]
