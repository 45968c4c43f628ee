"""How a server is reached."""

from __future__ import annotations

import math
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict
from urllib.parse import urlsplit, urlunsplit

from agentkv.errors import ConfigurationError


class ServerSettings(TypedDict, total=False):
    """The fields of `ServerOptions` beside the address, as keyword arguments."""

    api_key: str | None
    headers: Mapping[str, str]
    verify: bool | str | ssl.SSLContext
    proxy: str | None
    trust_env: bool
    connect_s: float
    stall_s: float
    deadline_s: float
    attempts: int
    backoff_s: float


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a server is reached, and how long it is waited for; keyword arguments of the server backends.

    Raises
    ------
    ConfigurationError
        The address is none, or a number is out of range.
    """

    base_url: str
    """Address of the server, such as ``"http://127.0.0.1:8000"``; a trailing ``/v1`` makes no difference."""
    api_key: str | None = field(default=None, repr=False)
    """Sent as ``Authorization: Bearer``; never written into a log or an error."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Further headers of every request."""
    verify: bool | str | ssl.SSLContext = True
    """Whether certificates are checked: True, False, a file of trusted ones, or a context."""
    proxy: str | None = field(default=None, repr=False)
    """Address of a proxy; None takes the environment's (``HTTPS_PROXY``, ``NO_PROXY``)."""
    trust_env: bool = True
    """Whether proxies of the environment are used."""
    connect_s: float = 10.0
    """Longest time to connect, in seconds."""
    stall_s: float = 120.0
    """Longest silence of the server, in seconds: before the first token and between two."""
    deadline_s: float = 600.0
    """Longest time for a whole call, retries included, in seconds; it may be passed by one `stall_s`."""
    attempts: int = 5
    """How often a call is made before its first token: connections that fail, and answers 429 and 503."""
    backoff_s: float = 0.5
    """Wait before the second attempt, in seconds; it doubles each time, unless the server names a wait."""

    def __post_init__(self) -> None:
        if not isinstance(self.base_url, str):
            raise ConfigurationError(f"base_url is a {type(self.base_url).__name__}; give an address")
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(
                f"base_url={self.base_url!r} is no address: give one such as 'http://127.0.0.1:8000'"
            )
        if parts.username or parts.password:
            raise ConfigurationError(
                "base_url holds a user name or password: give api_key or headers instead"
            )
        for name in ("connect_s", "stall_s", "deadline_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigurationError(f"{name}={value!r} has to be a number of seconds above 0")
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int) or self.attempts < 1:
            raise ConfigurationError(f"attempts={self.attempts!r} has to be a whole number, at least 1")
        if not isinstance(self.backoff_s, int | float) or not 0 <= self.backoff_s < math.inf:
            raise ConfigurationError(
                f"backoff_s={self.backoff_s!r} has to be a number of seconds, 0 or above"
            )

    @property
    def root(self) -> str:
        """The server's address without a trailing ``/v1`` and slash."""
        parts = urlsplit(self.base_url)
        path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return urlunsplit((parts.scheme, parts.netloc, path, "", ""))
