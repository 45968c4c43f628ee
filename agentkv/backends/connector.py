"""The client's side of splicing in a server: what it asks of the connector there, and what comes back.

The protocol is `agentkv.kv.protocol`; it travels in ``kv_transfer_params`` of vLLM's own endpoints.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from agentkv.backends.base import Completion, RefusedSplice, Request, SpliceSpec
from agentkv.errors import BackendError, CapabilityError
from agentkv.http import HttpClient, Post
from agentkv.kv import protocol
from agentkv.kv.identity import artifact_name
from agentkv.kv.protocol import Ask, Asked, Compile, Compiled, Hello, HelloAnswer, Splices
from agentkv.kv.refusals import Refusal
from agentkv.kv.tickets import Ticket, sign

METRICS_MARK: Final = "vllm:agentkv_"
"""What the connector's own metrics begin with."""
_COMPLETIONS: Final = "/v1/completions"
_TICKET_S: Final = 600.0
_ABSENT_S: Final = 60.0
"""How long an artifact that was not there is not asked for again."""
_MOST_REMEMBERED: Final = 100_000


@dataclass(frozen=True, slots=True)
class SpliceCall:
    """What a call says to the connector."""

    name: str
    primes: tuple[int, ...]
    """Lengths of the prompts that are sent along to compute what stands before each splice."""
    params: dict[str, Any]
    """Its ``kv_transfer_params``."""

    def prompts(self, ids: list[int]) -> list[int] | list[list[int]]:
        """Return what to send as the prompt: the main one comes last."""
        if not self.primes:
            return ids
        return [*(ids[:length] for length in self.primes), ids]


class Connector:
    """A connector that was met. Safe to share between threads.

    Parameters
    ----------
    hello
        What it said of itself.
    model
        The served name.
    anchor
        Token ids that chunks are compiled behind.
    ticket_key
        Secret shared with the server, where it wants tickets.
    prime_after_s
        Seconds without a call after which a conversation's prefix is seen to again.
    """

    def __init__(
        self,
        http: HttpClient,
        hello: HelloAnswer,
        model: str,
        anchor: Sequence[int],
        ticket_key: bytes | None,
        prime_after_s: float,
    ) -> None:
        self._http, self._model, self._anchor = http, model, tuple(anchor)
        self._key, self._prime_after_s = ticket_key, prime_after_s
        self._fingerprint = hello.identity.fingerprint
        self._compiles = hello.compiles
        self._lock = threading.Lock()
        self._there: set[str] = set()
        self._absent: dict[str, float] = {}
        self._called: dict[str, float] = {}
        if hello.tickets and ticket_key is None:
            raise CapabilityError(
                f"{http.url} splices only with tickets: give ticket_key=, the key that the server has, or "
                "splices='never'"
            )

    def find(self, tenant: str, ids: Sequence[int]) -> str | None:
        """Return the name of these tokens' artifact if the server has it; raises as `HttpClient.post`."""
        name = self.name(tenant, ids)
        with self._lock:
            if name in self._there:
                return name
            if time.monotonic() - self._absent.get(name, -_ABSENT_S) < _ABSENT_S:
                return None
        there = self._asked(Ask(have=(name,))).have[:1] == (True,)
        with self._lock:
            if there:
                self._there.add(name)
            else:
                self._absent[name] = time.monotonic()
            if len(self._there) + len(self._absent) > _MOST_REMEMBERED:
                self._there.clear()
                self._absent.clear()
        return name if there else None

    def name(self, tenant: str, ids: Sequence[int]) -> str:
        """Name the artifact of these tokens."""
        return artifact_name(tenant=tenant, fingerprint=self._fingerprint, anchor=self._anchor, ids=ids)

    def compile(self, tenant: str, ids: Sequence[int]) -> Compiled:
        """Have the server compute and store a chunk.

        Raises
        ------
        CapabilityError
            The server does not compile, or refuses this chunk.
        BackendError
            The call failed.
        """
        if not self._compiles:
            raise CapabilityError(
                f"{self._http.url} does not compile: start it with compiling allowed, or put artifacts that "
                "`agentkv compile` made into its folder"
            )
        salt = secrets.token_hex(16)
        ticket = self._ticket(
            Ticket(tenant=tenant, salt=salt, artifacts=(), action="compile", expires=_soon())
        )
        asking = Compile(tenant=tenant, anchor=len(self._anchor), ticket=ticket)
        answer = self._said(asking, [*self._anchor, *ids], salt=salt, most=2)
        if not isinstance(answer, Compiled):
            raise BackendError(f"{self._http.url} answered a compile request with {answer.kind!r}")
        with self._lock:
            self._there.add(answer.artifact)
            self._absent.pop(answer.artifact, None)
        return answer

    def call(self, request: Request) -> SpliceCall | None:
        """Return what to send along with a request; None if it splices nothing."""
        if not request.splices:
            return None
        now = time.monotonic()
        with self._lock:
            last = self._called.pop(request.conversation, None)
            self._called[request.conversation] = now
            if len(self._called) > _MOST_REMEMBERED:
                del self._called[next(iter(self._called))]
        recent = last is not None and now - last < self._prime_after_s
        held = request.expected_cached_tokens if recent else 0
        primes = tuple(_primes(request.splices, held))
        name = secrets.token_hex(16)
        used = tuple((splice.artifact, splice.start, splice.stop) for splice in request.splices)
        asking = Splices(
            call=name,
            tenant=request.tenant,
            primes=primes,
            splices=tuple(
                protocol.SpliceSpec(artifact=s.artifact, start=s.start, stop=s.stop, offset=s.offset)
                for s in request.splices
            ),
            ticket=self._ticket(
                Ticket(
                    tenant=request.tenant, salt=request.salt, artifacts=used, action="splice", expires=_soon()
                )
            ),
        )
        return SpliceCall(name, primes, _params(asking))

    def outcome(self, request: Request, call: SpliceCall, completion: Completion) -> Completion:
        """Return a completion with what was loaded and what was refused; may ask the server.

        Where nothing was sent along and all was cached as expected, nothing was loaded and nothing is asked.
        """
        usage = completion.usage
        as_expected = usage.cached_tokens == request.expected_cached_tokens
        if not call.primes and completion.counted and as_expected:
            return completion
        try:
            asked = self._asked(Ask(call=call.name))
        except BackendError:
            return replace(completion, counted=completion.counted and not call.primes)
        length = len(request.ids)
        found = next((one for one in asked.outcomes if one.prompt == length), None)
        if found is None:
            # Another replica was asked, or the call is long past.
            return replace(completion, counted=completion.counted and not call.primes)
        by_artifact = dict(found.refused)
        refused = tuple(
            RefusedSplice(splice, by_artifact[splice.artifact])
            for splice in request.splices
            if splice.artifact in by_artifact
        )
        self._forget(item.splice.artifact for item in refused if item.reason is Refusal.MISSING)
        loaded = sum(one.loaded for one in asked.outcomes)
        cached = min(_cached_before(asked.outcomes), length - loaded)
        usage = replace(
            usage,
            prompt_tokens=length,
            cached_tokens=cached,
            spliced_tokens=loaded,
            computed_tokens=length - cached - loaded,
        )
        return replace(completion, usage=usage, refused=refused, counted=True)

    def _forget(self, names: Iterator[str]) -> None:
        with self._lock:
            self._there.difference_update(names)

    def _ticket(self, ticket: Ticket) -> str | None:
        return None if self._key is None else sign(ticket, self._key)

    def _asked(self, ask: Ask) -> Asked:
        answer = self._said(ask, [0], most=1)
        if not isinstance(answer, Asked):
            raise BackendError(f"{self._http.url} answered a question about splices with {answer.kind!r}")
        return answer

    def _said(self, asking: Any, prompt: list[int], *, most: int, salt: str | None = None) -> Any:
        answer = say(self._http, self._model, asking, prompt, most=most, salt=salt)
        if isinstance(answer, protocol.Refused):
            raise CapabilityError(f"{self._http.url}: {answer.reason.value}: {answer.message}")
        if answer is None:
            raise BackendError(
                f"{self._http.url} no longer answers what is said to its connector: was it restarted without?"
            )
        return answer


