"""Models that keep tenants apart."""

from __future__ import annotations

from typing import Protocol, Self, runtime_checkable


@runtime_checkable
class Tenanted(Protocol):
    """A chat model whose requests of different tenants never share KV."""

    def for_tenant(self, tenant: str, salt_key: bytes) -> Self:
        """Return the same model for another tenant."""
        ...
