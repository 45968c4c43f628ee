"""A server that asks for tickets, signs artifacts, limits tenants, and has very little room for KV."""

from __future__ import annotations

import secrets
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentkv.kv import ArtifactStore, Refusal, Ticket
from agentkv.kv.protocol import Compile, Compiled, Refused
from agentkv.kv.tickets import sign
from scripts.vllm_server import DType, Options, Server, serving
from tests.server.desk import fresh
from tests.server.splices import (
    ANCHOR,
    RETURNS,
    TENANT,
    Placed,
    Words,
    approximate,
    complete,
    counter,
    hello,
    refusals,
    spliced,
)

pytestmark = pytest.mark.timeout(1500)

BLOCKS = 40
"""Of 32 tokens: six answers that are all admitted do not fit when they are whole."""
QUOTA = 9_000_000
QUESTION = " Question: what is the code of the returns desk? Answer: The code is"
SIGNING, TICKETS = secrets.token_hex(16), secrets.token_hex(16)


class Guarded:
    """The server, and what its client has to know."""

    def __init__(self, server: Server, folder: Path, words: Words) -> None:
        self.server, self.folder, self.words = server, folder, words
        self.anchor = words.ids(ANCHOR)

    def ticket(self, action: str, salt: str, placed: Placed | None = None, /, **changes: Any) -> str:
        """Sign a ticket for a request."""
        used = () if placed is None else ((placed.artifact, placed.spec().start, placed.spec().stop),)
        made = {"tenant": TENANT, "salt": salt, "artifacts": used, "action": action}
        made |= {"expires": time.time() + 600} | changes
        return sign(Ticket.model_validate(made), TICKETS.encode())

    def compile(self, chunk: list[int], *, tenant: str = TENANT, ticket: str | None = None) -> Any:
        """Ask for a chunk to be compiled, with a ticket unless another is given; return the answer."""
        salt = fresh()
        ticket = self.ticket("compile", salt, tenant=tenant) if ticket is None else ticket
        asking = Compile(tenant=tenant, anchor=len(self.anchor), ticket=ticket)
        return complete(self.server, [*self.anchor, *chunk], salt=salt, asking=asking, tokens=2).said

    def prompt(self, artifact: str, text: str = RETURNS) -> tuple[list[int], Placed]:
        """A prompt whose opening no other test has."""
        before = self.words.ids(f"Conversation {fresh()} of the support desk. Be brief and be kind. ")
        chunk = self.words.ids(text)
        return [*before, *chunk, *self.words.ids(QUESTION)], Placed(artifact, len(before), len(chunk))


@pytest.fixture(scope="module")
def guarded(
    vllm_python: Path, small_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Guarded]:
    """One server for these tests."""
    folder = tmp_path_factory.mktemp("guarded-artifacts")
    options = Options(
        python=vllm_python,
        model=str(small_model_dir),
        dtype=DType.FLOAT32,
        kv_gib=1,
        max_model_len=1024,
        connector={
            "store": str(folder),
            "compile": "on",
            "compile_quota_bytes": QUOTA,
            "ram_bytes": 0,
            "signing_key": {"env": "AGENTKV_SIGNING_KEY"},
            "ticket_key": {"env": "AGENTKV_TICKET_KEY"},
        },
        extra=("--num-gpu-blocks-override", str(BLOCKS), "--max-num-batched-tokens", "128"),
        environment={"AGENTKV_SIGNING_KEY": SIGNING, "AGENTKV_TICKET_KEY": TICKETS},
        state_dir=tmp_path_factory.mktemp("vllm-guarded"),
        limit_s=600,
    )
    with serving(options) as server:
        yield Guarded(server, folder, Words(small_model_dir))
        assert SIGNING not in server.log.read_text(encoding="utf-8", errors="replace")


@pytest.fixture(scope="module")
def artifact(guarded: Guarded) -> str:
    """A chunk that was compiled with a ticket, in steps of 128 tokens at most."""
    answer = guarded.compile(guarded.words.ids(RETURNS))
    assert isinstance(answer, Compiled), answer
    return answer.artifact


def test_the_server_says_that_it_wants_tickets(guarded: Guarded) -> None:
    """A client learns it from `Hello`."""
    assert hello(guarded.server).tickets


def test_what_the_server_compiles_is_signed(guarded: Guarded, artifact: str) -> None:
    """Its header can be read with the key."""
    store = ArtifactStore(guarded.folder, key=SIGNING.encode())
    assert store.verify(artifact).tenant == TENANT


def test_nothing_is_compiled_without_a_ticket(guarded: Guarded) -> None:
    """The answer says so, and nothing is written."""
    before = set(guarded.folder.iterdir())
    answer = guarded.compile(guarded.words.ids(f"{fresh()} {RETURNS}"), ticket="")
    assert isinstance(answer, Refused)
    assert answer.reason is Refusal.TICKET
    assert set(guarded.folder.iterdir()) == before


