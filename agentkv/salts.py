"""Salts: which requests may share the KV of a prefix cache.

A server mixes the salt into the first block's hash, so two requests of different salts never share a
block. The salt is a keyed digest: who does not hold the key cannot make the salt of another tenant,
nor read the tenant from it. The salt of an approximate namespace says that it is one, so a server can
refuse to load approximate KV for any other request.
"""

from __future__ import annotations

import hmac
import re
import secrets
import threading
from enum import StrEnum
from typing import Final

from agentkv.errors import ConfigurationError

_VERSION: Final = b"agentkv/1"
_LEAST_KEY: Final = 16
_APPROXIMATE: Final = "approx-"
_APPROXIMATE_SALT: Final = re.compile(_APPROXIMATE + "[0-9a-f]{64}")
_lock: Final = threading.Lock()
_keys: Final[list[bytes]] = []


class Namespace(StrEnum):
    """What KV an epoch may hold; fixed at its first request."""

    EXACT = "exact"
    """Only KV that was computed behind exactly this prefix."""
    APPROXIMATE = "approximate"
    """A segment may be spliced, so the KV behind it is approximate too."""


def salt(key: bytes, *, tenant: str, namespace: Namespace, generation: int = 0) -> str:
    """Return the salt of a tenant's requests: 64 lower-case hex digits of HMAC-SHA256.

    That of an approximate namespace begins with ``approx-``.

    Parameters
    ----------
    key
        A secret of at least 16 bytes. Processes that are to share cached KV share the key.
    tenant
        Whose requests they are; not empty. KV is never shared between tenants.
    namespace
        Keeps approximate KV out of the exact cache.
    generation
        Number of the artifact store's generation, 0 or more; a new one leaves all earlier KV behind.

    Raises
    ------
    ConfigurationError
        An argument is not as described. The message never holds the key.
    """
    if not isinstance(key, bytes) or len(key) < _LEAST_KEY:
        size = f"{len(key)} bytes" if isinstance(key, bytes) else f"a {type(key).__name__}"
        raise ConfigurationError(
            f"the salt key is {size}; give {_LEAST_KEY} random bytes or more (secrets.token_bytes)"
        )
    if not tenant:
        raise ConfigurationError("the tenant is empty; name whose requests these are, such as 'default'")
    if not isinstance(namespace, Namespace):
        raise ConfigurationError(f"namespace {namespace!r} is unknown; give a member of Namespace")
    if generation < 0:
        raise ConfigurationError(f"generation {generation} is negative; give 0 or more")
    try:
        parts = (_VERSION, tenant.encode(), namespace.value.encode(), str(generation).encode())
    except UnicodeEncodeError:
        raise ConfigurationError(f"tenant {tenant!r} holds a lone surrogate; remove it") from None
    # Each part behind its length: no two tuples of parts give the same message.
    message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    digest = hmac.new(key, message, "sha256").hexdigest()
    return _APPROXIMATE + digest if namespace is Namespace.APPROXIMATE else digest


def is_approximate(salt: str) -> bool:
    """Whether a salt is that of an approximate namespace, the only one that may hold spliced KV."""
    return _APPROXIMATE_SALT.fullmatch(salt) is not None


def process_key() -> bytes:
    """Return a random key of 32 bytes that is made at the first call and kept for this process.

    It serves those who configured no key. Another process has another key, so cached KV is then not
    shared between processes, and none is found after a restart.
    """
    with _lock:
        if not _keys:
            _keys.append(secrets.token_bytes(32))
        return _keys[0]
