"""The ways to keep a model informed that are compared, each over the same prefix cache.

``rewrite``
    The prompt is written anew with the current values; the history is kept.
``append_state``
    The prompt shows no values; the whole current state is appended in every turn, and kept.
``hoist``
    The same, but only the newest turn holds the state: it is stripped a turn later.
``agentkv``
    The prompt shows the first values; what changed is appended as an erratum.

All arms are token-exact: generated ids are kept as generated, and nothing sent is tokenised again. What they
append travels alike: in a system message of its own before the user's where the template takes one, else
folded into the user's message before its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Final, Protocol

from agentkv import AgentKVContext, Inline, Mode, Policy, SamplingOptions
from agentkv.backends.base import Backend, Completion, Request, complete
from agentkv.plan import describe
from agentkv.segments import Field, TextSegment
from agentkv.template import Acceptance, TemplateEncoder
from agentkv.tokenizer import ChatTokenizer
from agentkv.tokens import TokenIds

REWRITE: Final = "rewrite"
APPEND_STATE: Final = "append_state"
HOIST: Final = "hoist"
AGENTKV: Final = "agentkv"
ARMS: Final = (REWRITE, APPEND_STATE, HOIST, AGENTKV)
ELSEWHERE: Final = "given with each message"
"""What stands for a value in the prompts of the arms that state it elsewhere."""


@dataclass(frozen=True, slots=True)
class ArmTurn:
    """One turn of one arm, as measured."""

    answer: str
    prompt_tokens: int
    cached_tokens: int
    predicted_cached_tokens: int | None
    """None for arms that predict nothing."""
    new_tokens: int
    """Prompt tokens that neither the previous prompt nor its answer held."""
    ttft_s: float
    plan: str = ""
    told: str = ""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were prefilled."""
        return self.prompt_tokens - self.cached_tokens


class Arm(Protocol):
    """One way to keep the model informed, in one conversation."""

    def turn(self, values: Mapping[str, str], question: str) -> ArmTurn:
        """Run one turn with the values that are true now."""
        ...

    def close(self) -> None:
        """Release what the backend holds."""
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """What all arms are given: segments with inline fields, and the fields' labels."""

    segments: tuple[TextSegment, ...]
    labels: Mapping[str, str]
    first_values: Mapping[str, str]
    sampling: SamplingOptions

    def fields(self) -> list[Field]:
        """The case's fields with their first values."""
        return [Field(key, self.first_values[key], label=label) for key, label in self.labels.items()]


class ContextArm:
    """``agentkv`` in mode on, and ``rewrite`` in mode off."""

    def __init__(self, backend: Backend, case: Case, mode: Mode, tenant: str) -> None:
        self._context = AgentKVContext(
            backend, [*case.segments, *case.fields()], mode=mode, tenant=tenant, sampling=case.sampling
        )
        self._context.__enter__()

    def turn(self, values: Mapping[str, str], question: str) -> ArmTurn:
        """Run one turn with the values that are true now."""
        for key, value in values.items():
            self._context.set(key, value)
        reply = self._context.ask(question)
        report = reply.report
        return ArmTurn(
            answer=reply.text,
            prompt_tokens=report.prompt_tokens,
            cached_tokens=report.cached_tokens,
            predicted_cached_tokens=report.predicted_cached_tokens,
            new_tokens=report.new_tokens,
            ttft_s=report.ttft_s,
            plan=describe(report.plan),
            told=report.erratum,
        )

    def close(self) -> None:
        """Release what the backend holds."""
        self._context.__exit__(None, None, None)


class StateConversation:
    """What `append_state` sends, and `hoist` where the state is stripped a turn later; runs no model."""

    def __init__(self, tokenizer: ChatTokenizer, case: Case, *, strip: bool) -> None:
        self._case = case
        self._strip = strip
        self._encoder = TemplateEncoder(tokenizer)
        self._system = "\n\n".join(_without_values(segment) for segment in case.segments)
        self.kept = TokenIds()
        """The conversation as later prompts repeat it."""
        self.sent = TokenIds()
        """The last prompt and its answer, as the cache holds them."""
        self._last: Sequence[int] | None = None

    def fork(self) -> StateConversation:
        """Return another conversation that goes on from here."""
        return copy(self)

    def prompt(self, values: Mapping[str, str], question: str) -> TokenIds:
        """Return the ids of the next turn's prompt."""
        listed = "\n".join(f"- {label}: {values[key]}" for key, label in self._case.labels.items())
        return self._next(question, f"Current state:\n{listed}")

    def record(self, ids: TokenIds, question: str, completion: Completion) -> None:
        """Go on behind the answer to a prompt."""
        answer = completion.ids or tuple(self._encoder.assistant(completion.text))
        self.kept = (self._next(question) if self._strip else ids).extend(answer)
        self.sent = ids.extend(answer)
        self._last = answer

    def _next(self, question: str, state: str | None = None) -> TokenIds:
        messages = [{"role": "user", "content": question}]
        if state is not None and self._encoder.traits.late_system is Acceptance.ACCEPTED:
            messages.insert(0, {"role": "system", "content": state})
        elif state is not None:
            messages[0]["content"] = f"{state}\n\n{question}"
        if self._last is None:
            return TokenIds(self._encoder.opening([{"role": "system", "content": self._system}, *messages]))
        return self.kept.extend(self._encoder.extension(self._last, messages))


class StateArm:
    """``append_state``, and ``hoist`` where the state is stripped a turn later."""

    def __init__(self, backend: Backend, case: Case, tenant: str, *, strip: bool) -> None:
        self._backend = backend
        self._case = case
        self._tenant = tenant
        self._conversation = StateConversation(backend.tokenizer, case, strip=strip)

    def turn(self, values: Mapping[str, str], question: str) -> ArmTurn:
        """Run one turn with the values that are true now."""
        ids = self._conversation.prompt(values, question)
        request = Request(ids, conversation=self._tenant, salt=self._tenant, options=self._case.sampling)
        completion = complete(self._backend, request)
        common = ids.common_prefix(self._conversation.sent)
        self._conversation.record(ids, question, completion)
        return ArmTurn(
            answer=completion.text,
            prompt_tokens=completion.usage.prompt_tokens,
            cached_tokens=completion.usage.cached_tokens,
            predicted_cached_tokens=None,
            new_tokens=len(ids) - common,
            ttft_s=completion.ttft_s,
        )

    def close(self) -> None:
        """Release what the backend holds."""
        self._backend.release(self._tenant)


def _without_values(segment: TextSegment) -> str:
    if not isinstance(segment.text, Inline):
        return segment.text if isinstance(segment, Policy) else f"## Skill: {segment.name}\n{segment.text}"
    return "".join(literal + ("" if key is None else ELSEWHERE) for literal, key in segment.text.parts)


def make_arm(name: str, backend: Backend, case: Case, *, run: str, mode: Mode = Mode.ON) -> Arm:
    """Return an arm whose cache no other arm and no other run shares.

    Parameters
    ----------
    run
        Distinguishes repetitions.
    mode
        Of the arm ``agentkv``; ``off`` shows what the comparison says of a prompt that is rewritten.

    Raises
    ------
    ValueError
        There is no such arm.
    """
    tenant = f"{name}/{run}"
    match name:
        case "rewrite":
            return ContextArm(backend, case, Mode.OFF, tenant)
        case "agentkv":
            return ContextArm(backend, case, mode, tenant)
        case "append_state":
            return StateArm(backend, case, tenant, strip=False)
        case "hoist":
            return StateArm(backend, case, tenant, strip=True)
    raise ValueError(f"no arm is called {name!r}; there are {', '.join(ARMS)}")