def test_a_tenant_without_room_gets_nothing_compiled(guarded: Guarded, artifact: str) -> None:
    """The message says how much is lacking; another tenant has its own room."""
    chunk = guarded.words.ids(f"{fresh()} {RETURNS}")
    answer = guarded.compile(chunk)
    assert isinstance(answer, Refused)
    assert str(QUOTA) in answer.message
    assert isinstance(guarded.compile(chunk, tenant="another"), Compiled)


def test_an_empty_tenant_is_answered(guarded: Guarded) -> None:
    """What cannot be named is refused, and the engine goes on."""
    salt = fresh()
    asking = Compile(tenant="", anchor=1, ticket=guarded.ticket("compile", salt, tenant=""))
    answer = complete(guarded.server, [1, 2, 3], salt=salt, asking=asking, tokens=2).said
    assert isinstance(answer, Refused)
    assert "tenant is empty" in answer.message


def test_a_ticket_lets_a_prompt_be_spliced(guarded: Guarded, artifact: str) -> None:
    """It names tenant, salt, artifact and span."""
    prompt, placed = guarded.prompt(artifact)
    salt = approximate()
    _, outcome = spliced(
        guarded.server, prompt, [placed], salt=salt, ticket=guarded.ticket("splice", salt, placed)
    )
    assert outcome.refused == ()
    assert outcome.loaded == placed.at + placed.length - placed.start


@pytest.mark.parametrize(
    "changes",
    [
        {"salt": "approx-another"},
        {"tenant": "another"},
        {"artifacts": ()},
        {"action": "compile"},
        {"expires": 1.0},
    ],
    ids=["salt", "tenant", "artifacts", "action", "expired"],
)
def test_a_ticket_for_something_else_is_worth_nothing(
    guarded: Guarded, exact_server: Server, artifact: str, changes: dict[str, Any]
) -> None:
    """The prompt is computed, its answer is that of a server without the connector, and it is counted."""
    prompt, placed = guarded.prompt(artifact)
    salt = approximate()
    before = refusals(guarded.server, Refusal.TICKET)
    ticket = guarded.ticket("splice", salt, placed, **changes)
    said, outcome = spliced(guarded.server, prompt, [placed], salt=salt, ticket=ticket)
    assert outcome.refused == ((artifact, Refusal.TICKET),)
    assert said.last == complete(exact_server, prompt).last
    assert refusals(guarded.server, Refusal.TICKET) == before + 1


def test_an_unsigned_artifact_is_computed(guarded: Guarded, exact_server: Server, artifact: str) -> None:
    """Who can write into the folder cannot decide what the model has read."""
    signed = ArtifactStore(guarded.folder, key=SIGNING.encode())
    header = signed.header(artifact)
    span = signed.load(artifact, ids=header.ids, identity=header.identity, tenant=header.tenant)
    forged = ArtifactStore(guarded.folder).save(header.model_copy(update={"anchor": (1,)}), span)
    prompt, placed = guarded.prompt(forged)
    salt = approximate()
    said, outcome = spliced(
        guarded.server, prompt, [placed], salt=salt, ticket=guarded.ticket("splice", salt, placed)
    )
    assert outcome.refused == ((forged, Refusal.SIGNATURE),)
    assert said.last == complete(exact_server, prompt).last


def test_preempted_requests_load_again_and_answer_the_same(guarded: Guarded, artifact: str) -> None:
    """Six answers that do not fit together: those that are put back are resumed as if nothing had been."""
    made = []
    for _ in range(6):
        prompt, placed = guarded.prompt(artifact)
        salt = approximate()
        made.append((prompt, placed, salt, guarded.ticket("splice", salt, placed)))

    def answer(one: Any, *, again: str = "") -> tuple[int, ...]:
        prompt, placed, salt, ticket = one
        if again:
            salt, ticket = again, guarded.ticket("splice", again, placed)
        said, outcome = spliced(guarded.server, prompt, [placed], salt=salt, ticket=ticket, tokens=90)
        assert outcome.refused == ()
        return said.last

    before = preemptions(guarded.server)
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(answer, made))
    assert preemptions(guarded.server) > before
    alone = [answer(one, again=approximate()) for one in made[:2] + made[-1:]]
    assert together[:2] + together[-1:] == alone


def test_no_load_failed(guarded: Guarded) -> None:
    """Whatever was refused in this module was refused before it was scheduled."""
    assert counter(guarded.server, "load_failures") == 0


def preemptions(server: Server) -> float:
    """Read how often a request was put back because there was no room."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_preemptions_total"))
