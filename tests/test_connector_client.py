"""Splicing through a server's connector, as the client sees it; the server is a stand-in on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from agentkv import AgentKVContext, AsyncAgentKVContext, Policy, Skill
from agentkv.backends import VLLMBackend
from agentkv.backends.base import PromptForm
from agentkv.backends.connector import _cached_before
from agentkv.errors import CapabilityError
from agentkv.kv.protocol import Outcome
from agentkv.kv.refusals import Refusal
from agentkv.kv.tickets import verify
from agentkv.plan import Splice
from tests.stub_connector import StubConnectorServer
from tests.stub_server import StubServer

RETURNS = "Parcels can be returned within thirty days of delivery, in the box that they came in. " * 6
REFUNDS = "Refunds are paid within a week to the card that was used for the order, or as a voucher. " * 6
POLICY = Policy("You answer for a mail-order shop. Be brief.")
KEY = b"a key of sixteen bytes or more"


@pytest.fixture
def server() -> Iterator[StubConnectorServer]:
    with StubConnectorServer() as stub:
        yield stub


def backend_of(server: StubServer, **options: object) -> VLLMBackend:
    return VLLMBackend(server.url, tokenizer=server.tokenizer, trust_env=False, **options)  # type: ignore[arg-type]


def compiled(backend: VLLMBackend, *texts: str) -> None:
    from agentkv.splicing import chunk_ids
    from agentkv.template import TemplateEncoder

    encoder = TemplateEncoder(backend.tokenizer)
    for text in texts:
        backend.compile_chunk("default", chunk_ids(text, encoder))


def test_the_connector_is_met_where_the_metrics_show_it(server: StubConnectorServer) -> None:
    """A plain server is not asked, and splices nothing."""
    with backend_of(server) as backend:
        assert backend.capabilities.splices
    with StubServer() as plain, backend_of(plain) as backend:
        assert not backend.capabilities.splices
        assert plain.got("/v1/completions") == []


def test_a_server_that_has_to_splice_and_does_not_is_refused() -> None:
    """With what to do."""
    with (
        StubServer() as plain,
        backend_of(plain, splices="always") as backend,
        pytest.raises(CapabilityError, match="vllm-agentkv"),
    ):
        _ = backend.capabilities


def test_splices_can_be_left_alone(server: StubConnectorServer) -> None:
    """The connector is then not spoken to."""
    with backend_of(server, splices="never") as backend:
        assert not backend.capabilities.splices
    assert server.asked == []


def test_messages_are_not_spliced(server: StubConnectorServer) -> None:
    """Splices need the ids: refused where they are required, left where they are not."""
    with backend_of(server, prompts=PromptForm.MESSAGES) as backend:
        assert not backend.capabilities.splices
    with (
        backend_of(server, prompts=PromptForm.MESSAGES, splices="always") as backend,
        pytest.raises(CapabilityError, match="token ids"),
    ):
        _ = backend.capabilities


def test_a_skill_of_the_first_prompt_is_loaded_in_one_call(server: StubConnectorServer) -> None:
    """The prime goes along; the numbers are those of the main prompt and add up."""
    with backend_of(server) as backend:
        compiled(backend, RETURNS)
        with AgentKVContext(backend, [POLICY, Skill("returns", RETURNS)]) as ctx:
            report = ctx.ask("May I return it?").report
    assert report.spliced_tokens == report.predicted_spliced_tokens > 100
    assert report.cached_tokens == 0
    assert report.cached_tokens + report.spliced_tokens + report.computed_tokens == report.prompt_tokens
    (call,) = server.spliced()
    assert call.primes == (call.splices[0].start,)
    assert call.splices[0].start % server.block_size == 0


def test_a_skill_added_later_keeps_what_was_cached(server: StubConnectorServer) -> None:
    """Less than a block of the old prompt is computed again, and the salt is the same."""
    with backend_of(server) as backend:
        compiled(backend, RETURNS)
        with AgentKVContext(backend, [POLICY]) as ctx:
            before = ctx.ask("Hello, I have a question about an order that came yesterday.").report
            ctx.add(Skill("returns", RETURNS))
            report = ctx.ask("May I return it?").report
    assert any(isinstance(step, Splice) for step in report.plan)
    assert report.spliced_tokens == report.predicted_spliced_tokens > 100
    assert before.prompt_tokens - report.cached_tokens < server.block_size
    salts = {
        request.body["cache_salt"] for request in server.got("/v1/completions") if request.body.get("stream")
    }
    assert len(salts) == 1


def test_two_skills_apart_are_loaded_in_one_call(server: StubConnectorServer) -> None:
    """Each has its prime, and what the primes load counts once."""
    with backend_of(server) as backend:
        compiled(backend, RETURNS, REFUNDS)
        with AgentKVContext(backend, [POLICY, Skill("returns", RETURNS), Skill("refunds", REFUNDS)]) as ctx:
            report = ctx.ask("May I return it?").report
    (call,) = server.spliced()
    assert len(call.primes) == 2
    assert report.spliced_tokens == report.predicted_spliced_tokens
    assert report.refused == ()


def test_the_next_turn_is_a_plain_hit_and_asks_nothing(server: StubConnectorServer) -> None:
    """Right after the last call no prime is sent, and as all was cached there is nothing to ask."""
    with backend_of(server, prime_after_s=60.0) as backend:
        compiled(backend, RETURNS)
        with AgentKVContext(backend, [POLICY, Skill("returns", RETURNS)]) as ctx:
            ctx.ask("May I return it?")
            said = len(server.asked)
            report = ctx.ask("And the box?").report
    assert report.spliced_tokens == 0
    assert report.cached_tokens == report.predicted_cached_tokens
    assert len(server.asked) == said + 1
    assert server.spliced()[-1].primes == ()


def test_what_was_evicted_between_turns_is_spliced_again(server: StubConnectorServer) -> None:
    """After a pause the prime goes along again: only what stands before the skill is computed."""
    with backend_of(server, prime_after_s=0.0) as backend:
        compiled(backend, RETURNS)
        with AgentKVContext(backend, [POLICY, Skill("returns", RETURNS)]) as ctx:
            first = ctx.ask("May I return it?").report
            server.evict()
            report = ctx.ask("And the box?").report
    assert 0 <= first.spliced_tokens - report.spliced_tokens < server.block_size
    assert report.cached_tokens == 0
    assert report.miss is not None


def test_a_primed_call_whose_prefix_is_cached_counts_it_as_cached(server: StubConnectorServer) -> None:
    """The prime sent for safety takes nothing from the numbers."""
    with backend_of(server, prime_after_s=0.0) as backend:
        compiled(backend, RETURNS)
        with AgentKVContext(backend, [POLICY, Skill("returns", RETURNS)]) as ctx:
            ctx.ask("May I return it?")
            report = ctx.ask("And the box?").report
    assert report.cached_tokens == report.predicted_cached_tokens
    assert (report.spliced_tokens, report.miss) == (0, None)


def test_an_artifact_that_is_gone_is_reported_and_not_named_again(server: StubConnectorServer) -> None:
    """The turn is computed; the next one knows that there is none."""
    with backend_of(server) as backend:
        compiled(backend, RETURNS)
        server.artifacts.clear()
        with AgentKVContext(backend, [POLICY, Skill("returns", RETURNS)]) as ctx:
            report = ctx.ask("May I return it?").report
            ctx.ask("And the box?")
    assert report.refused == (("skill:returns", Refusal.MISSING),)
    assert report.computed_tokens == report.prompt_tokens
    assert len(server.spliced()) == 1


def test_a_call_that_nobody_remembers_is_counted_as_unknown(server: StubConnectorServer) -> None:
    """Another replica was asked: the answer stands, and no number is made up."""
    with backend_of(server) as backend:
        compiled(backend, RETURNS)
        server.forgetful = True
        with AgentKVContext(backend, [POLICY, Skill("returns", RETURNS)]) as ctx:
            report = ctx.ask("May I return it?").report
    assert report.miss is not None
    assert "not known" in report.miss.value


def test_always_compiles_what_is_missing(server: StubConnectorServer) -> None:
    """In the server, once."""
    with (
        backend_of(server) as backend,
        AgentKVContext(backend, [POLICY, Skill("returns", RETURNS, splice="always")]) as ctx,  # type: ignore[arg-type]
    ):
        assert ctx.ask("May I return it?").report.spliced_tokens > 100
        ctx.ask("And the box?")
    assert len(server.artifacts) == 1


def test_a_server_that_does_not_compile_computes_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The conversation goes on without the splice."""
    with (
        StubConnectorServer(compiles=False) as server,
        backend_of(server) as backend,
        AgentKVContext(backend, [POLICY, Skill("returns", RETURNS, splice="always")]) as ctx,  # type: ignore[arg-type]
    ):
        report = ctx.ask("May I return it?").report
    assert report.refused == (("skill:returns", Refusal.MISSING),)
    assert "does not compile" in caplog.text


