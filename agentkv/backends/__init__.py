"""What runs the model: the seam, and the backends behind it.

The names of `agentkv.backends.base` are light. A backend is imported when it is first asked for, because
it needs what its optional extra installs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from agentkv.backends.base import (
    AsyncBackend,
    Backend,
    Capabilities,
    Completion,
    Delta,
    Event,
    FinishReason,
    PromptForm,
    RawToolCall,
    Request,
    SamplingOptions,
    Usage,
    complete,
)

if TYPE_CHECKING:
    from agentkv.backends.openai import OpenAIBackend
    from agentkv.backends.transformers import TransformersBackend
    from agentkv.backends.vllm import VLLMBackend

__all__ = [
    "AsyncBackend",
    "Backend",
    "Capabilities",
    "Completion",
    "Delta",
    "Event",
    "FinishReason",
    "OpenAIBackend",
    "PromptForm",
    "RawToolCall",
    "Request",
    "SamplingOptions",
    "TransformersBackend",
    "Usage",
    "VLLMBackend",
    "complete",
]

_MODULES: Final = {
    "OpenAIBackend": "agentkv.backends.openai",
    "TransformersBackend": "agentkv.backends.transformers",
    "VLLMBackend": "agentkv.backends.vllm",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
