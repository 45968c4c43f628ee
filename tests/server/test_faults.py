"""What fails between client and server: nothing is lost or said twice, and the next turn is right."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest

from agentkv import AgentKVContext
from agentkv.backends import VLLMBackend
from agentkv.errors import (
    BackendAuthError,
    BackendBusyError,
    BackendConnectionError,
    BackendError,
    BackendTimeoutError,
    ContextWindowError,
    TruncationDetectedError,
)
from agentkv.huggingface import HuggingFaceTokenizer
from agentkv.ledger import Ledger
from agentkv.miss import Miss
from agentkv.tokenizer import ChatTokenizer
from scripts.vllm_server import LocalServer, Options, Server, start, stop
from tests.desk import errata
from tests.server.proxy import Behaviour, Ending, Proxy, answered, bodies, cut, edited, passed, watched
from tests.server.talk import LONG, Opener, Talk

BUSY: Final = '{"error": {"message": "the queue is full"}}'


@contextmanager
def hurried(backend: VLLMBackend, **settings: Any) -> Iterator[None]:
    """Make a backend impatient for a call: the real server needs its time for all others."""
    http = backend._http
    before = http.options
    http.options = replace(before, **settings)
    try:
        yield
    finally:
        http.options = before


@pytest.fixture(params=["sync", "async"])
def opened(request: pytest.FixtureRequest) -> Iterator[Opener]:
    """Opens conversations of one kind; they are left at the end of the test, as is their event loop."""
    with asyncio.Runner() as running:
        runner = running if request.param == "async" else None
        talks: list[Talk] = []

        def make(backend: Any) -> Talk:
            talk = Talk(backend, runner)
            talk.enter()
            talks.append(talk)
            return talk

        yield make
        for talk in talks:
            talk.leave()


@pytest.fixture
def proxy(vllm_server: Server) -> Iterator[Proxy]:
    """A proxy in front of the server."""
    with Proxy(vllm_server.url) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer(small_model_dir: Path) -> ChatTokenizer:
    """The small model's tokenizer, loaded once."""
    return HuggingFaceTokenizer.from_pretrained(str(small_model_dir))


def backend_of(proxy: Proxy, tokenizer: ChatTokenizer, **settings: Any) -> VLLMBackend:
    return VLLMBackend(proxy.url, tokenizer=tokenizer, **{"backoff_s": 0.01, **settings})


def said(talk: Talk) -> list[str]:
    return [entry.text for entry in errata(talk.ledger)]


def prompt(proxy: Proxy, tokenizer: ChatTokenizer) -> str:
    """Return the text of the last prompt that was sent."""
    return tokenizer.decode(json.loads(proxy.seen()[-1].body)["prompt"])


def begun(talk: Talk) -> Ledger:
    """Make a first turn, change a field, and return the ledger."""
    talk.ask("Hello")
    talk.ctx.set("status", "delivered")
    return talk.ledger


