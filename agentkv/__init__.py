"""Keep an agent's prompt cached while its facts change.

The prompt is kept as typed segments and mutable fields. Each turn, what is true now is compared with what the
model was told, and only the difference is said. Importing this package takes no heavy dependency and has no
side effect.
"""

from agentkv._version import __version__
from agentkv.aio import AsyncAgentKVContext, AsyncStream
from agentkv.backends.base import SamplingOptions
from agentkv.context import AgentKVContext, Stream
from agentkv.costs import Costs
from agentkv.errors import AgentKVError
from agentkv.fields import mutable, mutable_fields
from agentkv.inputs import ToolResult, UserMessage
from agentkv.ledger import Ledger
from agentkv.outcome import finish
from agentkv.plan import Mode
from agentkv.profile import Profile, Restate, Wording
from agentkv.prompt import Prompt
from agentkv.reply import Reply, ToolCall
from agentkv.report import SessionReport, TurnReport
from agentkv.segments import Deletion, Document, Field, Inline, Policy, Scope, Skill, Splicing, Tools
from agentkv.turn import begin
from agentkv.values import Granularity

__all__ = [
    "AgentKVContext",
    "AgentKVError",
    "AsyncAgentKVContext",
    "AsyncStream",
    "Costs",
    "Deletion",
    "Document",
    "Field",
    "Granularity",
    "Inline",
    "Ledger",
    "Mode",
    "Policy",
    "Profile",
    "Prompt",
    "Reply",
    "Restate",
    "SamplingOptions",
    "Scope",
    "SessionReport",
    "Skill",
    "Splicing",
    "Stream",
    "ToolCall",
    "ToolResult",
    "Tools",
    "TurnReport",
    "UserMessage",
    "Wording",
    "__version__",
    "begin",
    "finish",
    "mutable",
    "mutable_fields",
]
