"""Chat templates: what one does, measured, and how a conversation's ids grow by its new messages only."""

from agentkv.template.encoder import TemplateEncoder
from agentkv.template.escape import escaped, escaped_schema
from agentkv.template.prefix import BreakPlace, PrefixBreak, prefix_violation
from agentkv.template.probes import measure, pinned_date
from agentkv.template.traits import Acceptance, Reasoning, TemplateTraits

__all__ = [
    "Acceptance",
    "BreakPlace",
    "PrefixBreak",
    "Reasoning",
    "TemplateEncoder",
    "TemplateTraits",
    "escaped",
    "escaped_schema",
    "measure",
    "pinned_date",
    "prefix_violation",
]
