"""Skills and documents of a conversation, spliced by the embedded backend on a tiny model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from agentkv import AgentKVContext, Document, Field, Policy, Skill
from agentkv.backends import TransformersBackend
from agentkv.kv.refusals import Refusal
from agentkv.plan import Splice
from agentkv.splicing import chunk_ids
from agentkv.template import TemplateEncoder
from agentkv.testing import ByteTokenizer
from tests.splice_parts import KEY
from tests.tiny_models import tiny_model

RETURNS = "A parcel may be returned within 14 days, free of charge if it was damaged.\nRefunds take 5 days."
CUSTOMS = "A parcel from abroad is held until the customer pays the duty, which the clerk names on request."
POLICY = Policy("You help the clerks of a parcel office.")


@pytest.fixture
def backend(tmp_path: Path) -> TransformersBackend:
    """A real model with random weights that keeps artifacts; its answers end by length."""
    return made(tmp_path)


def made(artifacts: Path | None, **options: Any) -> TransformersBackend:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    tokenizer = ByteTokenizer()
    tokenizer.eos_ids = frozenset()  # type: ignore[misc]
    return TransformersBackend(
        model, tokenizer, artifacts=artifacts, anchor="Be brief.", context_window=8192, **options
    )


def compiled(backend: TransformersBackend, text: str, tenant: str = "default") -> int:
    """Compile a text as the command does; returns its tokens."""
    ids = chunk_ids(text, TemplateEncoder(backend.tokenizer))
    backend.compile_chunk(tenant, ids)
    return len(ids)


def context(backend: TransformersBackend, *parts: Any, **options: Any) -> AgentKVContext:
    options = {"salt_key": KEY, **options}
    return AgentKVContext(backend, [POLICY, *parts], **options)


def spliced_keys(reply: Any) -> list[str]:
    return [step.key for step in reply.report.plan if isinstance(step, Splice)]


def test_a_compiled_skill_is_spliced_in_the_first_turn(backend: TransformersBackend) -> None:
    """All of it but the seam is loaded, as was predicted, and the counts add up."""
    size = compiled(backend, RETURNS)
    with context(backend, Skill("returns", RETURNS)) as talk:
        reply = talk.ask("May I return it?", max_tokens=4)
        report = reply.report
        assert size - backend.seam - 8 <= report.spliced_tokens <= size - backend.seam
        assert report.spliced_tokens == report.predicted_spliced_tokens
        assert report.cached_tokens + report.spliced_tokens + report.computed_tokens == report.prompt_tokens
        assert report.refused == ()
        assert spliced_keys(reply) == ["skill:returns"]
        again = talk.ask("And by when?", max_tokens=4).report
        assert again.spliced_tokens == 0
        assert again.cached_tokens == again.predicted_cached_tokens > report.prompt_tokens


def test_a_skill_added_in_the_conversation_is_spliced_at_its_end(backend: TransformersBackend) -> None:
    """Nothing that was cached is lost: the salt is the same."""
    compiled(backend, CUSTOMS)
    with context(backend, Field("status", "in transit")) as talk:
        first = talk.ask("Where is it?", max_tokens=4)
        talk.add(Skill("customs", CUSTOMS))
        talk.set("status", "held by customs")
        reply = talk.ask("And now?", max_tokens=4)
        assert reply.report.cached_tokens == reply.report.predicted_cached_tokens
        assert reply.report.cached_tokens >= first.report.prompt_tokens
        assert reply.report.spliced_tokens == reply.report.predicted_spliced_tokens > 0
        assert reply.report.erratum
        assert spliced_keys(reply) == ["skill:customs"]


def test_a_skill_that_was_not_compiled_is_computed(backend: TransformersBackend) -> None:
    """The report says why; it is said once."""
    with context(backend, Skill("returns", RETURNS)) as talk:
        first = talk.ask("May I return it?", max_tokens=4).report
        second = talk.ask("Sure?", max_tokens=4).report
    assert first.spliced_tokens == 0
    assert first.refused == (("skill:returns", Refusal.MISSING),)
    assert second.refused == ()


def test_never_computes_and_the_others_are_spliced(backend: TransformersBackend) -> None:
    """A segment's own word counts more than the artifact that there is."""
    compiled(backend, RETURNS)
    compiled(backend, CUSTOMS)
    parts = Skill("returns", RETURNS, splice="never"), Skill("customs", CUSTOMS)  # type: ignore[arg-type]
    with context(backend, *parts) as talk:
        assert spliced_keys(talk.ask("Hello", max_tokens=4)) == ["skill:customs"]


