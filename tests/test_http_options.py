"""How a server is reached: addresses, settings, proxies and certificates; and its words in errors."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentkv.errors import (
    BackendConnectionError,
    ConfigurationError,
)
from agentkv.http import HttpClient, ServerOptions
from agentkv.http.words import words
from tests.conftest import require
from tests.http_calls import (
    CALLS,
    PATH,
    POST,
    VALUES,
    Call,
    client_of,
    good,
)
from tests.server.proxy import Proxy, answered


@pytest.fixture
def server() -> Iterator[Proxy]:
    """A server of scripted answers."""
    with Proxy() as made:
        yield made


@pytest.mark.parametrize(
    ("given", "root"),
    [
        ("http://host:8000", "http://host:8000"),
        ("http://host:8000/", "http://host:8000"),
        ("http://host:8000/v1", "http://host:8000"),
        ("https://host/v1/", "https://host"),
        ("https://host/team/a/v1", "https://host/team/a"),
        ("https://host/team/a/", "https://host/team/a"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_an_address_may_end_in_v1_or_a_slash(given: str, root: str) -> None:
    """It is the same server, behind whatever prefix."""
    assert HttpClient(ServerOptions(given)).url == root


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host:8000",
        "127.0.0.1:8000",
        "ftp://host",
        "http://",
        "http://[::1",
        "http://host:port",
        "http://host:99999",
        "http://host:0",
        "http://ho st",
        "http://host\n",
        None,
        b"http://host",
    ],
)
def test_what_is_no_address_is_refused_where_it_is_given(address: Any) -> None:
    """Not by the first call, and not by another library's error."""
    with pytest.raises(ConfigurationError, match="address"):
        ServerOptions(address)


