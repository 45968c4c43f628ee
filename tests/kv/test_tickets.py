"""A ticket permits what it says, to its holder, until it expires, and nothing else."""

from __future__ import annotations

import base64
import hmac

import pytest

from agentkv.errors import ConfigurationError, TicketError
from agentkv.kv.tickets import Ticket, sign, verify

KEY = bytes(range(32))
TICKET = Ticket(
    tenant="acme",
    salt="approx-" + "0" * 64,
    artifacts=(("a" * 64, 32, 480), ("b" * 64, 512, 600)),
    action="splice",
    expires=1000.0,
)


def test_a_ticket_reads_back_until_it_expires() -> None:
    """All that was signed, to the last moment."""
    assert verify(sign(TICKET, KEY), KEY, now=999.9) == TICKET


@pytest.mark.parametrize("now", [1000.0, 1e9])
def test_an_expired_ticket_is_refused(now: float) -> None:
    """From the moment on that it names."""
    with pytest.raises(TicketError, match="expired"):
        verify(sign(TICKET, KEY), KEY, now=now)


def test_a_ticket_of_another_key_is_refused() -> None:
    """Who does not hold the server's key cannot make one."""
    with pytest.raises(TicketError, match="signature is wrong"):
        verify(sign(TICKET, bytes(32)), KEY, now=0)


def _payload(ticket: Ticket) -> str:
    return base64.urlsafe_b64encode(ticket.model_dump_json().encode()).decode()


@pytest.mark.parametrize(
    "changed",
    [
        {"tenant": "other"},
        {"salt": "approx-" + "1" * 64},
        {"artifacts": (("c" * 64, 32, 480),)},
        {"action": "compile"},
        {"expires": 2000.0},
    ],
)
def test_an_altered_ticket_is_refused(changed: dict[str, object]) -> None:
    """The signature of one is not that of another, whatever part of it differs."""
    other = TICKET.model_copy(update=changed)
    signature = sign(TICKET, KEY).partition(".")[2]
    with pytest.raises(TicketError, match="signature is wrong"):
        verify(f"{_payload(other)}.{signature}", KEY, now=0)


@pytest.mark.parametrize(
    "text", ["", ".", "no signature", f"{_payload(TICKET)}.", f"{_payload(TICKET)}.ä", "ä.ö", "a.b.c"]
)
def test_what_is_no_ticket_is_refused(text: str) -> None:
    """Whatever a client sends."""
    with pytest.raises(TicketError):
        verify(text, KEY, now=0)


@pytest.mark.parametrize("payload", ["!!!", "e30=", base64.urlsafe_b64encode(b"\xff\xfe").decode(), "e30"])
def test_a_signed_text_that_is_no_ticket_is_refused(payload: str) -> None:
    """As another release might sign it."""
    signature = hmac.new(KEY, b"agentkv-ticket/1\x00" + payload.encode(), "sha256").hexdigest()
    with pytest.raises(TicketError, match="malformed"):
        verify(f"{payload}.{signature}", KEY, now=0)


def test_a_signature_for_another_purpose_is_no_tickets() -> None:
    """Artifacts may be signed with the same key."""
    payload = _payload(TICKET)
    signature = hmac.new(KEY, payload.encode(), "sha256").hexdigest()
    with pytest.raises(TicketError, match="signature is wrong"):
        verify(f"{payload}.{signature}", KEY, now=0)


def test_a_short_key_is_refused() -> None:
    """The message holds its length and not the key."""
    with pytest.raises(ConfigurationError, match="5 bytes") as caught:
        sign(TICKET, b"short")
    assert "short" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="5 bytes"):
        verify(sign(TICKET, KEY), b"short", now=0)


@pytest.mark.parametrize("now", [float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(now: float) -> None:
    """A ticket is never valid because a comparison with it is false."""
    with pytest.raises(ConfigurationError, match="no number of seconds"):
        verify(sign(TICKET, KEY), KEY, now=now)


@pytest.mark.parametrize("expires", [float("nan"), float("inf")])
def test_a_ticket_expires(expires: float) -> None:
    """There is none for ever."""
    with pytest.raises(ValueError, match="finite"):
        Ticket.model_validate({**TICKET.model_dump(), "expires": expires})
