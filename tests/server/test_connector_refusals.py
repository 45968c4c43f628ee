"""What the connector refuses: the answer is then that of a server without it, and the reason is counted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentkv.kv import Refusal
from agentkv.kv.protocol import Asked, Refused, Splices, SpliceSpec
from scripts.vllm_server import Server
from tests.server.desk import fresh
from tests.server.splices import (
    ANCHOR,
    RETURNS,
    TENANT,
    Placed,
    SpliceServer,
    Words,
    approximate,
    compiled,
    complete,
    copied,
    counter,
    other_identity,
    refusals,
    spliced,
)

QUESTION = " Question: what is the code of the returns desk? Answer: The code is"


class Case:
    """A prompt with a compiled chunk, on both servers."""

    def __init__(self, spliced_on: SpliceServer, exact_on: Server, words: Words) -> None:
        self.spliced_on, self.exact_on, self.words = spliced_on, exact_on, words
        self.anchor, self.chunk = words.ids(ANCHOR), words.ids(RETURNS)
        self.artifact = compiled(spliced_on.server, self.anchor, self.chunk).artifact

    def fresh_artifact(self) -> tuple[str, list[int]]:
        """Compile a chunk that no other test has; return its artifact and its tokens."""
        chunk = self.words.ids(f"Manual {fresh()}. " + RETURNS)
        return compiled(self.spliced_on.server, self.anchor, chunk).artifact, chunk

    def prompt(self, artifact: str, chunk: Sequence[int]) -> tuple[list[int], Placed]:
        """A prompt whose opening no other test has."""
        before = self.words.ids(f"Conversation {fresh()} of the support desk. Be brief and be kind. ")
        prompt = [*before, *chunk, *self.words.ids(QUESTION)]
        return prompt, Placed(artifact, len(before), len(chunk))

    def check(
        self,
        reason: Refusal,
        artifact: str,
        chunk: Sequence[int],
        *,
        salt: str | None = None,
        tenant: str = TENANT,
        primes: Sequence[int] | None = None,
        specs: Sequence[SpliceSpec] | None = None,
    ) -> None:
        """Send a prompt with a splice that is refused for `reason`, and see that nothing else changes."""
        server = self.spliced_on.server
        prompt, placed = self.prompt(artifact, chunk)
        before = refusals(server, reason)
        said, outcome = spliced(
            server, prompt, [placed], salt=salt, tenant=tenant, primes=primes, specs=specs
        )
        assert outcome.refused == ((artifact, reason),)
        assert outcome.loaded == 0
        assert said.last == complete(self.exact_on, prompt).last
        assert refusals(server, reason) == before + 1


@pytest.fixture(scope="module")
def case(splice_server: SpliceServer, exact_server: Server, small_model_dir: Path) -> Case:
    """The servers and a compiled chunk."""
    return Case(splice_server, exact_server, Words(small_model_dir))


def test_other_tokens_are_computed(case: Case) -> None:
    """KV is loaded for exactly the tokens that it was compiled from."""
    changed = [*case.chunk[:-5], case.chunk[-5] + 1, *case.chunk[-4:]]
    case.check(Refusal.TOKENS, case.artifact, changed)


def test_a_chunk_compiled_by_other_weights_is_computed(case: Case) -> None:
    """The fingerprint is compared, not only the file's name."""
    identity = other_identity(case.spliced_on.store.header(case.artifact).identity, weights="0" * 64)
    case.check(
        Refusal.FINGERPRINT,
        copied(case.spliced_on, case.artifact, identity=identity.model_dump()),
        case.chunk,
    )


def test_a_chunk_with_other_rotary_positions_is_computed(case: Case) -> None:
    """Another base of the frequencies would turn the keys wrongly (K45)."""
    identity = case.spliced_on.store.header(case.artifact).identity
    rope = {**identity.rope, "rotations": [{**one, "theta": 5e5} for one in identity.rope["rotations"]]}
    changed = other_identity(identity, rope=rope).model_dump()
    case.check(Refusal.ROPE, copied(case.spliced_on, case.artifact, identity=changed), case.chunk)


def test_another_tenants_chunk_is_computed(case: Case) -> None:
    """Whoever knows an artifact's name still cannot load it for another tenant."""
    case.check(Refusal.TENANT, case.artifact, case.chunk, tenant="somebody else")


def test_a_chunk_that_is_not_there_is_computed(case: Case) -> None:
    """A deleted artifact is refused although the worker may still hold it in memory."""
    artifact, chunk = case.fresh_artifact()
    prompt, placed = case.prompt(artifact, chunk)
    assert spliced(case.spliced_on.server, prompt, [placed])[1].loaded
    case.spliced_on.store.delete(artifact)
    case.check(Refusal.MISSING, artifact, chunk)


def test_a_damaged_chunk_is_computed(case: Case) -> None:
    """A flipped bit of the content is found before the request is scheduled, so it does not fail (K48)."""
    artifact, chunk = case.fresh_artifact()
    path = case.spliced_on.folder / f"{artifact}.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    case.check(Refusal.DAMAGED, artifact, chunk)


