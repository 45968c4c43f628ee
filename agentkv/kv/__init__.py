"""Compiled chunks: their KV, moved to another place by rotation, and the files that hold it.

What names an artifact and what goes over the wire (`agentkv.kv.protocol`) is light. The names that handle
tensors are imported when they are first asked for, because they need torch and safetensors.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from agentkv.kv.identity import ModelIdentity, artifact_name, tokenizer_digest, weights_digest
from agentkv.kv.refusals import Refusal, refusal_of
from agentkv.kv.tickets import Ticket

if TYPE_CHECKING:
    from agentkv.kv.artifact import ArtifactHeader
    from agentkv.kv.rope import RopeSpec
    from agentkv.kv.spans import KVSpan, LayerKV
    from agentkv.kv.store import ArtifactStore

__all__ = [
    "ArtifactHeader",
    "ArtifactStore",
    "KVSpan",
    "LayerKV",
    "ModelIdentity",
    "Refusal",
    "RopeSpec",
    "Ticket",
    "artifact_name",
    "refusal_of",
    "tokenizer_digest",
    "weights_digest",
]

_MODULES: Final = {
    "ArtifactHeader": "agentkv.kv.artifact",
    "ArtifactStore": "agentkv.kv.store",
    "KVSpan": "agentkv.kv.spans",
    "LayerKV": "agentkv.kv.spans",
    "RopeSpec": "agentkv.kv.rope",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
