"""Compiling and splicing in a real server, against transformers and a server without the connector."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agentkv.kv.protocol import Asked, Compile, Compiled, Refused, Splices, SpliceSpec, read_answer
from scripts.vllm_server import Server
from tests.server.desk import fresh
from tests.server.splices import (
    ANCHOR,
    BLOCK,
    RETURNS,
    SHIPPING,
    TENANT,
    Placed,
    SpliceServer,
    Words,
    approximate,
    asked,
    compiled,
    complete,
    counter,
    hello,
    post,
    spliced,
)

if TYPE_CHECKING:
    import torch

    from agentkv.kv import KVSpan

OPENING = (
    "Conversation {} of the support desk, which is open all day and answers every customer within the hour, "
    "in the order of their letters."
)
TOLERANCE = 1e-3
"""Largest difference of two float32 computations of the same KV."""


@dataclass(frozen=True)
class Desk:
    """Two compiled manuals and the prompts that hold them."""

    words: Words
    anchor: list[int]
    returns: list[int]
    shipping: list[int]
    returns_artifact: str
    shipping_artifact: str

    def before(self) -> list[int]:
        """An opening that no other test has, so that nothing of it is cached."""
        return self.words.ids(
            f"Conversation {fresh()} of the support desk. Be brief, be kind, and be exact. "
        )

    def one(self, question: str) -> tuple[list[int], Placed]:
        """A prompt with one manual."""
        before = self.before()
        prompt = [*before, *self.returns, *self.words.ids(question)]
        return prompt, Placed(self.returns_artifact, len(before), len(self.returns))

    def two(self, question: str, between: str) -> tuple[list[int], Placed, Placed]:
        """A prompt with both."""
        head = [*self.before(), *self.returns, *self.words.ids(between)]
        prompt = [*head, *self.shipping, *self.words.ids(question)]
        returns = Placed(
            self.returns_artifact,
            len(head) - len(self.words.ids(between)) - len(self.returns),
            len(self.returns),
        )
        return prompt, returns, Placed(self.shipping_artifact, len(head), len(self.shipping))


@pytest.fixture(scope="module")
def words(small_model_dir: Path) -> Words:
    """The small model's tokens."""
    return Words(small_model_dir)


@pytest.fixture(scope="module")
def desk(splice_server: SpliceServer, words: Words) -> Desk:
    """The manuals, compiled in the server."""
    anchor, returns, shipping = words.ids(ANCHOR), words.ids(RETURNS), words.ids(SHIPPING)
    return Desk(
        words,
        anchor,
        returns,
        shipping,
        compiled(splice_server.server, anchor, returns).artifact,
        compiled(splice_server.server, anchor, shipping).artifact,
    )


@pytest.fixture(scope="module")
def model(small_model_dir: Path) -> Any:
    """The small model in transformers, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(small_model_dir, dtype=torch.float32).eval()


def test_the_server_says_what_it_is(splice_server: SpliceServer) -> None:
    """`Hello` is answered with the model's identity and what the server does."""
    answer = hello(splice_server.server)
    assert (answer.block_size, answer.compiles, answer.tickets) == (BLOCK, True, False)
    identity = answer.identity
    assert (identity.layers, identity.kv_heads, identity.key_dim, identity.dtype) == (30, 3, 64, "float32")


def test_a_chunk_compiled_in_the_server_has_the_kv_of_transformers(
    splice_server: SpliceServer, desk: Desk, model: Any
) -> None:
    """What is caught on its way into the paged cache is what the model computes for the same tokens."""
    span = loaded(splice_server, desk.returns_artifact)
    assert largest_difference(span, fresh_kv(model, desk.anchor, desk.returns)) < TOLERANCE


def test_a_chunk_compiled_beside_other_requests_has_the_same_kv(
    splice_server: SpliceServer, desk: Desk, model: Any
) -> None:
    """Other prompts in the batch, and a prompt that takes several steps, leave the capture in order."""
    chunk = desk.words.ids(f"Manual {fresh()}. " + SHIPPING * 5)
    others = [desk.words.ids(f"{fresh()} " + RETURNS) for _ in range(4)]
    server = splice_server.server
    with ThreadPoolExecutor(5) as threads:
        noise = [threads.submit(complete, server, other) for other in others]
        answer = threads.submit(compiled, server, desk.anchor, chunk).result()
        for one in noise:
            one.result()
    assert answer.tokens == len(chunk)
    assert largest_difference(loaded(splice_server, answer.artifact), fresh_kv(model, desk.anchor, chunk)) < (
        TOLERANCE
    )