def check_goes_on(talk: Talk, proxy: Proxy, tokenizer: ChatTokenizer) -> None:
    """After a failed call: the same call works, and it and the next one tell the change once."""
    reply = talk.ask("Where is it?")
    for turn in (reply, talk.ask("Thank you")):
        report = turn.report
        assert report.cached_tokens == report.predicted_cached_tokens or report.miss is Miss.SHARED, report
        assert report.cached_tokens > 0
        assert prompt(proxy, tokenizer).count(reply.report.erratum) == 1
        assert said(talk) == [reply.report.erratum]
    assert reply.report.erratum.count("Update 1:") == 1
    assert talk.ctx.report.turns == 3


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([answered(503, BUSY)] * 2, id="503"),
        pytest.param([answered(503, BUSY, retry_after="0")], id="503 with a wait"),
        pytest.param([answered(429, BUSY, retry_after="0.01")], id="429 with a wait"),
        pytest.param([cut(Ending.RESET)] * 2, id="reset before a byte"),
        pytest.param([cut(Ending.CLOSED)], id="closed before a byte"),
        pytest.param([cut(Ending.RESET, after=0)], id="reset before the first event"),
        pytest.param([cut(Ending.RESET, after=0, more=20)], id="reset amid the first event"),
        pytest.param([cut(Ending.CLEAN, after=0)], id="ended before the first event"),
    ],
)
def test_what_fails_before_the_first_token_is_sent_again_byte_for_byte(
    opened: Opener, proxy: Proxy, tokenizer: ChatTokenizer, faults: list[Behaviour]
) -> None:
    """The caller sees an answer and no failure."""
    talk = opened(backend_of(proxy, tokenizer))
    begun(talk)
    earlier = len(proxy.seen())
    proxy.script(*faults)
    reply = talk.ask("Where is it?")
    sent = bodies(proxy.seen()[earlier:])
    assert len(sent) == len(faults) + 1
    assert len(set(sent)) == 1
    assert said(talk) == [reply.report.erratum]
    assert prompt(proxy, tokenizer).count(reply.report.erratum) == 1
    assert reply.report.cached_tokens >= reply.report.predicted_cached_tokens > 0
    follow = talk.ask("Thank you").report
    assert follow.cached_tokens == follow.predicted_cached_tokens
    assert not follow.erratum


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        pytest.param(cut(Ending.RESET, after=2), BackendConnectionError, "broke", id="reset"),
        pytest.param(cut(Ending.RESET, after=2, more=30), BackendConnectionError, "broke", id="reset in one"),
        pytest.param(cut(Ending.CLOSED, after=2), BackendConnectionError, "broke", id="closed"),
        pytest.param(cut(Ending.CLEAN, after=2), BackendConnectionError, "in its midst", id="ended"),
        pytest.param(
            edited(lambda i, event: event.replace(b"{", b"", 1) if i == 2 else event),
            BackendError,
            "not JSON",
            id="garbled",
        ),
        pytest.param(
            edited(
                lambda i, event: b'data: {"error": {"message": "out of memory"}}\n\n' if i == 2 else event
            ),
            BackendError,
            "out of memory",
            id="error event",
        ),
        pytest.param(
            edited(lambda _, event: re.sub(rb'"finish_reason":"\w+"', b'"finish_reason":"abort"', event)),
            BackendError,
            "abort",
            id="abort",
        ),
        pytest.param(
            edited(lambda _, event: event.replace(b'"prompt_tokens":', b'"prompt_tokens":9,"x":')),
            TruncationDetectedError,
            "read 9",
            id="truncated prompt",
        ),
    ],
)
def test_what_fails_amid_the_answer_is_not_sent_again_and_changes_nothing(
    opened: Opener,
    proxy: Proxy,
    tokenizer: ChatTokenizer,
    fault: Behaviour,
    error: type[BackendError],
    words: str,
) -> None:
    """The caller has seen tokens by then, so that the failure is his to handle."""
    talk = opened(backend_of(proxy, tokenizer))
    before = begun(talk)
    proxy.script(fault)
    earlier = len(proxy.seen())
    with pytest.raises(error, match=words):
        talk.ask("Where is it?")
    assert len(proxy.seen()) == earlier + 1
    assert talk.ledger is before
    check_goes_on(talk, proxy, tokenizer)
    assert len(set(bodies(proxy.seen()[earlier : earlier + 2]))) == 1


@pytest.mark.parametrize(
    ("after", "settings"), [(None, {"stall_s": 0.3}), (2, {"stall_s": 0.3}), (2, {"deadline_s": 0.3})]
)
def test_silence_ends_in_an_error_and_changes_nothing(
    opened: Opener, proxy: Proxy, tokenizer: ChatTokenizer, after: int | None, settings: dict[str, Any]
) -> None:
    """Before the answer, behind its head or amid it; it is not sent again."""
    backend = backend_of(proxy, tokenizer)
    talk = opened(backend)
    before = begun(talk)
    proxy.script(cut(Ending.STALL, after=after))
    earlier = len(proxy.seen())
    with hurried(backend, **settings), pytest.raises(BackendTimeoutError, match=r"stall_s|deadline_s"):
        talk.ask("Where is it?")
    assert len(proxy.seen()) == earlier + 1
    assert talk.ledger is before
    check_goes_on(talk, proxy, tokenizer)


def check_idle(server: Server) -> None:
    """Wait until the server runs nothing; it counts anew with each step, so that it is given one."""
    pause, running = threading.Event(), ""
    body = {"model": server.model, "prompt": [1], "max_tokens": 1}
    for _ in range(100):
        httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False)
        metrics = httpx2.get(f"{server.url}/metrics", trust_env=False).text
        running = " ".join(re.findall(r"(?m)^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)", metrics))
        if set(running.split()) == {"0.0"}:
            return
        pause.wait(0.1)
    pytest.fail(f"the server still runs requests: {running}")


def test_a_client_that_leaves_ends_the_call_on_the_server(
    opened: Opener, proxy: Proxy, tokenizer: ChatTokenizer, vllm_server: Server
) -> None:
    """A closed stream frees the server, and leaves no trace in the ledger."""
    talk = opened(backend_of(proxy, tokenizer))
    before = begun(talk)
    talk.leave_after_two_pieces("Where is it?")
    assert talk.ledger is before
    check_idle(vllm_server)
    check_goes_on(talk, proxy, tokenizer)


@pytest.mark.parametrize("opened", ["async"], indirect=True)
def test_a_cancelled_task_ends_the_call_on_the_server(
    opened: Opener, proxy: Proxy, tokenizer: ChatTokenizer, vllm_server: Server
) -> None:
    """As closing does, from wherever the task is cancelled."""
    talk = opened(backend_of(proxy, tokenizer))
    before = begun(talk)
    reached = threading.Event()
    proxy.script(watched(2, reached))
    talk.cancel("Where is it?", reached)
    assert talk.ledger is before
    check_idle(vllm_server)
    check_goes_on(talk, proxy, tokenizer)


