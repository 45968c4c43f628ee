"""Making an artifact: a chunk is run behind the anchor, and the anchor's KV is dropped."""

from __future__ import annotations

from collections.abc import Sequence

from agentkv.backends.runner import Meter, ModelRunner
from agentkv.backends.splices import ModelArtifacts
from agentkv.errors import ContextWindowError
from agentkv.tokens import TokenIds


def compile_chunk(runner: ModelRunner, artifacts: ModelArtifacts, tenant: str, ids: Sequence[int]) -> str:
    """Store the KV of a chunk unless it is stored, and return its name; see `TransformersBackend`."""
    name = artifacts.name(tenant, ids)
    if artifacts.sound(name):
        return name
    anchor = len(artifacts.anchor)
    prompt = TokenIds([*artifacts.anchor, *ids])
    if len(prompt) > runner.window:
        raise ContextWindowError(
            f"a chunk of {len(ids)} tokens behind an anchor of {anchor} is too long to compile: the model's "
            f"context window is {runner.window}; split the text"
        )
    runner.check_prompt(prompt, room=0)
    entry = runner.detached("")
    entry.state.reserve(len(prompt))
    runner.finish(entry, prompt, Meter(len(prompt)))
    return artifacts.save(tenant, ids, entry.state.span(anchor, len(prompt)))