def greet(http: HttpClient, model: str) -> HelloAnswer | None:
    """Ask a server for its connector; None if it has none.

    Raises
    ------
    CapabilityError
        It speaks another version of the protocol.
    BackendError
        The call failed.
    """
    answer = say(http, model, Hello(), [0], most=1)
    return answer if isinstance(answer, HelloAnswer) else None


def say(
    http: HttpClient, model: str, asking: Any, prompt: list[int], *, most: int, salt: str | None = None
) -> Any:
    """Send a call that is not streamed and return what the connector said; None if nothing."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": most,
        "temperature": 0.0,
        "add_special_tokens": False,
        "kv_transfer_params": _params(asking),
    }
    if salt is not None:
        body["cache_salt"] = salt
    answer = http.post(Post.json(_COMPLETIONS, body))
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    said = params.get("agentkv") if isinstance(params, dict) else None
    return None if said is None else protocol.read_answer(said)


def _params(asking: Any) -> dict[str, Any]:
    return {"agentkv": asking.model_dump(mode="json")}


def _soon() -> float:
    return time.time() + _TICKET_S


def _primes(splices: Sequence[SpliceSpec], held: int) -> Iterator[int]:
    reached = -1
    for splice in splices:
        if splice.start > max(held, reached):
            yield splice.start
        reached = splice.stop


def _cached_before(outcomes: Iterable[protocol.Outcome]) -> int:
    """Count the leading tokens that were cached before a call, from what each of its prompts found.

    A prompt finds what the shorter ones of the same call computed and loaded; only what reaches further was
    there before, and then all in front of it was too.
    """
    cached = reached = 0
    for one in sorted(outcomes, key=lambda one: one.prompt):
        if one.local > reached:
            cached = one.local
        reached = one.prompt
    return cached