def test_a_chunk_that_is_there_is_not_compiled_again(splice_server: SpliceServer, desk: Desk) -> None:
    """The same tokens for the same tenant are the same artifact, which stays as it is."""
    path = splice_server.folder / f"{desk.returns_artifact}.safetensors"
    before = path.stat()
    written, existing = (
        counter(splice_server.server, "compiles", label) for label in ("written", "existing")
    )
    assert compiled(splice_server.server, desk.anchor, desk.returns).artifact == desk.returns_artifact
    assert path.stat() == before or path.stat().st_mtime_ns == before.st_mtime_ns
    assert counter(splice_server.server, "compiles", "written") == written
    assert counter(splice_server.server, "compiles", "existing") == existing + 1


def test_a_prompt_without_a_chunk_is_not_compiled(splice_server: SpliceServer, desk: Desk) -> None:
    """An anchor as long as the prompt leaves nothing to keep, and the answer says so."""
    answer = complete(
        splice_server.server, desk.anchor, asking=Compile(tenant=TENANT, anchor=len(desk.anchor)), tokens=2
    )
    assert isinstance(answer.said, Refused)
    assert "no chunk behind an anchor" in answer.said.message


def test_a_compile_request_with_a_salt_that_is_cached_is_compiled_whole(
    splice_server: SpliceServer, desk: Desk
) -> None:
    """Compiling reads nothing from the prefix cache, where the KV would not be seen."""
    chunk = desk.words.ids(f"Manual {fresh()}. " + RETURNS)
    salt = fresh()
    complete(splice_server.server, [*desk.anchor, *chunk], salt=salt)
    asking = Compile(tenant=TENANT, anchor=len(desk.anchor))
    answer = complete(splice_server.server, [*desk.anchor, *chunk], salt=salt, asking=asking, tokens=2)
    assert isinstance(answer.said, Compiled)


def test_the_server_knows_which_artifacts_it_has(splice_server: SpliceServer, desk: Desk) -> None:
    """`Ask` says for each name whether it is there."""
    assert asked(splice_server.server, have=[desk.returns_artifact, "0" * 64]).have == (True, False)


def test_a_spliced_answer_agrees_with_a_full_recompute(
    splice_server: SpliceServer, exact_server: Server, desk: Desk
) -> None:
    """On a question that the manual answers, the first tokens are those of the recomputed prompt."""
    prompt, placed = desk.one(" In short: gift cards are never")
    tokens = counter(splice_server.server, "tokens_loaded")
    said, outcome = spliced(splice_server.server, prompt, [placed])
    assert (outcome.local, outcome.loaded, outcome.refused) == (
        placed.start,
        placed.at + placed.length - placed.start,
        (),
    )
    assert counter(splice_server.server, "tokens_loaded") == tokens + outcome.loaded
    assert said.last[:4] == complete(exact_server, prompt).last[:4]


def test_a_moved_chunk_reads_as_it_does_in_transformers(
    splice_server: SpliceServer, desk: Desk, model: Any
) -> None:
    """The next token's probabilities are those of transformers over the same seam and the same turned KV."""
    import torch

    from agentkv.backends.model_traits import forward_arguments
    from agentkv.kv import RopeSpec

    prompt, placed = desk.one(" Question: what is the code of the returns desk? Answer: The code is")
    splice = placed.spec()
    said, _ = spliced(splice_server.server, prompt, [placed])
    span = loaded(splice_server, placed.artifact)
    moved = span.slice(splice.offset, len(span)).moved(
        splice.start, RopeSpec.model_validate(hello(splice_server.server).identity.rope)
    )
    with torch.inference_mode():
        cache = model(torch.tensor([prompt[: splice.start]]), use_cache=True).past_key_values
        for layer, held in enumerate(moved.layers):
            cache.update(held.keys[None], held.values[None], layer)
        held_as = forward_arguments(model)[0]
        logits = model(torch.tensor([prompt[splice.stop :]]), **{held_as: cache}).logits[0, -1]
    expected = torch.log_softmax(logits.double(), -1)
    assert said.logprobs
    for token, logprob in said.logprobs.items():
        assert abs(float(expected[token]) - logprob) < 10 * TOLERANCE


