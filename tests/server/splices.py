"""Talking to a server with the connector, in its own protocol: what the tests of the connector share."""

from __future__ import annotations

import json
import re
import secrets
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentkv.kv import ModelIdentity, Refusal
from agentkv.kv.protocol import (
    Ask,
    Asked,
    Compile,
    Compiled,
    Hello,
    HelloAnswer,
    Outcome,
    Splices,
    SpliceSpec,
    read_answer,
)
from scripts.vllm_server import Server

if TYPE_CHECKING:
    from agentkv.kv import ArtifactStore

BLOCK: Final = 32
SEAM: Final = 16
TENANT: Final = "shop"
TOKENS: Final = 8
"""Greedy tokens that two answers are compared by."""

RETURNS: Final = (
    "Returns desk manual. A parcel may be sent back within thirty days of delivery. The code of the "
    "returns desk is BLUE-HARBOUR. Shoes are inspected for wear before a refund is paid. Refunds are "
    "paid to the card that was used and take five working days. Gift cards are never refunded. A "
    "customer who has lost the receipt shows the order number instead. Damaged goods are "
    "photographed, and the photograph is kept with the order for two years. Large furniture is "
    "collected from the door by a van, free of charge, on a weekday that the customer chooses. "
)
SHIPPING: Final = (
    "Shipping desk manual. Parcels leave the warehouse in Leipzig every evening at six. The code of "
    "the shipping desk is GREEN-LANTERN. Letters take two days and parcels three. Parcels above "
    "thirty kilograms travel by freight and need a telephone number. A parcel that was not delivered "
    "waits seven days in a shop nearby and then comes back. Islands take two days longer in winter, "
    "when the ferry sails only twice a week. "
)
ANCHOR: Final = "You are a support agent. These are the manuals that you answer from. Read them with care. "


@dataclass(frozen=True, slots=True)
class SpliceServer:
    """A server with the connector, and the folder of its artifacts."""

    server: Server
    folder: Path

    @property
    def store(self) -> ArtifactStore:
        """Its artifacts."""
        from agentkv.kv import ArtifactStore

        return ArtifactStore(self.folder)


@dataclass(frozen=True, slots=True)
class Said:
    """What a server answered."""

    ids: tuple[tuple[int, ...], ...]
    """Token ids of each prompt's answer."""
    said: Any
    """The connector's word, if it had one."""
    cached: int
    """Cached tokens as vLLM counts them: its own and loaded ones."""
    logprobs: dict[int, float]
    """Log-probabilities of the likeliest first tokens of the main prompt's answer."""

    @property
    def last(self) -> tuple[int, ...]:
        """The main prompt's answer."""
        return self.ids[-1]


@dataclass(frozen=True, slots=True)
class Placed:
    """A compiled chunk in a prompt."""

    artifact: str
    at: int
    """Index of its first token in the prompt."""
    length: int

    @property
    def start(self) -> int:
        """First token that is loaded: behind the seam, at the next block."""
        return -(-(self.at + SEAM) // BLOCK) * BLOCK

    def spec(self) -> SpliceSpec:
        """Say it in the protocol."""
        return SpliceSpec(
            artifact=self.artifact, start=self.start, stop=self.at + self.length, offset=self.start - self.at
        )


class Words:
    """The small model's tokens."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        """Return a text's token ids."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return str(self._tokenizer.decode(list(ids)))


def complete(
    server: Server, *prompts: Sequence[int], salt: str | None = None, asking: Any = None, tokens: int = TOKENS
) -> Said:
    """Have prompts completed greedily in one call."""
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": [list(prompt) for prompt in prompts],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "logprobs": 5,
    }
    if salt is not None:
        body["cache_salt"] = salt
    if asking is not None:
        body["kv_transfer_params"] = {
            "agentkv": asking if isinstance(asking, dict) else asking.model_dump(mode="json")
        }
    answer = post(server, "/v1/completions", body)
    params = (answer.get("kv_transfer_params") or {}).get("agentkv")
    details = answer["usage"].get("prompt_tokens_details") or {}
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    likeliest = choices[-1]["logprobs"]["top_logprobs"][0]
    return Said(
        ids=tuple(tuple(choice["token_ids"]) for choice in choices),
        said=None if params is None else read_answer(params),
        cached=details.get("cached_tokens") or 0,
        logprobs={int(token.removeprefix("token_id:")): value for token, value in likeliest.items()},
    )