def test_a_file_that_was_cut_short_is_computed(case: Case) -> None:
    """So is one that ends too early."""
    artifact, chunk = case.fresh_artifact()
    path = case.spliced_on.folder / f"{artifact}.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    case.check(Refusal.DAMAGED, artifact, chunk)


def test_a_chunk_damaged_after_it_was_used_is_computed(case: Case) -> None:
    """A file is verified again once it is another than the one that was."""
    artifact, chunk = case.fresh_artifact()
    prompt, placed = case.prompt(artifact, chunk)
    assert spliced(case.spliced_on.server, prompt, [placed])[1].loaded
    path = case.spliced_on.folder / f"{artifact}.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.unlink()
    path.write_bytes(content)
    case.check(Refusal.DAMAGED, artifact, chunk)


def test_nothing_is_spliced_in_an_exact_namespace(case: Case) -> None:
    """Approximate KV never gets under an exact salt."""
    case.check(Refusal.NAMESPACE, case.artifact, case.chunk, salt=fresh() * 4)


def test_a_span_whose_prefix_is_not_cached_is_computed(case: Case) -> None:
    """Without its prime, or after the prime was evicted, a prompt is computed from its first token on."""
    case.check(Refusal.PRIME, case.artifact, case.chunk, primes=[])


def test_a_prompt_does_not_wait_for_a_prime_that_never_comes(case: Case) -> None:
    """A call may name a prime and not send it."""
    server = case.spliced_on.server
    prompt, placed = case.prompt(case.artifact, case.chunk)
    asking = Splices(call=fresh(), tenant=TENANT, primes=(placed.start,), splices=(placed.spec(),))
    said = complete(server, prompt, salt=approximate(), asking=asking)
    assert isinstance(said.said, Asked)
    assert said.said.outcomes[0].refused == ((case.artifact, Refusal.PRIME),)
    assert said.last == complete(case.exact_on, prompt).last


def test_a_span_beyond_the_artifact_is_computed(case: Case) -> None:
    """Offsets are checked against the artifact's length."""
    spec = SpliceSpec(artifact=case.artifact, start=32, stop=64, offset=len(case.chunk) - 8)
    case.check(Refusal.SPAN, case.artifact, case.chunk, specs=[spec])


def test_another_version_of_the_protocol_is_computed(case: Case) -> None:
    """A word that is not understood is answered, counted, and changes nothing."""
    server = case.spliced_on.server
    prompt, _ = case.prompt(case.artifact, case.chunk)
    before = refusals(server, Refusal.PROTOCOL)
    asking = {"kind": "splices", "version": 99, "call": fresh(), "tenant": TENANT, "splices": []}
    said = complete(server, prompt, salt=approximate(), asking=asking)
    assert isinstance(said.said, Refused)
    assert said.said.reason is Refusal.PROTOCOL
    assert said.last == complete(case.exact_on, prompt).last
    assert refusals(server, Refusal.PROTOCOL) == before + 1


def test_one_refused_span_leaves_the_other_one_spliced(case: Case) -> None:
    """Refusals are per span."""
    artifact, chunk = case.fresh_artifact()
    case.spliced_on.store.delete(artifact)
    before = case.words.ids(f"Conversation {fresh()} of the support desk. Be brief and be kind. ")
    head = [*before, *chunk, *case.words.ids(" The next manual. ")]
    prompt = [*head, *case.chunk, *case.words.ids(QUESTION)]
    placed = [
        Placed(artifact, len(before), len(chunk)),
        Placed(case.artifact, len(head), len(case.chunk)),
    ]
    _, outcome = spliced(case.spliced_on.server, prompt, placed)
    assert outcome.refused == ((artifact, Refusal.MISSING),)
    assert outcome.loaded == placed[1].at + placed[1].length - placed[1].start


def test_an_artifact_that_breaks_after_its_check_fails_its_request_alone(case: Case) -> None:
    """The call gets status 500; a request beside it and the next one on the same tokens are as ever."""
    server = case.spliced_on.server
    artifact, chunk = case.fresh_artifact()
    # Verified, and not in the worker's memory: without its prime it is not loaded.
    case.check(Refusal.PRIME, artifact, chunk, primes=[])
    path = case.spliced_on.store.path(artifact)
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"\xff" * 8)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    prompt, placed = case.prompt(artifact, chunk)
    other, other_placed = case.prompt(case.artifact, case.chunk)
    failures = counter(server, "load_failures")
    with ThreadPoolExecutor(2) as threads:
        beside = threads.submit(spliced, server, other, [other_placed])
        salt = approximate()
        with pytest.raises(AssertionError, match="gave 500"):
            spliced(server, prompt, [placed], salt=salt)
        assert beside.result()[1].loaded
    assert counter(server, "load_failures") == failures + 1
    said = complete(server, prompt, salt=salt)
    assert said.last == complete(case.exact_on, prompt).last
