"""On a real server every prompt hits what the rule says, and only tenants' own blocks."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import textwrap
from pathlib import Path

import httpx2
import pytest

from agentkv import AgentKVContext, ToolResult
from agentkv.backends import VLLMBackend
from agentkv.miss import Miss
from agentkv.turn import predict_cached
from scripts.vllm_server import Server
from tests.cases.prompts import begins_with
from tests.server.desk import connect, fresh, segments

BLOCK = 32
KEY = secrets.token_bytes(32)


@pytest.fixture(scope="module")
def backend(vllm_server: Server, small_model_dir: Path) -> VLLMBackend:
    """One backend for the module."""
    return connect(vllm_server, small_model_dir)


def test_forty_turns_with_tool_calls_hit_what_the_rule_says_at_every_residue(backend: VLLMBackend) -> None:
    """What is cached is the whole blocks of the last prompt and answer but its last token (K47)."""
    missing = set(range(BLOCK))
    overhead = 0
    with AgentKVContext(backend, segments(), tenant=fresh()) as ctx:
        for turn in range(1, 41):
            before = ctx.ledger.ids
            length = 0 if before is None else len(before)
            calls = ctx.ledger.state.open_calls
            if calls:
                reply = ctx.send(ToolResult(calls[0].id, "It is on the shelf."), max_tokens=4)
            elif turn in (5, 20, 33):
                reply = ctx.ask("Look up order 77.", tool_choice="lookup", max_tokens=64)
                assert [call.name for call in reply.tool_calls] == ["lookup"]
            else:
                if turn in (3, 4, 18, 30):
                    ctx.set("status", f"state {turn}")
                wanted = min(missing, default=0)
                words = (wanted - 4 - overhead - length) % BLOCK
                reply = ctx.ask("Well" + " so" * words, max_tokens=4, extra={"min_tokens": 4})
                if turn == 2:
                    overhead = reply.report.prompt_tokens - length - words
            report, now = reply.report, ctx.ledger.ids
            assert now is not None
            missing.discard(len(now) % BLOCK)
            rule = predict_cached(length, max(0, length - 1), report.prompt_tokens, BLOCK)
            assert report.cached_tokens == report.predicted_cached_tokens == rule, f"turn {turn}: {report}"
            assert (
                report.cached_tokens + report.spliced_tokens + report.computed_tokens == report.prompt_tokens
            )
            assert begins_with(now, before) if before is not None else turn == 1
        assert missing == set()
        assert ctx.report.mispredicted == 0


def test_two_tenants_never_share_a_block_and_one_tenants_contexts_do(backend: VLLMBackend) -> None:
    """The same prompt: another tenant finds nothing, another context of the tenant all whole blocks (K43)."""
    first, second = fresh(), fresh()
    found = {}
    for name, tenant in (("one", first), ("again", first), ("other", second)):
        with AgentKVContext(backend, segments(), tenant=tenant, salt_key=KEY) as ctx:
            found[name] = ctx.ask("Hello", max_tokens=2).report
    assert found["one"].cached_tokens == found["other"].cached_tokens == 0
    assert found["again"].cached_tokens == (found["one"].prompt_tokens - 1) // BLOCK * BLOCK
    assert found["again"].miss is Miss.SHARED


def test_another_process_goes_on_hot_and_another_key_is_named(
    backend: VLLMBackend, vllm_server: Server, small_model_dir: Path
) -> None:
    """A resumed conversation hits under the same key; under another nothing does, and the report says why."""
    tenant = fresh()
    with AgentKVContext(backend, segments(), tenant=tenant, salt_key=KEY) as ctx:
        ctx.ask("Hello", max_tokens=4)
        saved = ctx.ledger.to_json()
    script = textwrap.dedent(
        f"""
        import json, sys
        from agentkv import AgentKVContext
        from agentkv.backends import VLLMBackend
        from tests.server.desk import segments
        with VLLMBackend({vllm_server.url!r}, tokenizer={str(small_model_dir)!r}) as backend:
            key = bytes.fromhex({KEY.hex()!r})
            saved = sys.stdin.read()
            with AgentKVContext.resume(backend, saved, segments(), tenant={tenant!r}, salt_key=key) as ctx:
                report = ctx.ask("And now?", max_tokens=2).report
        print(json.dumps([report.cached_tokens, report.predicted_cached_tokens]))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=saved, capture_output=True, text=True, check=True
    )
    cached, predicted = json.loads(done.stdout)
    assert cached == predicted > 0
    other = secrets.token_bytes(32)
    with AgentKVContext.resume(backend, saved, segments(), tenant=tenant, salt_key=other) as ctx:
        report = ctx.ask("And now?", max_tokens=2).report
        assert (report.cached_tokens, report.predicted_cached_tokens, report.miss) == (0, 0, Miss.SALTED)
        report = ctx.ask("Go on", max_tokens=2).report
        assert report.cached_tokens == report.predicted_cached_tokens > 0
        assert report.miss is None


def test_blocks_that_the_server_dropped_are_said_to_be_evicted(
    backend: VLLMBackend, vllm_server: Server
) -> None:
    """The server is the same process as before, so it was not a restart."""
    with AgentKVContext(backend, segments(), tenant=fresh()) as ctx:
        ctx.ask("Hello", max_tokens=4)
        assert httpx2.post(f"{vllm_server.url}/reset_prefix_cache").status_code == 200
        report = ctx.ask("And now?", max_tokens=2).report
    assert report.cached_tokens == 0 < report.predicted_cached_tokens
    assert report.miss is Miss.EVICTED


def test_branches_find_the_beginning_that_was_computed_ahead(backend: VLLMBackend) -> None:
    """With a cold cache one prefill is finished first; each branch then finds its whole blocks (K40)."""
    with AgentKVContext(backend, segments(), tenant=fresh()) as ctx:
        for index, branch in enumerate(ctx.fan_out(3)):
            with branch:
                report = branch.ask(f"{index} is the number of my order.", max_tokens=2).report
            assert report.cached_tokens >= (report.prompt_tokens - 40) // BLOCK * BLOCK > 0
            assert report.predicted_cached_tokens == 0
