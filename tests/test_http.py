"""What is sent to a server, when it is sent again, and what an answer that is none means."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from agentkv.errors import (
    BackendAuthError,
    BackendBusyError,
    BackendError,
    BackendRequestError,
    BackendTimeoutError,
    ContextWindowError,
)
from agentkv.http import HttpClient, ServerOptions
from agentkv.http.failures import retry_after
from tests.http_calls import (
    BUSY,
    CALLS,
    KEY,
    PATH,
    POST,
    SECRET,
    STREAMS,
    VALUES,
    Call,
    client_of,
    good,
)
from tests.server.proxy import Behaviour, Ending, Exchange, Proxy, answered, bodies, streamed


@pytest.fixture
def server() -> Iterator[Proxy]:
    """A server of scripted answers."""
    with Proxy() as made:
        yield made


@CALLS
def test_key_headers_and_body_are_sent(server: Proxy, call: Call) -> None:
    """The key as a bearer token, and the body as compact UTF-8."""
    server.always(good(call), PATH)
    call(client_of(server, api_key=KEY, headers={"X-Team": SECRET}))
    (seen,) = server.seen(PATH)
    assert seen.headers["authorization"] == f"Bearer {KEY}"
    assert seen.headers["x-team"] == SECRET
    assert seen.headers["content-type"] == "application/json"
    assert seen.body == '{"prompt":"what nobody else reads","value":"délivré"}'.encode()


def test_key_and_headers_are_in_no_text() -> None:
    """Neither in what an option, a client or a request shows of itself."""
    options = ServerOptions(
        "http://host", api_key=KEY, headers={"X-Team": SECRET}, proxy="http://me:hunter2@host:1"
    )
    for text in (repr(options), str(options), repr(HttpClient(options)), repr(POST)):
        for secret in (KEY, SECRET, "hunter2", "nobody else"):
            assert secret not in text


@CALLS
def test_logs_hold_neither_key_nor_prompt(
    server: Proxy, call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    """At the finest level of every logger, those of the HTTP library too, with a retry and a failure."""
    caplog.set_level(logging.DEBUG)
    for name in ("httpx2", "httpcore2", "httpcore2.http11", "httpcore2.connection", "agentkv.http"):
        caplog.set_level(logging.DEBUG, logger=name)
    server.always(answered(503, BUSY), PATH)
    client = client_of(server, api_key=KEY, headers={"X-Team": SECRET}, attempts=2)
    with pytest.raises(BackendBusyError, match="the queue is full"):
        call(client)
    assert len(server.seen(PATH)) == 2
    assert "attempt 1 of 2 failed" in caplog.text
    assert "send_request_headers" in caplog.text
    for secret in (KEY, SECRET, "nobody else", "délivré"):
        assert secret not in caplog.text


@CALLS
@pytest.mark.parametrize("fault", [answered(503, BUSY), answered(429, BUSY, retry_after="0")])
def test_a_busy_server_is_asked_again_with_the_same_bytes(
    server: Proxy, call: Call, fault: Behaviour
) -> None:
    """Until it answers."""
    server.script(fault, lambda exchange: exchange.end(Ending.RESET), good(call), path=PATH)
    assert call(client_of(server)) == [{}]
    sent = bodies(server.seen(PATH))
    assert len(sent) == 3
    assert len(set(sent)) == 1


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("7", 7, 7),
        ("0.5", 0.5, 0.5),
        ("-3", 0, 0),
        ("", None, None),
        ("soon", None, None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0),
        (format_datetime(datetime.now(UTC) + timedelta(hours=2), usegmt=True), 3600, 7200),
    ],
)
def test_the_wait_that_a_server_asks_for_is_read(text: str, least: float | None, most: float | None) -> None:
    """Seconds or a date; what is neither is no wait."""
    found = retry_after({"retry-after": text})
    assert found == least if least is None or most is None else least <= (found or 0.0) <= most


@CALLS
def test_a_wait_beyond_the_deadline_is_not_begun(server: Proxy, call: Call) -> None:
    """The error comes at once, after one request."""
    server.always(answered(503, BUSY, retry_after="86400"), PATH)
    with pytest.raises(BackendBusyError):
        call(client_of(server))
    assert len(server.seen(PATH)) == 1


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        (307, BackendRequestError, "https://elsewhere"),
        (400, BackendRequestError, "no such field"),
        (401, BackendAuthError, "api_key"),
        (403, BackendAuthError, "api_key"),
        (404, BackendRequestError, "no such field"),
        (408, BackendTimeoutError, "no such field"),
        (500, BackendError, "no such field"),
        (504, BackendTimeoutError, "no such field"),
    ],
)
@CALLS
def test_a_refusal_is_an_error_in_the_servers_words(
    server: Proxy, call: Call, status: int, error: type[BackendError], said: str
) -> None:
    """The kind follows the status; nothing is tried again."""
    body = '{"error": {"message": "no such field", "code": 1}}'
    server.always(answered(status, body, location="https://elsewhere"), PATH)
    with pytest.raises(error, match=said):
        call(client_of(server))
    assert len(server.seen(PATH)) == 1


@CALLS
def test_a_prompt_that_is_too_long_for_the_server_is_a_window_error(server: Proxy, call: Call) -> None:
    """By its words, as no status says so."""
    server.always(answered(400, '{"error": {"code": "context_length_exceeded", "message": "no"}}'), PATH)
    with pytest.raises(ContextWindowError, match="rebase"):
        call(client_of(server))


@VALUES
def test_an_answer_that_is_not_json_is_an_error(server: Proxy, call: Call) -> None:
    """Such as a login page."""
    server.always(answered(200, "<html>"), PATH)
    with pytest.raises(BackendError, match="not JSON"):
        call(client_of(server))


def _named_error(exchange: Exchange) -> None:
    exchange.open()
    exchange.piece(b'data: {}\n\nevent: error\ndata: {"message": "out of luck"}\n\n')
    exchange.end(Ending.CLEAN)


@STREAMS
@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        pytest.param(answered(200, '{"id": 1}'), "does not stream", id="a whole answer"),
        pytest.param(streamed("{]", "[DONE]"), "not JSON", id="no JSON"),
        pytest.param(streamed("[1]", "[DONE]"), "no object", id="no object"),
        pytest.param(streamed("{}", '{"error": "out of luck"}'), "out of luck", id="an error's text"),
        pytest.param(
            streamed("{}", '{"error": {"message": "out of luck", "code": 500}}'), "out of luck", id="an error"
        ),
        pytest.param(
            streamed("{}", '{"object": "error", "message": "out of luck"}'), "out of luck", id="an old error"
        ),
        pytest.param(_named_error, "out of luck", id="an event of that name"),
        pytest.param(streamed("{}"), "in its midst", id="no end"),
        pytest.param(streamed("{}", ending=Ending.RESET), "broke", id="a reset"),
        pytest.param(streamed("{}", ending=Ending.CLOSED), "broke", id="a closed connection"),
    ],
)
def test_a_stream_that_is_none_is_an_error(
    server: Proxy, call: Call, behaviour: Behaviour, said: str
) -> None:
    """It is not tried again."""
    server.always(behaviour, PATH)
    with pytest.raises(BackendError, match=said):
        call(client_of(server))
    assert len(server.seen(PATH)) == 1


@pytest.mark.parametrize(
    ("code", "error"),
    [(400, BackendRequestError), (429, BackendBusyError), (200, BackendError), ("busy", BackendError)],
)
@STREAMS
def test_an_error_amid_a_stream_is_of_the_kind_that_its_code_says(
    server: Proxy, call: Call, code: object, error: type[BackendError]
) -> None:
    """It is never tried again, busy or not."""
    told = json.dumps({"error": {"message": "no", "code": code}})
    server.always(streamed("{}", told), PATH)
    with pytest.raises(error):
        call(client_of(server))
    assert len(server.seen(PATH)) == 1


@STREAMS
@pytest.mark.parametrize("ending", [Ending.RESET, Ending.CLOSED, Ending.STALL])
def test_what_fails_behind_the_last_event_concerns_nobody(server: Proxy, call: Call, ending: Ending) -> None:
    """The answer is whole by then."""
    server.always(streamed("{}", "[DONE]", ending=ending), PATH)
    assert call(client_of(server, stall_s=0.2)) == [{}]


@STREAMS
def test_events_of_a_megabyte_are_read(server: Proxy, call: Call) -> None:
    """A server repeats a long prompt's ids in its first event."""
    ids = list(range(200_000))
    server.always(streamed(f'{{"prompt_token_ids": {ids}}}', "[DONE]"), PATH)
    assert call(client_of(server)) == [{"prompt_token_ids": ids}]


def _drip(exchange: Exchange) -> None:
    """Send signs of life until the client leaves."""
    exchange.open()
    while True:
        exchange.piece(b": still here\n\n")


@STREAMS
def test_signs_of_life_do_not_outlast_the_deadline(server: Proxy, call: Call) -> None:
    """Comments keep a connection open, and are no answer."""
    server.always(_drip, PATH)
    with pytest.raises(BackendTimeoutError, match="deadline_s"):
        call(client_of(server, deadline_s=0.2))


@CALLS
def test_silence_is_a_timeout(server: Proxy, call: Call) -> None:
    """It is not tried again: the server may be at work."""
    server.always(lambda exchange: exchange.end(Ending.STALL), PATH)
    with pytest.raises(BackendTimeoutError, match="stall_s"):
        call(client_of(server, stall_s=0.2))
    assert len(server.seen(PATH)) == 1
