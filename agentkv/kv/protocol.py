"""What a client and the connector inside a server say to each other, in ``kv_transfer_params["agentkv"]``.

A request carries exactly one of `Splices`, `Compile`, `Hello` and `Ask`; `Hello`, `Compile` and `Ask` are
answered by `HelloAnswer`, `Compiled` and `Asked`, or by `Refused`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from agentkv.errors import CapabilityError
from agentkv.kv.complaints import complaint
from agentkv.kv.identity import ModelIdentity
from agentkv.kv.refusals import Refusal
from agentkv.kv.tickets import ArtifactName

PROTOCOL: Final = 1
"""Version that both sides have to speak."""

_Count: TypeAlias = Annotated[int, Field(ge=0)]
_Version: TypeAlias = Literal[1]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SpliceSpec(_Message):
    """Prompt tokens ``[start, stop)`` come from an artifact's ``[offset, offset + stop - start)``."""

    artifact: ArtifactName
    start: _Count
    stop: _Count
    offset: _Count

    @model_validator(mode="after")
    def _not_empty(self) -> SpliceSpec:
        if self.start >= self.stop:
            raise ValueError(f"tokens [{self.start}, {self.stop}) are none; give a start below the stop")
        return self


class Splices(_Message):
    """Asks to load chunks instead of prefilling them; one for all prompts of a call."""

    kind: Literal["splices"] = "splices"
    version: _Version = 1
    call: str
    """Names the call, so that `Ask` can ask about it."""
    tenant: str
    primes: tuple[_Count, ...] = ()
    """Lengths in tokens of the prompts that only prepare the main one, a prefix of it each."""
    splices: tuple[SpliceSpec, ...]
    """Sorted by start, not overlapping."""
    ticket: str | None = None
    """Needed where `HelloAnswer.tickets` says so."""

    @model_validator(mode="after")
    def _in_order(self) -> Splices:
        for one, other in pairwise(self.splices):
            if other.start < one.stop:
                raise ValueError(
                    f"splices at {one.start} and {other.start} overlap or are not sorted by start"
                )
        return self


class Compile(_Message):
    """Asks to keep the KV of a prompt's tokens behind its anchor as an artifact."""

    kind: Literal["compile"] = "compile"
    version: _Version = 1
    tenant: str
    anchor: _Count
    """Tokens at the beginning of the prompt whose KV is dropped."""
    ticket: str | None = None


class Hello(_Message):
    """Asks what the server is."""

    kind: Literal["hello"] = "hello"
    version: int = PROTOCOL


class Ask(_Message):
    """Asks what became of a call's splices, and which artifacts the server has."""

    kind: Literal["ask"] = "ask"
    version: _Version = 1
    call: str | None = None
    have: tuple[ArtifactName, ...] = ()


class HelloAnswer(_Message):
    """What the server is."""

    kind: Literal["hello"] = "hello"
    version: int = PROTOCOL
    identity: ModelIdentity
    block_size: int = Field(ge=1)
    """Tokens of a block of its prefix cache."""
    compiles: bool
    """Whether it answers `Compile`."""
    tickets: bool
    """Whether splicing and compiling need a ticket."""


class Compiled(_Message):
    """An artifact was written, or was there already."""

    kind: Literal["compiled"] = "compiled"
    artifact: ArtifactName
    tokens: _Count
    """Tokens of the chunk, the anchor not counted."""
    nbytes: _Count
    """Size of its file."""


class Outcome(_Message):
    """What became of the splices of one prompt of a call."""

    prompt: _Count
    """Its length in tokens."""
    local: _Count
    """Tokens found in the server's own prefix cache."""
    loaded: _Count
    """Tokens loaded from artifacts."""
    refused: tuple[tuple[ArtifactName, Refusal], ...] = ()


class Asked(_Message):
    """Answer to `Ask`."""

    kind: Literal["asked"] = "asked"
    outcomes: tuple[Outcome, ...] = ()
    """One for each prompt of the call that the server has seen to its end."""
    have: tuple[bool, ...] = ()
    """Whether each of the artifacts asked for is there and sound."""


class Refused(_Message):
    """The server does not do what was asked."""

    kind: Literal["refused"] = "refused"
    reason: Refusal
    message: str


Asking: TypeAlias = Annotated[Splices | Compile | Hello | Ask, Field(discriminator="kind")]
"""What a request may carry."""
Answer: TypeAlias = Annotated[HelloAnswer | Compiled | Asked | Refused, Field(discriminator="kind")]
"""What a response may carry."""

_ASKING: Final[TypeAdapter[Splices | Compile | Hello | Ask]] = TypeAdapter(Asking)
_ANSWER: Final[TypeAdapter[HelloAnswer | Compiled | Asked | Refused]] = TypeAdapter(Answer)


def read_asking(value: Any) -> Splices | Compile | Hello | Ask:
    """Read what a request carries, from plain JSON.

    Raises
    ------
    CapabilityError
        It is of another protocol version, or malformed.
    """
    read: Splices | Compile | Hello | Ask = _read(_ASKING, value, "request")
    return read


def read_answer(value: Any) -> HelloAnswer | Compiled | Asked | Refused:
    """Read what a response carries, from plain JSON.

    Raises
    ------
    CapabilityError
        It is of another protocol version, or malformed.
    """
    read: HelloAnswer | Compiled | Asked | Refused = _read(_ANSWER, value, "response")
    return read


def _read(adapter: TypeAdapter[Any], value: Any, which: str) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        version = value.get("version") if isinstance(value, dict) else None
        raise CapabilityError(
            f"a {which} of agentkv is not understood (its version is {version!r}, this side speaks "
            f"{PROTOCOL}); use one release of agentkv on both sides: {complaint(error)}"
        ) from None
