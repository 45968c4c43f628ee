"""What runs the model: the seam, and the backends behind it.

The names of `agentkv.backends.base` are light. A backend is imported when it is first asked for, because
it needs what its optional extra installs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentkv.backends.base import (
    AsyncBackend,
    Backend,
    Capabilities,
    Completion,
    Delta,
    Event,
    FinishReason,
    RawToolCall,
    Request,
    SamplingOptions,
    Usage,
    complete,
)

if TYPE_CHECKING:
    from agentkv.backends.transformers import TransformersBackend

__all__ = [
    "AsyncBackend",
    "Backend",
    "Capabilities",
    "Completion",
    "Delta",
    "Event",
    "FinishReason",
    "RawToolCall",
    "Request",
    "SamplingOptions",
    "TransformersBackend",
    "Usage",
    "complete",
]


def __getattr__(name: str) -> Any:
    if name == "TransformersBackend":
        from agentkv.backends.transformers import TransformersBackend

        return TransformersBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