def test_the_second_request_hits_what_the_first_one_loaded(splice_server: SpliceServer, desk: Desk) -> None:
    """Spliced blocks are in the prefix cache of their namespace, so nothing is loaded again."""
    prompt, placed = desk.one(" Question: how many days does a refund take? Answer: It takes")
    salt = approximate()
    first, _ = spliced(splice_server.server, prompt, [placed], salt=salt)
    loads = counter(splice_server.server, "splices_loaded")
    again, outcome = spliced(splice_server.server, prompt, [placed], salt=salt, primes=[])
    assert (outcome.loaded, outcome.local) == (0, (len(prompt) - 1) // BLOCK * BLOCK)
    assert again.last == first.last
    assert counter(splice_server.server, "splices_loaded") == loads


def test_two_separate_spans_load_in_one_call(
    splice_server: SpliceServer, exact_server: Server, desk: Desk
) -> None:
    """A prime for each span computes what stands before it; the second prime loads the first span."""
    prompt, returns, shipping = desk.two(
        " In short: letters take two days and", " And now the other manual. "
    )
    tokens = counter(splice_server.server, "tokens_loaded")
    said, outcome = spliced(splice_server.server, prompt, [returns, shipping])
    spans = [returns.spec(), shipping.spec()]
    assert outcome.refused == ()
    assert (outcome.local, outcome.loaded) == (shipping.start, spans[1].stop - spans[1].start)
    assert counter(splice_server.server, "tokens_loaded") - tokens == sum(s.stop - s.start for s in spans)
    assert len(said.ids[0]) == len(said.ids[1]) == 1, "a prime generates one token"
    assert said.last[:3] == complete(exact_server, prompt).last[:3]


def test_contiguous_spans_load_together(splice_server: SpliceServer, desk: Desk) -> None:
    """Spans without anything between them are one run, and take one prime."""
    prompt, returns, shipping = desk.two(" Question: which desk is in Leipzig? Answer:", "")
    specs = [
        returns.spec(),
        SpliceSpec(
            artifact=shipping.artifact, start=shipping.at, stop=shipping.at + shipping.length, offset=0
        ),
    ]
    splices = counter(splice_server.server, "splices_loaded")
    _, outcome = spliced(splice_server.server, prompt, [], specs=specs)
    assert (outcome.local, outcome.loaded) == (returns.start, shipping.at + shipping.length - returns.start)
    assert counter(splice_server.server, "splices_loaded") == splices + 2


def test_a_main_prompt_that_comes_before_its_prime_waits_for_it(
    splice_server: SpliceServer, desk: Desk
) -> None:
    """The order of a call's prompts does not matter."""
    prompt, placed = desk.one(" Question: what is collected by a van? Answer:")
    asking = Splices(call=fresh(), tenant=TENANT, primes=(placed.start,), splices=(placed.spec(),))
    complete(splice_server.server, prompt, prompt[: placed.start], salt=approximate(), asking=asking)
    outcomes = {one.prompt: one for one in asked(splice_server.server, asking.call).outcomes}
    assert outcomes[len(prompt)].loaded == placed.at + placed.length - placed.start


def test_an_artifact_is_kept_in_memory(splice_server: SpliceServer, desk: Desk) -> None:
    """The second load of an artifact reads no file."""
    question = " Question: what are shoes inspected for? Answer:"
    prompt, placed = desk.one(question)
    spliced(splice_server.server, prompt, [placed])
    disk, ram = (counter(splice_server.server, "artifact_reads", tier) for tier in ("disk", "ram"))
    prompt, placed = desk.one(question)
    spliced(splice_server.server, prompt, [placed])
    assert counter(splice_server.server, "artifact_reads", "disk") == disk
    assert counter(splice_server.server, "artifact_reads", "ram") == ram + 1


def test_a_chat_completion_can_splice(splice_server: SpliceServer, desk: Desk) -> None:
    """`kv_transfer_params` of a chat completion are heard, and answered in its response."""
    server, words = splice_server.server, desk.words
    messages = [
        {"role": "system", "content": f"{OPENING.format(fresh())} {RETURNS}"},
        {"role": "user", "content": "What is the code of the returns desk?"},
    ]
    rendered = post(server, "/v1/chat/completions/render", {"model": server.model, "messages": messages})
    ids = rendered["token_ids"]
    inner = desk.returns[2:-4]
    at = next(i for i in range(len(ids)) if ids[i : i + len(inner)] == inner)
    placed = Placed(compiled(server, desk.anchor, inner).artifact, at, len(inner))
    salt = approximate()
    complete(server, ids[: placed.start], salt=salt, tokens=1)
    asking = Splices(call=fresh(), tenant=TENANT, splices=(placed.spec(),))
    answer = post(
        server,
        "/v1/chat/completions",
        {
            "model": server.model,
            "messages": messages,
            "max_tokens": 8,
            "temperature": 0,
            "cache_salt": salt,
            "kv_transfer_params": {"agentkv": asking.model_dump(mode="json")},
        },
    )
    said = read_answer(answer["kv_transfer_params"]["agentkv"])
    assert isinstance(said, Asked)
    assert [one.loaded for one in said.outcomes] == [placed.at + placed.length - placed.start]
    assert words.text(ids[at : at + len(inner)]) in RETURNS


def test_exact_requests_beside_spliced_ones_are_those_of_a_server_without_the_connector(
    splice_server: SpliceServer, exact_server: Server, desk: Desk
) -> None:
    """Sixteen at once, half of them spliced: each exact answer has the tokens of the plain server, and each
    spliced one those that it has alone.
    """
    question = " Question: what is the code of the returns desk? Answer: The code is"
    exact = [desk.one(question)[0] for _ in range(8)]
    with_splices = [desk.one(question) for _ in range(8)]
    server = splice_server.server
    with ThreadPoolExecutor(16) as threads:
        one_kind = [threads.submit(complete, server, prompt, salt=fresh()) for prompt in exact]
        other_kind = [threads.submit(spliced, server, prompt, [placed]) for prompt, placed in with_splices]
        answers = [future.result().last for future in one_kind]
        beside = [future.result() for future in other_kind]
    assert all(outcome.loaded for _, outcome in beside)
    alone = [spliced(server, prompt, [placed])[0] for prompt, placed in with_splices]
    assert [said.last for said, _ in beside] == [said.last for said in alone]
    assert answers == [complete(exact_server, prompt).last for prompt in exact]


def test_an_unsalted_request_never_hits_spliced_blocks(
    splice_server: SpliceServer, exact_server: Server, desk: Desk
) -> None:
    """The salt is part of the first block's hash: the same tokens without it find nothing."""
    prompt, placed = desk.one(" Question: what is the code of the returns desk? Answer: The code is")
    _, outcome = spliced(splice_server.server, prompt, [placed])
    assert outcome.loaded
    unsalted = complete(splice_server.server, prompt)
    assert unsalted.cached == 0
    assert unsalted.last == complete(exact_server, prompt).last


def loaded(server: SpliceServer, artifact: str) -> KVSpan:
    """Read an artifact from the server's folder."""
    header = server.store.header(artifact)
    return server.store.load(artifact, ids=header.ids, identity=header.identity, tenant=header.tenant)


def fresh_kv(
    model: Any, anchor: Sequence[int], ids: Sequence[int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Compute a chunk's keys and values behind its anchor with transformers, layer by layer."""
    import torch

    with torch.inference_mode():
        cache = model(torch.tensor([[*anchor, *ids]]), use_cache=True).past_key_values
    return [(layer.keys[0, :, len(anchor) :], layer.values[0, :, len(anchor) :]) for layer in cache.layers]


def largest_difference(span: KVSpan, expected: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Compare two computations of the same KV."""
    pairs = zip(span.layers, expected, strict=True)
    return max(
        float(max((held.keys - keys).abs().max(), (held.values - values).abs().max()))
        for held, (keys, values) in pairs
    )
