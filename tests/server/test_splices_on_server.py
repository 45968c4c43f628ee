"""Contexts that splice on a real vLLM server with the connector."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentkv import AgentKVContext, AsyncAgentKVContext, Document, Policy, SamplingOptions, Skill
from agentkv.backends import VLLMBackend
from agentkv.cli import main
from agentkv.doctor import ServerOptions, Status, examine
from agentkv.kv.refusals import Refusal
from agentkv.plan import AppendSegment, Prime, Splice
from tests.server.splices import RETURNS, SHIPPING, SpliceServer

ROOT = Path(__file__).parents[2]
POLICY = Policy("You answer for a mail-order shop. Be brief.")
SHORT = SamplingOptions(max_tokens=4)
QUESTION = "What is the code of the returns desk?"


@pytest.fixture(scope="module")
def backend(splice_server: SpliceServer, small_model_dir: Path) -> Iterator[VLLMBackend]:
    with VLLMBackend(splice_server.server.url, tokenizer=str(small_model_dir), prime_after_s=0.0) as made:
        yield made


def context(backend: VLLMBackend, *segments: Policy | Skill | Document) -> AgentKVContext:
    """Return a conversation whose cache nobody shares, so that nothing of it is there before."""
    return AgentKVContext(backend, segments, sampling=SHORT, salt_key=secrets.token_bytes(32))


def test_a_skill_of_the_first_prompt_is_spliced_as_predicted(backend: VLLMBackend) -> None:
    """Compiled in the server when it is first needed, loaded at once, and a plain hit in the next turn."""
    with context(backend, POLICY, Skill("returns", RETURNS, splice="always")) as ctx:  # type: ignore[arg-type]
        first = ctx.ask(QUESTION).report
        second = ctx.ask("And who inspects shoes?").report
    assert first.spliced_tokens == first.predicted_spliced_tokens > 64
    assert first.cached_tokens + first.spliced_tokens + first.computed_tokens == first.prompt_tokens
    assert (second.cached_tokens, second.spliced_tokens) == (second.predicted_cached_tokens, 0)
    assert (second.plan, second.refused) == ((), ())


def test_a_skill_added_later_costs_less_than_a_block_of_what_was_cached(
    backend: VLLMBackend,
) -> None:
    """The old prompt stays cached under the same salt, and the skill is loaded at the tail."""
    with context(backend, POLICY) as ctx:
        before = ctx.ask("Hello, I have a question about a parcel that came yesterday.").report
        ctx.add(Skill("returns", RETURNS, splice="always"))  # type: ignore[arg-type]
        report = ctx.ask(QUESTION).report
    assert [type(step) for step in report.plan] == [AppendSegment, Prime, Splice]
    held = before.prompt_tokens + before.generated_tokens - 1
    assert held - report.cached_tokens < backend.capabilities.block_size
    assert report.spliced_tokens == report.predicted_spliced_tokens > 64


def test_separated_skills_and_a_document_load_in_one_call(backend: VLLMBackend) -> None:
    """Three texts apart from each other, each primed by the same call."""
    texts = (
        Skill("returns", RETURNS, splice="always"),  # type: ignore[arg-type]
        Document("shipping.md", SHIPPING, splice="always"),  # type: ignore[arg-type]
        Skill("again", RETURNS + "That is all.", splice="always"),  # type: ignore[arg-type]
    )
    with context(backend, POLICY, *texts) as ctx:
        report = ctx.ask(QUESTION).report
    assert sum(isinstance(step, Splice) for step in report.plan) == 3
    assert report.spliced_tokens == report.predicted_spliced_tokens
    assert report.refused == ()


def test_what_is_evicted_between_turns_is_spliced_again(
    backend: VLLMBackend, splice_server: SpliceServer
) -> None:
    """The cache is emptied: only what stands around the skill is computed anew."""
    with context(backend, POLICY, Skill("returns", RETURNS, splice="always")) as ctx:  # type: ignore[arg-type]
        first = ctx.ask(QUESTION).report
        reset = urllib.request.Request(f"{splice_server.server.url}/reset_prefix_cache", method="POST")
        with urllib.request.urlopen(reset) as answer:
            assert answer.status == 200
        second = ctx.ask("And who inspects shoes?").report
    assert second.cached_tokens == 0
    assert 0 <= first.spliced_tokens - second.spliced_tokens < backend.capabilities.block_size
    assert second.miss is not None


def test_an_artifact_that_is_lost_is_computed_and_named(
    backend: VLLMBackend, splice_server: SpliceServer
) -> None:
    """The client knew of it; the report says that the server does not have it any more."""
    text = RETURNS.replace("thirty", "forty")
    with context(backend, POLICY, Skill("returns", text, splice="always")) as ctx:  # type: ignore[arg-type]
        ctx.ask(QUESTION)
    store = splice_server.store
    newest = max(store.names(), key=lambda name: store.path(name).stat().st_mtime_ns)
    store.delete(newest)
    with context(backend, Policy("You are somebody else."), Skill("returns", text)) as ctx:
        report = ctx.ask(QUESTION).report
    assert report.refused == (("skill:returns", Refusal.MISSING),)
    assert report.spliced_tokens == 0


def test_asynchronous_contexts_splice(splice_server: SpliceServer, small_model_dir: Path) -> None:
    """The same through the other context."""

    async def run() -> int:
        async with (
            VLLMBackend(splice_server.server.url, tokenizer=str(small_model_dir)) as backend,
            AsyncAgentKVContext(
                backend,
                [POLICY, Skill("shipping", SHIPPING, splice="always")],
                sampling=SHORT,  # type: ignore[arg-type]
            ) as ctx,
        ):
            return (await ctx.ask("When do parcels leave?")).report.spliced_tokens

    assert asyncio.run(run()) > 64


def test_texts_are_compiled_in_the_server_by_the_command(
    splice_server: SpliceServer, small_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The artifact lies in the server's folder; a second run finds it."""
    file = tmp_path / "customs.md"
    file.write_text(SHIPPING.replace("Leipzig", "Dresden"), "utf-8")
    words = ["compile", str(file), "--server", splice_server.server.url, "--tokenizer", str(small_model_dir)]
    main.app(words, standalone_mode=False)
    main.app(words, standalone_mode=False)
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[1].strip(",") in splice_server.store.names()
    assert second.endswith("there already")


def test_the_doctor_finds_exact_answers_untouched(splice_server: SpliceServer, small_model_dir: Path) -> None:
    """A greedy answer is the same before and after a splice (K49)."""
    found = examine(ServerOptions(splice_server.server.url), tokenizer=str(small_model_dir))
    assert found["connector"].found.startswith("splices for LlamaForCausalLM in float32, compiles")
    assert found["exact answers"].status is Status.OK
    assert "same before and after a splice" in found["exact answers"].found


def test_the_support_desk_adds_its_skill_by_splice(
    splice_server: SpliceServer, small_model_dir: Path
) -> None:
    """And says how many tokens were spliced."""
    command = [sys.executable, "-m", "examples.support_desk", "--interactive", "--backend", "vllm"]
    done = subprocess.run(
        [*command, "--url", splice_server.server.url, "--tokenizer", str(small_model_dir)],
        input="/skill\nCan I return boots?\n/quit\n",
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        check=True,
    )
    assert "splice(skill:returns, " in done.stdout
    assert " 0 spliced" not in done.stdout
