"""A server: where it answers and, if it was started here, which process it is."""

from __future__ import annotations

import contextlib
import http.client
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from scripts.vllm_server.options import ServerError
from scripts.vllm_server.processes import birth

_STATE: Final = "server.json"


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers somewhere."""

    url: str
    """Its address, without a slash at the end."""
    model: str
    """What requests call its model."""

    @classmethod
    def at(cls, url: str) -> Server:
        """Return the server that answers at `url`, with the first model that it lists.

        Raises
        ------
        ServerError
            None answers there.
        """
        url = url.rstrip("/")
        status, body = _get(url, "/v1/models")
        try:
            return Server(url, str(json.loads(body)["data"][0]["id"]))
        except (ValueError, LookupError, TypeError) as problem:
            raise ServerError(
                f"no server that lists its models at {url!r}: /v1/models gave {status or 'no answer'}; "
                f"check the address, and that the server is up"
            ) from problem

    def healthy(self) -> bool:
        """Tell whether it answers ``/health`` with 200 now."""
        return _get(self.url, "/health")[0] == http.HTTPStatus.OK


@dataclass(frozen=True, slots=True)
class LocalServer(Server):
    """A server that was started here."""

    pid: int
    """Its process, which leads a process group of the same number."""
    birth: str
    """When that process began; see `scripts.vllm_server.processes.birth`."""
    log: Path
    """What it prints; its state lies beside it."""
    started: str
    """When it was started, as ISO 8601 text."""

    def is_running(self) -> bool:
        """Tell whether its process lives, and is not another one that was given its number."""
        return birth(self.pid) == self.birth


def write_state(server: LocalServer) -> None:
    """Note that `server` runs."""
    path = server.log.with_name(_STATE)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(server), default=str, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)


def read_state(folder: Path) -> LocalServer | None:
    """Return the server that was noted in `folder`, whether it still runs or not.

    Raises
    ------
    ServerError
        The note cannot be read.
    """
    path = folder / _STATE
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return LocalServer(**(known | {"log": Path(known["log"])}))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as problem:
        raise ServerError(f"{path} cannot be read ({problem}); remove it") from problem


def forget(folder: Path) -> None:
    """Remove the note in `folder`, if there is one."""
    (folder / _STATE).unlink(missing_ok=True)


def _get(url: str, path: str) -> tuple[int | None, bytes]:
    """Return status and body; no status if there was no answer."""
    address = urlsplit(url)
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    try:
        with contextlib.closing(kind(address.netloc, timeout=5)) as connection:
            connection.request("GET", address.path + path)
            answer = connection.getresponse()
            return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return None, b""
