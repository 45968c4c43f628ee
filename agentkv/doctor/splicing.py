"""Checks of the connector: whether it splices, and whether it leaves everybody else's answers alone."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from typing import Any, Final

from agentkv.backends.connector import METRICS_MARK, greet, say
from agentkv.doctor.findings import Outcome, failed, ok, unchecked, warning
from agentkv.doctor.session import Session, salt
from agentkv.kv.protocol import PROTOCOL, Ask, Asked, Compile, Compiled, HelloAnswer, Splices, SpliceSpec
from agentkv.salts import Namespace
from agentkv.salts import salt as keyed_salt

_TENANT: Final = "agentkv-doctor"
_ANSWER: Final = 8
_SEED: Final = 7
_ANCHOR: Final = 8


def connector(session: Session) -> Outcome:
    """Whether agentkv's connector runs inside the server, and what it does."""
    if session.metrics is None:
        return unchecked("/metrics does not answer")
    if METRICS_MARK not in session.metrics:
        return ok("absent: splices need it, errata do not")
    hello = greet(session.http, session.model.name)
    if hello is None:
        return warning(
            "its counters stand in /metrics, but it does not answer",
            "let the gateway pass kv_transfer_params on, both ways",
        )
    if hello.version != PROTOCOL:
        return warning(
            f"it speaks version {hello.version} of the protocol, this client {PROTOCOL}",
            "use one release of agentkv on both sides",
        )
    compiles = "compiles" if hello.compiles else "does not compile"
    tickets = ", wants tickets" if hello.tickets else ""
    return ok(f"splices for {hello.identity.architecture} in {hello.identity.dtype}, {compiles}{tickets}")


def canary(session: Session) -> Outcome:
    """Whether an exact answer is the same before and after a splice, and finds nothing of it in the cache.

    A chunk of made-up tokens is compiled, once for each model, and spliced.
    """
    if session.metrics is None or METRICS_MARK not in session.metrics:
        return ok("nothing splices here")
    hello = greet(session.http, session.model.name)
    if hello is None or hello.version != PROTOCOL:
        return unchecked("the connector does not answer")
    if hello.tickets or not hello.compiles:
        return unchecked(
            "a splice needs a ticket, or an artifact that is there",
            "run it on a server with the same model that compiles, and without a ticket key",
        )
    before, unshared = _answer(session), salt()
    spliced = _splice(session, hello)
    if isinstance(spliced, str):
        return warning(f"a chunk was computed instead of spliced: {spliced}", "see the server's log")
    if _answer(session) != before or _answer(session, unshared) != before:
        return failed(
            "a greedy answer in an exact namespace is another one after a splice",
            "start the server without the connector, and report it; in bfloat16 the answers of a busy server "
            "differ by themselves, so look again when it is idle",
        )
    leaked = session.send(_spliced_prompt(session, hello), None).cached or 0
    if leaked:
        return failed(
            f"{leaked:,} tokens of a spliced prompt were found without its salt",
            "start the server without the connector, and without others that ignore the salt",
        )
    return ok("a greedy answer is the same before and after a splice, which no other salt finds")


def _answer(session: Session, salted: str | None = None) -> tuple[int, ...] | str:
    sample = session.send(_drawn(session, 48, 1), salted or salt(), max_tokens=_ANSWER)
    return sample.ids or sample.text


def _splice(session: Session, hello: HelloAnswer) -> int | str:
    """Compile a chunk and splice it; returns how many tokens were loaded, or why none were."""
    chunk = _chunk(session, hello)
    asked: Any = Compile(tenant=_TENANT, anchor=_ANCHOR)
    prompt = [*_drawn(session, _ANCHOR, 3), *chunk]
    made = _said(session, asked, prompt, most=2, salt=secrets.token_hex(16))
    if not isinstance(made, Compiled):
        return str(getattr(made, "message", made))
    ids, start = list(_spliced_prompt(session, hello)), 2 * hello.block_size
    spec = SpliceSpec(
        artifact=made.artifact,
        start=start,
        stop=start + len(chunk) - hello.block_size,
        offset=hello.block_size,
    )
    call = secrets.token_hex(16)
    params = Splices(call=call, tenant=_TENANT, primes=(start,), splices=(spec,)).model_dump(mode="json")
    body = {
        "prompt": [ids[:start], ids],
        "max_tokens": 1,
        "temperature": 0.0,
        "cache_salt": _approximate_salt(),
        "kv_transfer_params": {"agentkv": params},
    }
    session.post("/v1/completions", body)
    told = _said(session, Ask(call=call), [0], most=1)
    outcomes = told.outcomes if isinstance(told, Asked) else ()
    loaded = sum(one.loaded for one in outcomes)
    reasons = sorted({why.value for one in outcomes if one.prompt == len(ids) for _, why in one.refused})
    return loaded or ", ".join(reasons) or "nothing was loaded, and no reason is known"


def _said(session: Session, asking: Any, prompt: list[int], *, most: int, salt: str | None = None) -> Any:
    return say(session.http, session.model.name, asking, prompt, most=most, salt=salt)


def _spliced_prompt(session: Session, hello: HelloAnswer) -> Sequence[int]:
    """Return a block of other tokens, the chunk, and a few more."""
    return (*_drawn(session, hello.block_size, 4), *_chunk(session, hello), *_drawn(session, 9, 5))


def _chunk(session: Session, hello: HelloAnswer) -> Sequence[int]:
    return _drawn(session, 3 * hello.block_size + 5, 2)


def _drawn(session: Session, length: int, number: int) -> tuple[int, ...]:
    """Draw ids that are the same in every examination, so that their artifact is made once."""
    source = random.Random(_SEED * 100 + number)  # noqa: S311 - nothing is kept secret with it
    return tuple(source.choices(session.alphabet, k=length))


def _approximate_salt() -> str:
    return keyed_salt(secrets.token_bytes(32), tenant=_TENANT, namespace=Namespace.APPROXIMATE)