def test_always_compiles_on_first_use(backend: TransformersBackend, tmp_path: Path) -> None:
    """And the next conversation finds it."""
    part = Document("customs", CUSTOMS, splice="always")  # type: ignore[arg-type]
    with context(backend, part) as talk:
        assert talk.ask("Hello", max_tokens=4).report.spliced_tokens > 0
    (file,) = tmp_path.glob("*.safetensors")
    written = file.stat().st_mtime_ns
    with context(backend, part) as talk:
        assert talk.ask("Hello", max_tokens=4).report.spliced_tokens > 0
    assert file.stat().st_mtime_ns == written


@pytest.mark.parametrize("options", [{"mode": "off"}, {"mode": "observe"}, {"splicing": "never"}])
def test_a_conversation_that_is_not_to_splice_stays_exact(
    options: dict[str, str], backend: TransformersBackend
) -> None:
    """Its namespace is exact, its answer that of a backend without artifacts."""
    compiled(backend, RETURNS)
    with context(backend, Skill("returns", RETURNS), **options) as talk:
        reply = talk.ask("May I return it?", max_tokens=8)
        frozen = talk.ledger.state.frozen
    assert frozen is not None
    assert frozen.namespace == "exact"
    assert reply.report.spliced_tokens == 0
    assert spliced_keys(reply) == []
    with context(made(None), Skill("returns", RETURNS), **options) as talk:
        assert talk.ask("May I return it?", max_tokens=8).text == reply.text


def test_a_tenant_finds_no_artifact_of_another(backend: TransformersBackend) -> None:
    """It computes, or compiles its own."""
    compiled(backend, RETURNS, tenant="acme")
    with context(backend, Skill("returns", RETURNS)) as talk:
        assert talk.ask("Hello", max_tokens=4).report.refused == (("skill:returns", Refusal.MISSING),)
    with context(backend, Skill("returns", RETURNS), tenant="acme") as talk:
        assert talk.ask("Hello", max_tokens=4).report.spliced_tokens > 0


def test_a_damaged_artifact_is_computed_and_named(backend: TransformersBackend, tmp_path: Path) -> None:
    """The turn goes on, and with *always* the next conversation has a sound one again."""
    compiled(backend, RETURNS)
    (file,) = tmp_path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 255
    file.write_bytes(bytes(data))
    with context(backend, Skill("returns", RETURNS)) as talk:
        report = talk.ask("May I return it?", max_tokens=4).report
        assert report.refused == (("skill:returns", Refusal.DAMAGED),)
        assert report.spliced_tokens == 0
    backend.reset()
    with context(backend, Skill("returns", RETURNS, splice="always")) as talk:  # type: ignore[arg-type]
        assert talk.ask("May I return it?", max_tokens=4).report.spliced_tokens > 0


def test_a_chunk_that_cannot_be_compiled_is_computed_with_a_warning(
    backend: TransformersBackend, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A full disk, or here a folder that is a file, stops no conversation."""
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    broken = made(blocked / "store")
    part = Skill("returns", RETURNS, splice="always")  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "agentkv"), context(broken, part) as talk:
        assert talk.ask("Hello", max_tokens=4).report.spliced_tokens == 0
    assert "cannot be written" in caplog.text


def test_a_fork_shares_what_was_spliced(backend: TransformersBackend) -> None:
    """It has its parent's salt, which is an approximate one."""
    compiled(backend, RETURNS)
    with context(backend, Skill("returns", RETURNS)) as talk:
        talk.ask("Hello", max_tokens=4)
        sent = talk.ledger.ids
        assert sent is not None
        with talk.fork() as branch:
            report = branch.ask("And now?", max_tokens=4).report
    assert (report.cached_tokens, report.spliced_tokens) == (len(sent) - 1, 0)