def test_a_server_with_tickets_is_given_one_for_this_request_alone() -> None:
    """Tenant, salt, artifact and span stand in it; without a key nothing is spliced."""
    with StubConnectorServer(tickets=True) as server:
        with backend_of(server) as backend, pytest.raises(CapabilityError, match="ticket_key"):
            _ = backend.capabilities
        with backend_of(server, ticket_key=KEY) as backend:
            compiled(backend, RETURNS)
            with AgentKVContext(backend, [POLICY, Skill("returns", RETURNS)]) as ctx:
                ctx.ask("May I return it?")
        (call,) = server.spliced()
        sent = server.got("/v1/completions")
        salt = next(r.body["cache_salt"] for r in sent if r.body.get("stream"))
    ticket = verify(call.ticket or "", KEY, now=0.0)
    splice = call.splices[0]
    assert (ticket.tenant, ticket.salt, ticket.action) == ("default", salt, "splice")
    assert ticket.artifacts == ((splice.artifact, splice.start, splice.stop),)


def test_asynchronous_calls_splice_too(server: StubConnectorServer) -> None:
    """The same numbers through the other context."""

    async def run() -> int:
        async with (
            backend_of(server) as backend,
            AsyncAgentKVContext(backend, [POLICY, Skill("returns", RETURNS, splice="always")]) as ctx,  # type: ignore[arg-type]
        ):
            return (await ctx.ask("May I return it?")).report.spliced_tokens

    assert asyncio.run(run()) > 100


@pytest.mark.parametrize(
    ("found", "cached"),
    [
        ([(64, 0), (160, 64), (400, 160)], 0),
        ([(64, 32), (400, 64)], 32),
        ([(64, 32), (400, 384)], 384),
        ([(64, 32), (160, 128), (400, 160)], 128),
        ([(400, 96)], 96),
    ],
)
def test_what_was_cached_before_a_call_is_told_from_what_it_computed(
    found: list[tuple[int, int]], cached: int
) -> None:
    """Only what reaches behind the call's own shorter prompts was there before."""
    outcomes = [Outcome(prompt=prompt, local=local, loaded=0) for prompt, local in found]
    assert _cached_before(outcomes) == cached
