"""What the embedded backend does with splices: what it loads, what it refuses, and what it counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentkv.backends import Capabilities
from agentkv.backends.base import Splicer
from agentkv.backends.splices import LoadedArtifact, LoadedArtifacts
from agentkv.errors import BackendError, CapabilityError, ConfigurationError, ContextWindowError
from agentkv.kv.refusals import Refusal
from agentkv.kv.store import ArtifactStore
from tests.splice_parts import (
    EXACT,
    anchor_tokens,
    call,
    file_of,
    request,
    spec,
    tiny_backend,
    tokens,
)
from tests.tiny_models import WHOLE_ONLY, tiny_model

CHUNK = tokens(48, seed=1)
OTHER = tokens(40, seed=2)
BEFORE = tokens(23, seed=3)
BETWEEN = tokens(11, seed=4)
QUESTION = tokens(7, seed=5)
PROMPT = [*BEFORE, *CHUNK, *QUESTION]


def test_it_is_a_splicer(tmp_path: Path) -> None:
    """With a store it says that it splices; without one it does not, and can make no artifact."""
    backend, plain = tiny_backend("llama", tmp_path, seam=5), tiny_backend("llama")
    assert isinstance(backend, Splicer)
    assert backend.capabilities.splices
    assert backend.seam == 5
    assert not plain.capabilities.splices
    assert plain.find_artifact("default", CHUNK) is None
    with pytest.raises(CapabilityError, match="artifacts"):
        plain.compile_chunk("default", CHUNK)


def test_without_a_store_nothing_that_handles_artifacts_is_imported() -> None:
    """The embedded backend costs no more than before."""
    code = (
        "import sys\n"
        "from agentkv.backends import Request, SamplingOptions, TransformersBackend, complete\n"
        "from agentkv.tokens import TokenIds\n"
        "from tests.tiny_models import ByteTokenizer, tiny_model\n"
        "backend = TransformersBackend(tiny_model('llama'), ByteTokenizer())\n"
        "complete(backend, Request(TokenIds([5] * 9), 'a', 'salt', SamplingOptions(max_tokens=2)))\n"
        "print(sorted({'artifact', 'rope', 'spans', 'store'} & {name.split('.')[-1] for name in sys.modules"
        " if name.startswith('agentkv.kv.')}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


# What is counted


@pytest.mark.parametrize("seam", [0, 16])
def test_the_seam_is_computed(seam: int, tmp_path: Path) -> None:
    """Only what stands behind it is loaded, and nothing is cached yet."""
    backend = tiny_backend("llama", tmp_path)
    name = backend.compile_chunk("default", CHUNK)
    usage = call(backend, request(PROMPT, spec(name, len(BEFORE), CHUNK, seam))).usage
    assert usage.cached_tokens == 0
    assert usage.spliced_tokens == len(CHUNK) - seam
    assert usage.computed_tokens == len(BEFORE) + seam + len(QUESTION)


def test_the_next_turn_goes_on_from_spliced_kv(tmp_path: Path) -> None:
    """It is cached then: loaded once, and the answer's KV is there as well."""
    backend = tiny_backend("llama", tmp_path)
    name = backend.compile_chunk("default", CHUNK)
    part = spec(name, len(BEFORE), CHUNK)
    first = call(backend, request(PROMPT, part))
    grown = [*PROMPT, *(first.ids or ()), *QUESTION]
    usage = call(backend, request(grown, part)).usage
    assert usage.cached_tokens == len(PROMPT) + len(first.ids or ()) - 1
    assert usage.spliced_tokens == 0


def test_another_conversation_of_the_salt_takes_over_spliced_kv(tmp_path: Path) -> None:
    """As any other KV; one of an exact salt does not."""
    backend = tiny_backend("llama", tmp_path)
    name = backend.compile_chunk("default", CHUNK)
    call(backend, request(PROMPT, spec(name, len(BEFORE), CHUNK)))
    copied = call(backend, request(PROMPT, conversation="b"))
    exact = call(backend, request(PROMPT, conversation="c", salt=EXACT))
    assert copied.usage.cached_tokens == len(PROMPT) - 1
    assert exact.usage.cached_tokens == 0


@pytest.mark.parametrize("between", [[], BETWEEN])
def test_several_chunks_are_spliced(between: list[int], tmp_path: Path) -> None:
    """One behind the other, or with text between; given in any order."""
    backend = tiny_backend("qwen3", tmp_path)
    one, other = (backend.compile_chunk("default", chunk) for chunk in (CHUNK, OTHER))
    at = len(BEFORE) + len(CHUNK) + len(between)
    prompt = [*BEFORE, *CHUNK, *between, *OTHER, *QUESTION]
    parts = [spec(other, at, OTHER, 3), spec(one, len(BEFORE), CHUNK, 2)]
    done = call(backend, request(prompt, *parts))
    assert done.usage.spliced_tokens == len(CHUNK) - 2 + len(OTHER) - 3
    assert done.refused == ()


