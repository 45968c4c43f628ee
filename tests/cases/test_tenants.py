"""Tenants share no KV, and one tenant's conversations do; on real KV of a tiny model."""

from __future__ import annotations

import pytest

from agentkv import AgentKVContext, Deletion, Field, Policy
from agentkv.backends import TransformersBackend
from agentkv.errors import ConfigurationError
from agentkv.testing import ByteTokenizer, ScriptedBackend
from tests.tiny_models import tiny_model

RULES = [Policy("Be brief.")]
KEY = bytes(range(32))


@pytest.fixture
def backend() -> TransformersBackend:
    """A real model with random weights; its answers end by length."""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    tokenizer = ByteTokenizer()
    tokenizer.eos_ids = frozenset()  # type: ignore[misc]
    return TransformersBackend(model, tokenizer)


def first_cached(backend: TransformersBackend, tenant: str, key: bytes = KEY) -> tuple[int, int]:
    """Cached and prompt tokens of the first turn of a new conversation."""
    with AgentKVContext(backend, RULES, tenant=tenant, salt_key=key) as context:
        report = context.ask("Hi", max_tokens=2).report
    return report.cached_tokens, report.prompt_tokens


def test_another_tenant_never_hits_and_the_same_tenant_does(backend: TransformersBackend) -> None:
    """The same prompt of two tenants: 0 cached tokens; of one tenant: all but the last (K43)."""
    with AgentKVContext(backend, RULES, tenant="one", salt_key=KEY) as context:
        assert context.ask("Hi", max_tokens=2).report.cached_tokens == 0
        assert first_cached(backend, "two")[0] == 0
        cached, length = first_cached(backend, "one")
        assert cached == length - 1


def test_tenants_that_share_a_name_but_not_the_key_never_hit(backend: TransformersBackend) -> None:
    """A salt cannot be made without the key (K43)."""
    with AgentKVContext(backend, RULES, tenant="one", salt_key=KEY) as context:
        context.ask("Hi", max_tokens=2)
        assert first_cached(backend, "one", bytes(32))[0] == 0


def test_a_fork_hits_what_its_parent_computed(backend: TransformersBackend) -> None:
    """It has the parent's salt (K43)."""
    with AgentKVContext(backend, RULES, tenant="one", salt_key=KEY) as context:
        context.ask("Hi", max_tokens=4)
        sent = context.ledger.ids
        assert sent is not None
        with context.fork() as child:
            assert child.ask("Go", max_tokens=2).report.cached_tokens == len(sent) - 1


def test_a_salt_is_constant_over_a_session_and_its_forks() -> None:
    """Through errata, a rebase and a restart (K43)."""
    backend = ScriptedBackend()
    parts = [*RULES, Field("f", 0)]
    with AgentKVContext(backend, parts, tenant="one", salt_key=KEY) as context:
        for number in range(3):
            context.set("f", number)
            context.ask("Well?")
        context.rebase()
        context.ask("Well?")
        with context.fork() as child:
            child.ask("Well?")
    saved = context.ledger.to_json()
    with AgentKVContext.resume(backend, saved, parts, tenant="one", salt_key=KEY) as resumed:
        resumed.ask("Well?")
    assert len(backend.requests) == 6
    assert len({request.salt for request in backend.requests}) == 1


@pytest.mark.parametrize("option", ["cache_salt", "salt", "extra_body"])
def test_a_caller_cannot_choose_the_salt(option: str) -> None:
    """Neither for a call nor for a context; nothing is sent (K43)."""
    backend = ScriptedBackend()
    with AgentKVContext(backend, RULES, tenant="two") as context:
        with pytest.raises(ConfigurationError, match=f"unknown sampling option.*{option}"):
            context.ask("Hi", **{option: "the salt of tenant one"})
        with pytest.raises(TypeError, match=option):
            AgentKVContext(backend, RULES, **{option: "the salt of tenant one"})  # type: ignore[arg-type]
        assert backend.requests == []
        assert context.ask("Hi").text == "OK."


def test_after_a_hard_deletion_the_old_kv_is_never_used_again() -> None:
    """The salt moves on, so not even the same tenant finds it (K43, K60)."""
    backend = ScriptedBackend()
    with AgentKVContext(backend, [*RULES, Field("key", "s3cret")], tenant="one") as context:
        context.ask("Hi")
        context.remove("key", Deletion.HARD)
        assert context.ask("Hi again").report.cached_tokens == 0
    assert backend.requests[0].salt != backend.requests[1].salt
