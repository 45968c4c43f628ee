"""How much of the store each tenant's artifacts take."""

from __future__ import annotations

from agentkv.errors import ArtifactError
from agentkv.kv import ArtifactStore


class Quota:
    """Counts bytes by tenant; what is compiled right now is reserved beforehand.

    Parameters
    ----------
    store
        Its files are counted, whoever wrote them.
    most
        Bytes that a tenant may have.
    """

    def __init__(self, store: ArtifactStore, most: int) -> None:
        self._store = store
        self._most = most
        self._sizes: dict[str, tuple[str, int]] = {}
        self._reserved: dict[str, tuple[str, int]] = {}

    def reserve(self, request: str, tenant: str, nbytes: int) -> int | None:
        """Reserve room for a request's artifact; return the bytes that its tenant lacks, None if none."""
        lacking = self.used(tenant) + nbytes - self._most
        if lacking > 0:
            return lacking
        self._reserved[request] = (tenant, nbytes)
        return None

    def release(self, request: str) -> None:
        """Give up what a request reserved: its artifact is counted as a file now, or there is none."""
        self._reserved.pop(request, None)

    def used(self, tenant: str) -> int:
        """Bytes that a tenant's artifacts take, those included that are being compiled."""
        names = set(self._store.names())
        for gone in self._sizes.keys() - names:
            del self._sizes[gone]
        for name in names - self._sizes.keys():
            try:
                self._sizes[name] = (self._store.header(name).tenant, self._store.nbytes(name))
            except (ArtifactError, OSError):
                continue  # nobody's as long as it cannot be read
        taken = [*self._sizes.values(), *self._reserved.values()]
        return sum(nbytes for owner, nbytes in taken if owner == tenant)