def test_a_chunk_that_is_cached_in_part_is_loaded_from_there(tmp_path: Path) -> None:
    """The rest alone, at its right place: the answer is that of a splice of the whole."""
    backend, whole = tiny_backend("llama", tmp_path), tiny_backend("llama", tmp_path)
    name = backend.compile_chunk("default", CHUNK)
    part = spec(name, len(anchor_tokens()), CHUNK)
    prompt = [*anchor_tokens(), *CHUNK, *QUESTION]
    backend.prefill(request(prompt[: len(anchor_tokens()) + 20]))
    usage = call(backend, request(prompt, part)).usage
    assert usage.cached_tokens == len(anchor_tokens()) + 20
    assert usage.spliced_tokens == len(CHUNK) - 20
    again = call(backend, request(prompt, part))
    assert again.ids == call(whole, request(prompt, part)).ids


def test_the_last_token_is_always_computed(tmp_path: Path) -> None:
    """Where a chunk ends the prompt, its last token gives the logits."""
    backend = tiny_backend("llama", tmp_path)
    name = backend.compile_chunk("default", CHUNK)
    prompt = [*anchor_tokens(), *CHUNK]
    done = call(backend, request(prompt, spec(name, len(anchor_tokens()), CHUNK)))
    assert done.usage.spliced_tokens == len(CHUNK) - 1
    assert done.ids == call(tiny_backend("llama"), request(prompt)).ids


def test_a_chunk_may_begin_the_prompt(tmp_path: Path) -> None:
    """Its first token is computed."""
    backend = tiny_backend("llama", tmp_path, anchor="")
    name = backend.compile_chunk("default", CHUNK)
    prompt = [*CHUNK, *QUESTION]
    done = call(backend, request(prompt, spec(name, 0, CHUNK)))
    assert done.usage.spliced_tokens == len(CHUNK) - 1
    assert done.ids == call(tiny_backend("llama"), request(prompt)).ids


def test_prefill_splices(tmp_path: Path) -> None:
    """So that the calls which share a prompt find it."""
    backend = tiny_backend("llama", tmp_path)
    name = backend.compile_chunk("default", CHUNK)
    asked = request(PROMPT, spec(name, len(BEFORE), CHUNK, 16))
    usage = backend.prefill(asked)
    assert (usage.cached_tokens, usage.spliced_tokens) == (0, len(CHUNK) - 16)
    assert call(backend, asked).usage.cached_tokens == len(PROMPT) - 1


def test_progress_counts_what_is_loaded(tmp_path: Path) -> None:
    """It ends at the whole of what the cache lacked."""
    seen: list[tuple[int, int]] = []
    backend = tiny_backend(
        "llama", tmp_path, progress=lambda done, total: seen.append((done, total)), prefill_chunk=10
    )
    name = backend.compile_chunk("default", CHUNK)
    compiled = len(anchor_tokens()) + len(CHUNK)
    assert seen[-1] == (compiled, compiled)
    seen.clear()
    call(backend, request(PROMPT, spec(name, len(BEFORE), CHUNK)))
    assert [done for done, _ in seen] == [10, 20, len(BEFORE), len(PROMPT)]
    assert {total for _, total in seen} == {len(PROMPT)}


# Making artifacts


def test_a_chunk_is_compiled_once(tmp_path: Path) -> None:
    """A second time nothing passes the model, and the file stays as it is."""
    passes: list[int] = []
    backend = tiny_backend("llama", tmp_path, progress=lambda done, total: passes.append(done))
    assert backend.find_artifact("default", CHUNK) is None
    name = backend.compile_chunk("default", CHUNK)
    assert backend.find_artifact("default", CHUNK) == name
    written = file_of(tmp_path).stat()
    passes.clear()
    assert backend.compile_chunk("default", CHUNK) == name
    assert passes == []
    assert file_of(tmp_path).stat().st_mtime_ns == written.st_mtime_ns
    assert backend.stored_bytes == 0


def test_another_anchor_makes_another_artifact(tmp_path: Path) -> None:
    """What a chunk was compiled behind is part of its name."""
    one, other = tiny_backend("llama", tmp_path), tiny_backend("llama", tmp_path, anchor="Another one.")
    assert one.compile_chunk("default", CHUNK) != other.compile_chunk("default", CHUNK)


