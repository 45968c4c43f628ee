"""A stand-in for a vLLM server with the connector: it counts what a splice would load, and loads nothing.

It keeps to the rules of the real one as far as a client sees them: what is loaded has to begin within what is
cached, the prompts of a call are scheduled in order, and the usage of a stream sums up all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentkv.kv.identity import ModelIdentity, artifact_name
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
    read_asking,
)
from agentkv.kv.refusals import Refusal
from agentkv.salts import is_approximate
from tests.stub_server import StubServer

IDENTITY: Final = ModelIdentity(
    architecture="LlamaForCausalLM",
    weights="w",
    tokenizer="t",
    layers=2,
    kv_heads=1,
    key_dim=8,
    value_dim=8,
    dtype="float32",
    rope={},
)


class StubConnectorServer(StubServer):
    """Serves while its ``with`` block runs; other arguments are those of `StubServer`."""

    def __init__(self, *args: Any, tickets: bool = False, compiles: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tickets, self.compiles = tickets, compiles
        self.artifacts: dict[str, tuple[int, ...]] = {}
        """Name to the ids of the chunk."""
        self.asked: list[Any] = []
        """What was said to the connector, in order."""
        self.forgetful = False
        """Whether it says nothing of a call afterwards, as another replica."""
        self._calls: dict[str, list[Outcome]] = {}

    def spliced(self) -> list[Splices]:
        """Return the calls that asked for splices."""
        return [asking for asking in self.asked if isinstance(asking, Splices)]

    def evict(self) -> None:
        """Forget all that is cached."""
        for known in self._caches:
            known.clear()

    def _metrics(self) -> str:
        return super()._metrics() + 'vllm:agentkv_splices_total{engine="0"} 0.0\n'

    def _completion(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
        said = (body.get("kv_transfer_params") or {}).get("agentkv")
        if said is None:
            return super()._completion(body, headers)
        asking = read_asking(said)
        self.asked.append(asking)
        match asking:
            case Hello():
                answer: Any = HelloAnswer(
                    identity=IDENTITY,
                    block_size=self.block_size,
                    compiles=self.compiles,
                    tickets=self.tickets,
                )
            case Ask():
                outcomes = () if self.forgetful else tuple(self._calls.get(asking.call or "", ()))
                answer = Asked(outcomes=outcomes, have=tuple(name in self.artifacts for name in asking.have))
            case Compile():
                answer = self._compiled(asking, body["prompt"])
            case Splices():
                return self._spliced(asking, body, headers)
        return super()._completion(body, headers) | {"kv_transfer_params": {"agentkv": answer.model_dump()}}

    def _compiled(self, asking: Compile, prompt: Sequence[int]) -> Compiled:
        anchor, ids = prompt[: asking.anchor], tuple(prompt[asking.anchor :])
        name = artifact_name(tenant=asking.tenant, fingerprint=IDENTITY.fingerprint, anchor=anchor, ids=ids)
        self.artifacts[name] = ids
        return Compiled(artifact=name, tokens=len(ids), nbytes=len(ids) * 100)

    def _spliced(self, asking: Splices, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
        prompts = body["prompt"] if asking.primes else [body["prompt"]]
        choices, total, made = [], 0, 0
        for index, ids in enumerate(prompts):
            salt = body.get("cache_salt") or ""
            local = self._cached(tuple(ids), salt, headers)
            loaded, refused = self._loaded(asking.splices, ids, local, salt)
            outcome = Outcome(prompt=len(ids), local=local, loaded=loaded, refused=refused)
            self._calls.setdefault(asking.call, []).append(outcome)
            answer = super()._completion({**body, "prompt": ids}, headers)
            choices.append({**answer["choices"][0], "index": index})
            total, made = total + len(ids), made + answer["usage"]["completion_tokens"]
        usage = {
            "prompt_tokens": total,
            "completion_tokens": made,
            "total_tokens": total + made,
            "prompt_tokens_details": {"cached_tokens": self._calls[asking.call][0].local},
        }
        if not asking.primes:
            only = self._calls[asking.call][0]
            usage["prompt_tokens_details"] = {"cached_tokens": only.local + only.loaded}
        return {"id": "stub", "choices": choices, "usage": usage}

    def _loaded(
        self, splices: Sequence[SpliceSpec], ids: Sequence[int], local: int, salt: str
    ) -> tuple[int, tuple[tuple[str, Refusal], ...]]:
        for splice in splices:
            if local >= splice.stop or splice.stop > len(ids):
                continue
            held = self.artifacts.get(splice.artifact, ())
            wanted = held[splice.offset : splice.offset + splice.stop - splice.start]
            if not is_approximate(salt):
                return 0, ((splice.artifact, Refusal.NAMESPACE),)
            if not held:
                return 0, ((splice.artifact, Refusal.MISSING),)
            if wanted != tuple(ids[splice.start : splice.stop]):
                return 0, ((splice.artifact, Refusal.TOKENS),)
            if local < splice.start:
                return 0, ((splice.artifact, Refusal.PRIME),)
            return min(splice.stop, len(ids) - 1) - local, ()
        return 0, ()
