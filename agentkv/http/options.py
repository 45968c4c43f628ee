"""How a server is reached."""

from __future__ import annotations

import math
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypedDict
from urllib.parse import SplitResult, urlsplit, urlunsplit

from agentkv.errors import ConfigurationError

_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


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
        The address is none, a key or header cannot be sent, or a number is out of range.
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
        _check_address(self.base_url)
        if self.api_key is not None and not _is_header(self.api_key):
            raise ConfigurationError(
                "api_key cannot be sent in a header: it has to be a str of printable ASCII characters, "
                "without white space around it (a file's line break, for example)"
            )
        for name, text in self.headers.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name) or not _is_header(text):
                raise ConfigurationError(
                    f"header {name!r} cannot be sent: its name has to be a token and its value a str of "
                    "printable ASCII characters, without white space around it"
                )
        if self.proxy is not None:
            _check_proxy(self.proxy)
        if not isinstance(self.verify, bool | str | ssl.SSLContext):
            raise ConfigurationError(
                f"verify is a {type(self.verify).__name__}; give True, False, the path of a file or an "
                "SSLContext"
            )
        for name in ("connect_s", "stall_s", "deadline_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigurationError(f"{name}={value!r} has to be a number of seconds above 0")
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int) or self.attempts < 1:
            raise ConfigurationError(f"attempts={self.attempts!r} has to be a whole number, at least 1")
        wait: object = self.backoff_s
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait < math.inf:
            raise ConfigurationError(f"backoff_s={wait!r} has to be a number of seconds, 0 or above")

    @property
    def root(self) -> str:
        """The server's address without a trailing ``/v1`` and slash."""
        parts = urlsplit(self.base_url)
        path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def _check_address(address: object) -> None:
    if not isinstance(address, str):
        raise ConfigurationError(f"base_url is a {type(address).__name__}; give an address")
    parts = _split(address)
    if "@" in (address if parts is None else parts.netloc):
        raise ConfigurationError("base_url holds a user name or password: give api_key or headers instead")
    if parts is None or parts.scheme not in ("http", "https"):
        raise ConfigurationError(
            f"base_url={address!r} is no address: give one such as 'http://127.0.0.1:8000'"
        )
    if parts.query or parts.fragment:
        raise ConfigurationError("base_url holds a query (what follows ? or #): give what it says as headers")


def _check_proxy(address: object) -> None:
    parts = _split(address) if isinstance(address, str) else None
    if parts is None or parts.scheme not in ("http", "https", "socks5", "socks5h"):
        # It may hold a password, so it is not shown.
        raise ConfigurationError("proxy is no address: give one such as 'http://127.0.0.1:3128'")


def _split(address: str) -> SplitResult | None:
    """Return the parts of an address; None if it is none."""
    try:
        parts = urlsplit(address)
        good = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    return parts if good and address.isprintable() and " " not in address else None


def _is_header(value: object) -> bool:
    if not isinstance(value, str):
        return False
    return bool(value) and value.isascii() and value.isprintable() and value == value.strip()