def post(server: Server, path: str, body: Any) -> Any:
    """Send JSON and return the JSON that comes back."""
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=250) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{path} gave {error.code}: {error.read().decode()}") from None


def compiled(server: Server, anchor: Sequence[int], ids: Sequence[int], tenant: str = TENANT) -> Compiled:
    """Have a chunk compiled."""
    asking = Compile(tenant=tenant, anchor=len(anchor))
    answer = complete(server, [*anchor, *ids], salt=secrets.token_hex(16), asking=asking, tokens=2).said
    assert isinstance(answer, Compiled), answer
    return answer


def hello(server: Server) -> HelloAnswer:
    """Ask what the server is."""
    answer = complete(server, [0], asking=Hello(), tokens=1).said
    assert isinstance(answer, HelloAnswer), answer
    return answer


def asked(server: Server, call: str | None = None, have: Sequence[str] = ()) -> Asked:
    """Ask what became of a call, and for artifacts."""
    answer = complete(server, [0], asking=Ask(call=call, have=tuple(have)), tokens=1).said
    assert isinstance(answer, Asked), answer
    return answer


def approximate() -> str:
    """A salt of an approximate namespace that no other request has."""
    return "approx-" + secrets.token_hex(32)


def spliced(
    server: Server,
    prompt: Sequence[int],
    placed: Sequence[Placed],
    *,
    primes: Sequence[int] | None = None,
    salt: str | None = None,
    tenant: str = TENANT,
    specs: Sequence[SpliceSpec] | None = None,
    ticket: str | None = None,
    tokens: int = TOKENS,
) -> tuple[Said, Outcome]:
    """Complete a prompt with splices in one call; return the answer and what became of the main prompt.

    Parameters
    ----------
    primes
        Lengths of the prompts sent along; None takes the start of each splice that follows no other.
    """
    wanted = tuple(specs if specs is not None else (one.spec() for one in placed))
    if primes is None:
        stops = {splice.stop for splice in wanted}
        primes = [splice.start for splice in wanted if splice.start not in stops]
    asking = Splices(
        call=secrets.token_hex(8), tenant=tenant, primes=tuple(primes), splices=wanted, ticket=ticket
    )
    said = complete(
        server,
        *(prompt[:length] for length in primes),
        prompt,
        salt=approximate() if salt is None else salt,
        asking=asking,
        tokens=tokens,
    )
    outcomes = asked(server, asking.call).outcomes
    return said, next(one for one in outcomes if one.prompt == len(prompt))


def counter(server: Server, name: str, label: str | None = None) -> float:
    """Read one of the connector's counters."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        text = answer.read().decode()
    wanted = "" if label is None else rf'[^}}]*="{label}"'
    found = re.findall(rf"^vllm:agentkv_{name}_total{{[^}}]*{wanted}[^}}]*}} (\S+)$", text, re.MULTILINE)
    assert found, f"no counter agentkv_{name} {label or ''}"
    return sum(map(float, found))


def refusals(server: Server, reason: Refusal) -> float:
    """Read how many splices were refused for a reason."""
    return counter(server, "refusals", reason.name.lower())


def copied(server: SpliceServer, artifact: str, **changes: Any) -> str:
    """Write an artifact anew under another header; return its name."""
    from agentkv.kv import ArtifactHeader

    store = server.store
    header = store.header(artifact)
    span = store.load(artifact, ids=header.ids, identity=header.identity, tenant=header.tenant)
    return store.save(ArtifactHeader.model_validate(header.model_dump() | changes), span)


def other_identity(identity: ModelIdentity, **changes: Any) -> ModelIdentity:
    """A model that differs."""
    return ModelIdentity.model_validate(identity.model_dump() | changes)