@pytest.mark.parametrize("address", ["http://me:hunter2@host", "me:hunter2@host", "http://host/?key=hunter2"])
def test_a_secret_in_the_address_is_refused_and_not_repeated(address: str) -> None:
    """Addresses are written into logs and errors."""
    with pytest.raises(ConfigurationError, match="headers") as caught:
        ServerOptions(address)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"api_key": "secret\n"}, "api_key.*line break"),
        ({"api_key": "sécret"}, "api_key.*ASCII"),
        ({"api_key": ""}, "api_key"),
        ({"api_key": b"secret"}, "api_key"),
        ({"headers": {"X-Team": "secret\r\nX-Other: 1"}}, "X-Team"),
        ({"headers": {"X Team": "secret"}}, "X Team"),
        ({"headers": {"X-Team": 5}}, "X-Team"),
        ({"proxy": "secret"}, "proxy"),
        ({"proxy": "gopher://secret"}, "proxy"),
        ({"verify": 5}, "verify is a int"),
        ({"stall_s": 0}, "stall_s"),
        ({"deadline_s": float("inf")}, "deadline_s"),
        ({"connect_s": True}, "connect_s"),
        ({"attempts": 0}, "attempts"),
        ({"attempts": 1.5}, "attempts"),
        ({"backoff_s": -1}, "backoff_s"),
        ({"backoff_s": True}, "backoff_s"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    """The message names it, and holds no secret."""
    with pytest.raises(ConfigurationError, match=words) as caught:
        ServerOptions("http://host", **settings)
    assert "secret" not in str(caught.value)


@CALLS
def test_a_proxy_is_used(server: Proxy, call: Call) -> None:
    """The request line names the whole address; the server itself is never asked for."""
    server.always(good(call), PATH)
    client = HttpClient(ServerOptions("http://model.invalid:8000/v1", proxy=server.url))
    call(client)
    assert [seen.path for seen in server.seen(PATH)] == [f"http://model.invalid:8000{PATH}"]


def test_proxies_of_the_environment_are_used_unless_they_are_not_trusted(
    server: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trust_env` decides."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with Proxy() as between:
        monkeypatch.setenv("HTTP_PROXY", between.url)
        for stub, body in ((server, '"direct"'), (between, '"through"')):
            stub.always(answered(200, body), PATH)
        assert client_of(server, trust_env=True).post(POST) == "through"
        assert client_of(server, trust_env=False).post(POST) == "direct"


def test_a_proxy_of_the_environment_that_is_no_address_is_a_configuration_error(
    server: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not an error of another library."""
    monkeypatch.setenv("HTTP_PROXY", "gopher://127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="proxy"):
        client_of(server, trust_env=True).post(POST)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1, with its key beside it."""
    folder = tmp_path_factory.mktemp("tls")
    made = folder / "cert.pem"
    try:
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
                *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
                *("-keyout", str(folder / "key.pem"), "-out", str(made)),
            ],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        require(None, "the command openssl is missing: it makes a certificate for the tests")
    return made


@pytest.fixture
def secure(certificate: Path) -> Iterator[Proxy]:
    """A server that speaks TLS with that certificate."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, certificate.with_name("key.pem"))
    with Proxy(tls=tls) as made:
        yield made


@VALUES
def test_a_certificate_that_nobody_vouches_for_is_refused_at_once(secure: Proxy, call: Call) -> None:
    """No further attempt would change it; the error says what to give."""
    client = client_of(secure, backoff_s=1000.0, deadline_s=10_000.0)
    with pytest.raises(BackendConnectionError, match=r"not trusted.*verify="):
        call(client)
    assert not secure.seen(PATH)


@VALUES
@pytest.mark.parametrize("how", ["file", "context", "off"])
def test_a_certificate_that_is_given_is_accepted(
    secure: Proxy, call: Call, certificate: Path, how: str
) -> None:
    """As a file or in a context; or none is checked."""
    secure.always(answered(200, "7"), PATH)
    verify = {
        "file": str(certificate),
        "context": ssl.create_default_context(cafile=certificate),
        "off": False,
    }[how]
    assert call(client_of(secure, verify=verify)) == 7


@pytest.mark.parametrize("text", [None, "no certificate"])
def test_a_file_without_certificates_is_refused_when_the_client_is_made(
    tmp_path: Path, text: str | None
) -> None:
    """Its path is in the message."""
    path = tmp_path / "ca.pem"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"ca\.pem"):
        HttpClient(ServerOptions("https://host", verify=str(path)))


def test_words_are_the_message_in_one_short_line() -> None:
    """Wherever a server keeps it, and whatever it sends instead of JSON."""
    assert words('{"error": {"message": "a\\n  b", "code": 4}}') == "a b"
    assert words('{"detail": "c"}') == "c"
    assert words('{"message": "d"}') == "d"
    assert words("<h1>\nno</h1>") == "<h1> no</h1>"
    assert words("") == ""
    assert len(words("x" * 10_000)) == 401


@pytest.mark.parametrize(
    "echo",
    [
        "{'type': 'missing', 'input': 'secret, with a comma', 'loc': 'kept'}",
        "{'type': 'missing', 'input': {'a': ['secret', {'b': \"it's secret\"}]}, 'loc': 'kept'}",
        "{'type': 'missing', 'input': 'it\\'s secret, all', 'loc': 'kept'}",
        "{'input': [['secret', 1], ('secret',)], 'loc': 'kept'}",
        "[type=missing, input_value={'a': 'secret...', 'x secret'}, input_type=dict, kept]",
        "kept, then {'input': {'a': 'secret, which the server cut off",
    ],
)
def test_words_do_not_repeat_what_was_sent(echo: str) -> None:
    """Validation errors hold the input, however it is nested."""
    said = words(f"1 validation error:\n  {echo}")
    assert "secret" not in said
    assert "kept" in said


def test_words_do_not_repeat_what_was_sent_in_json() -> None:
    """The form of a web framework's own validation errors."""
    said = words(
        '{"detail": [{"loc": ["body"], "input": {"a": "x \\" secret", "b": [1, {}]}, "msg": "kept"}]}'
    )
    assert "secret" not in said
    assert "kept" in said