@pytest.mark.parametrize("wait", [{"retry_after": "0.02"}, {"retry_after": "3600"}, {}])
def test_a_server_that_stays_busy_is_given_up_at_the_deadline(
    opened: Opener, proxy: Proxy, tokenizer: ChatTokenizer, wait: dict[str, str]
) -> None:
    """However many attempts are left, and whatever wait the server asks for; its words are in the error."""
    backend = backend_of(proxy, tokenizer)
    talk = opened(backend)
    before = begun(talk)
    proxy.always(answered(503, BUSY, **wait))
    with (
        hurried(backend, attempts=1_000_000, deadline_s=0.5),
        pytest.raises(BackendBusyError, match="the queue is full"),
    ):
        talk.ask("Where is it?")
    proxy.always(passed)
    assert talk.ledger is before
    check_goes_on(talk, proxy, tokenizer)


def test_attempts_bound_the_retries(opened: Opener, proxy: Proxy, tokenizer: ChatTokenizer) -> None:
    """So many requests are seen and no more."""
    talk = opened(backend_of(proxy, tokenizer, attempts=3))
    before = begun(talk)
    earlier = len(proxy.seen())
    proxy.script(*[answered(503, BUSY, retry_after="0")] * 3)
    with pytest.raises(BackendBusyError):
        talk.ask("Where is it?")
    assert len(proxy.seen()) == earlier + 3
    assert talk.ledger is before
    check_goes_on(talk, proxy, tokenizer)


def test_a_key_that_is_refused_is_an_error_of_its_own(
    opened: Opener, proxy: Proxy, tokenizer: ChatTokenizer
) -> None:
    """At entry and later, without another attempt, and the key is in no text."""
    key = "sk-of-the-tests-1234"
    refusal = answered(401, f'{{"error": {{"message": "wrong key: {key}"}}}}')
    talk = opened(backend_of(proxy, tokenizer, api_key=key))
    before = begun(talk)
    assert proxy.seen()[-1].headers["authorization"] == f"Bearer {key}"
    earlier = len(proxy.seen())
    proxy.script(refusal)
    with pytest.raises(BackendAuthError, match="wrong key: …") as caught:
        talk.ask("Where is it?")
    assert key not in str(caught.value)
    assert len(proxy.seen()) == earlier + 1
    assert talk.ledger is before
    proxy.script(refusal, path="/v1/models")
    with pytest.raises(BackendAuthError, match="wrong key: …"):
        opened(backend_of(proxy, tokenizer, api_key=key))
    check_goes_on(talk, proxy, tokenizer)


def test_a_server_that_is_not_there_is_named_at_entry(opened: Opener, tokenizer: ChatTokenizer) -> None:
    """Nothing waits for it: the address may be wrong."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    with pytest.raises(BackendConnectionError, match=f"127.0.0.1:{port}.*is the server running"):
        opened(VLLMBackend(f"http://127.0.0.1:{port}", tokenizer=tokenizer))


def test_the_servers_own_limit_is_a_context_window_error(
    opened: Opener, proxy: Proxy, tokenizer: ChatTokenizer
) -> None:
    """Where the caller says that the window is larger than it is, the server's refusal is understood."""
    talk = opened(backend_of(proxy, tokenizer, context_window=1_000_000))
    before = begun(talk)
    with pytest.raises(ContextWindowError, match="rebase"):
        talk.ask("Where is it?", max_tokens=500_000)
    assert talk.ledger is before
    check_goes_on(talk, proxy, tokenizer)


@pytest.mark.timeout(1200)
def test_a_server_that_is_killed_amid_an_answer_and_comes_back_goes_on_cold(
    vllm_python: Path, small_model_dir: Path, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    """The failed call is made again on the new process, and the report names the restart."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    options = Options(
        python=vllm_python, model=str(small_model_dir), kv_gib=1, port=port, state_dir=tmp_path, limit_s=500
    )
    server: LocalServer = start(options)
    try:
        talk = Talk(VLLMBackend(server.url, tokenizer=tokenizer, attempts=1), None)
        talk.enter()
        before = begun(talk)
        assert isinstance(talk.ctx, AgentKVContext)
        stream = talk.ctx.stream("Where is it?", max_tokens=LONG)
        next(stream)
        os.killpg(server.pid, signal.SIGKILL)
        with pytest.raises(BackendConnectionError):
            for _ in stream:
                pass
        assert talk.ledger is before
        stop(server)  # once it is dead, nothing listens
        with pytest.raises(BackendConnectionError, match="is the server running"):
            talk.ask("Where is it?")
        server = start(options)
        reply = talk.ask("Where is it?")
        assert reply.report.miss is Miss.RESTARTED
        assert reply.report.cached_tokens == 0 < reply.report.predicted_cached_tokens
        follow = talk.ask("Thank you").report
        assert follow.cached_tokens == follow.predicted_cached_tokens > 0
        assert follow.miss is None
        assert said(talk) == [reply.report.erratum]
        talk.leave()
    finally:
        stop(server)
