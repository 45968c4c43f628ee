"""What goes over the wire reads back as it was, and nothing else is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentkv.errors import CapabilityError
from agentkv.kv.identity import ModelIdentity
from agentkv.kv.protocol import (
    PROTOCOL,
    Ask,
    Asked,
    Compile,
    Compiled,
    Hello,
    HelloAnswer,
    Outcome,
    Refused,
    Splices,
    SpliceSpec,
    read_answer,
    read_asking,
)
from agentkv.kv.refusals import Refusal
from tests.kv.test_identity import IDENTITY

A, B = "a" * 64, "b" * 64
ONE = SpliceSpec(artifact=A, start=32, stop=480, offset=16)
OTHER = SpliceSpec(artifact=B, start=480, stop=500, offset=0)

ASKING = [
    Splices(call="c1", tenant="acme", primes=(32, 512), splices=(ONE, OTHER), ticket="t.s"),
    Compile(tenant="acme", anchor=96),
    Hello(),
    Ask(call="c1", have=(A, B)),
]
ANSWERS = [
    HelloAnswer(identity=ModelIdentity(**IDENTITY), block_size=32, compiles=True, tickets=False),
    Compiled(artifact=A, tokens=500, nbytes=10**7),
    Asked(
        outcomes=(Outcome(prompt=600, local=32, loaded=448, refused=((B, Refusal.PRIME),)),),
        have=(True, False),
    ),
    Refused(reason=Refusal.PROTOCOL, message="version 2"),
]


@pytest.mark.parametrize("sent", ASKING, ids=lambda sent: sent.kind)
def test_a_request_reads_back(sent: Any) -> None:
    """Through the JSON of an HTTP body."""
    assert read_asking(json.loads(sent.model_dump_json())) == sent


@pytest.mark.parametrize("sent", ANSWERS, ids=lambda sent: sent.kind)
def test_an_answer_reads_back(sent: Any) -> None:
    """Reasons of refusal included, as members of `Refusal`."""
    assert read_answer(json.loads(sent.model_dump_json())) == sent


def _splices(**changed: Any) -> dict[str, Any]:
    return {**ASKING[0].model_dump(mode="json"), **changed}


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        "splices",
        {},
        {"kind": "other"},
        _splices(version=2),
        _splices(unknown=1),
        _splices(primes=[-1]),
        _splices(splices=[{"artifact": "../x", "start": 0, "stop": 9, "offset": 0}]),
        _splices(splices=[{"artifact": A.upper(), "start": 0, "stop": 9, "offset": 0}]),
        _splices(splices=[{"artifact": A + "\n", "start": 0, "stop": 9, "offset": 0}]),
        _splices(splices=[{"artifact": A, "start": 9, "stop": 9, "offset": 0}]),
        _splices(splices=[{"artifact": A, "start": 0, "stop": 9, "offset": -1}]),
        _splices(splices=[OTHER.model_dump(), ONE.model_dump()]),
        _splices(splices=[ONE.model_dump(), ONE.model_dump()]),
    ],
)
def test_a_malformed_request_is_refused(wrong: Any) -> None:
    """Another version, unknown members, names that are none, and splices that overlap or are not sorted."""
    with pytest.raises(CapabilityError, match=f"this side speaks {PROTOCOL}"):
        read_asking(wrong)


def test_a_refusal_names_the_other_sides_version() -> None:
    """So that it is clear which side is to be updated."""
    with pytest.raises(CapabilityError, match="its version is 2"):
        read_answer({"kind": "compiled", "version": 2})


def test_a_greeting_of_any_version_is_read() -> None:
    """The two sides tell each other which versions they speak."""
    assert read_asking({"kind": "hello", "version": 7}) == Hello(version=7)


def test_a_refused_request_does_not_repeat_its_secrets() -> None:
    """Messages end up in logs."""
    with pytest.raises(CapabilityError) as caught:
        read_asking(_splices(ticket={"secret": "hunter2"}))
    assert "hunter2" not in str(caught.value)