def test_a_chunk_that_cannot_be_compiled_is_refused_before_any_work(tmp_path: Path) -> None:
    """Too long, empty, or of ids that the model does not have."""
    backend = tiny_backend("llama", tmp_path)
    with pytest.raises(ContextWindowError, match="512"):
        backend.compile_chunk("default", [65] * 500)
    with pytest.raises(ConfigurationError, match="no tokens"):
        backend.compile_chunk("default", [])
    with pytest.raises(ConfigurationError, match="vocabulary"):
        backend.compile_chunk("default", [100_000])
    assert list(tmp_path.glob("*")) == []


def test_an_interrupted_compilation_leaves_nothing(tmp_path: Path) -> None:
    """And the next one is whole."""

    def stop(done: int, total: int) -> None:
        raise InterruptedError("stopped by the caller")

    with pytest.raises(InterruptedError):
        tiny_backend("llama", tmp_path, progress=stop, prefill_chunk=10).compile_chunk("default", CHUNK)
    assert list(tmp_path.glob("*")) == []
    backend = tiny_backend("llama", tmp_path)
    assert backend.find_artifact("default", backend.compile_chunk("default", CHUNK).encode()) is None


@pytest.mark.parametrize("name", [*WHOLE_ONLY, "llama_dynamic_rope"])
def test_a_model_that_cannot_be_spliced_is_named_when_the_backend_is_made(name: str, tmp_path: Path) -> None:
    """With a store only: without one such models run as before."""
    model = tiny_model(name)
    with pytest.raises(CapabilityError, match=model.config.model_type):
        tiny_backend(model, tmp_path)
    assert isinstance(tiny_backend(model).capabilities, Capabilities)


@pytest.mark.parametrize("option", ["seam", "artifact_memory_bytes"])
def test_a_negative_number_is_refused(option: str, tmp_path: Path) -> None:
    """When the backend is made."""
    with pytest.raises(ConfigurationError, match=option):
        tiny_backend("llama", tmp_path, **{option: -1})


# Memory


def test_a_second_splice_reads_no_file(tmp_path: Path) -> None:
    """The artifact is in memory, counted to no conversation; the file's content is not looked at again."""
    backend = tiny_backend("llama", tmp_path)
    name = backend.compile_chunk("default", CHUNK)
    part = spec(name, len(BEFORE), CHUNK)
    first = call(backend, request(PROMPT, part))
    stored = backend.stored_bytes
    file_of(tmp_path).write_bytes(b"no artifact any more")
    backend.release("a")
    assert backend.stored_bytes == 0
    second = call(backend, request(PROMPT, part))
    assert second.refused == ()
    assert second.ids == first.ids
    assert backend.stored_bytes == stored


def test_an_artifact_larger_than_the_bound_is_used_and_not_kept(tmp_path: Path) -> None:
    """With no memory at all every splice reads its file."""
    backend = tiny_backend("llama", tmp_path, artifact_memory_bytes=0)
    name = backend.compile_chunk("default", CHUNK)
    part = spec(name, len(BEFORE), CHUNK)
    assert call(backend, request(PROMPT, part)).usage.spliced_tokens == len(CHUNK)
    backend.reset()
    file_of(tmp_path).write_bytes(b"no artifact any more")
    (refused,) = call(backend, request(PROMPT, part)).refused
    assert refused.reason is Refusal.DAMAGED


def test_the_least_recently_used_artifact_goes_first(tmp_path: Path) -> None:
    """The bound holds, and what was used last stays."""
    backend = tiny_backend("llama", tmp_path)
    store, held = ArtifactStore(tmp_path), []
    for seed in range(3):
        name = backend.compile_chunk("default", tokens(48, seed))
        header = store.header(name)
        span = store.load(name, ids=header.ids, identity=header.identity, tenant="default")
        held.append((name, LoadedArtifact(header.tenant, header.ids, span)))
    memory = LoadedArtifacts(2 * held[0][1].nbytes)
    memory.put(*held[0])
    memory.put(*held[1])
    memory.get(held[0][0])
    memory.put(*held[2])
    assert [memory.get(name) is not None for name, _ in held] == [True, False, True]
    assert memory.nbytes == 2 * held[0][1].nbytes


def test_a_model_that_fails_between_splices_loses_its_kv_and_answers_the_next_time(tmp_path: Path) -> None:
    """A failure is a BackendError, never half of a prompt."""
    backend = tiny_backend("llama", tmp_path)
    name = backend.compile_chunk("default", CHUNK)
    asked = request(PROMPT, spec(name, len(BEFORE), CHUNK))

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    hook = backend.model.register_forward_pre_hook(fail)
    with pytest.raises(BackendError, match="out of memory"):
        call(backend, asked)
    hook.remove()
    assert call(backend, asked).usage.spliced_tokens == len(CHUNK)
