"""Tickets: a client's permission to splice or compile, signed with a key that the server shares.

A ticket names the tenant, the salt and the artifacts, so it is of no use in another request. Without a key
on the server none is asked for.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import math
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from agentkv.errors import ConfigurationError, TicketError
from agentkv.kv.complaints import complaint

_LEAST_KEY: Final = 16
# Another kind of signature made with the same key is never a ticket's.
_PURPOSE: Final = b"agentkv-ticket/1\x00"

ArtifactName = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""Name of an artifact: 64 hex digits."""


class Ticket(BaseModel):
    """What its holder may do, and until when."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    tenant: str
    """Whose artifacts may be used."""
    salt: str
    """Cache salt of the request; the permission holds for this one alone."""
    artifacts: tuple[tuple[ArtifactName, int, int], ...]
    """Artifact, first prompt token and the one after the last, for each splice; for compiling, empty."""
    action: Literal["splice", "compile"]
    expires: float = Field(allow_inf_nan=False)
    """Unix time in seconds from which on it is void."""


def sign(ticket: Ticket, key: bytes) -> str:
    """Write a ticket as text: its JSON in base64url, a dot, and the hex HMAC-SHA256 of that.

    Raises
    ------
    ConfigurationError
        The key is shorter than 16 bytes.
    """
    payload = base64.urlsafe_b64encode(ticket.model_dump_json().encode()).decode()
    return f"{payload}.{_signature(payload, key)}"


def verify(text: str, key: bytes, *, now: float) -> Ticket:
    """Read a ticket that was signed with `key` and has not expired at `now` (Unix time in seconds).

    Raises
    ------
    TicketError
        It has another form, another signature, or has expired.
    ConfigurationError
        The key is shorter than 16 bytes.
    """
    if not math.isfinite(now):
        raise ConfigurationError(f"the time {now} is no number of seconds; give Unix time")
    payload, dot, signature = text.partition(".")
    if not dot or not text.isascii():
        raise TicketError(f"a ticket of {len(text)} characters has no signature; use one made by sign")
    if not hmac.compare_digest(signature, _signature(payload, key)):
        raise TicketError("the ticket's signature is wrong: it was altered, or signed with another key")
    try:
        ticket = Ticket.model_validate_json(base64.urlsafe_b64decode(payload))
    except binascii.Error:
        raise TicketError("the ticket is signed but malformed: its first part is no base64url") from None
    except ValidationError as error:
        raise TicketError(
            f"the ticket is signed but malformed, or of another release of agentkv: {complaint(error)}"
        ) from None
    if now >= ticket.expires:
        raise TicketError(
            f"the ticket expired {now - ticket.expires:.0f} s ago; ask for a new one, and compare the clocks"
        )
    return ticket


def _signature(payload: str, key: bytes) -> str:
    if len(key) < _LEAST_KEY:
        raise ConfigurationError(
            f"the ticket key is {len(key)} bytes; give {_LEAST_KEY} random bytes or more "
            "(secrets.token_bytes)"
        )
    return hmac.new(key, _PURPOSE + payload.encode(), "sha256").hexdigest()
