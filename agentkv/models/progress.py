"""What a long operation on a model tells whoever is watching."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Protocol


class Step(StrEnum):
    """A part of pulling or verifying a model; the value is what a person reads."""

    WAIT = "waiting for another process that is at work on it"
    DOWNLOAD = "downloading the package"
    EXTRACT = "extracting the weights"
    LOAD = "converting: loading the weights"
    SAVE = "converting: saving"
    DIGEST = "computing digests"


class Progress(Protocol):
    """Receives steps in order; a step ends where the next one begins."""

    def begin(self, step: Step, total_bytes: int | None = None) -> None:
        """A step begins; `total_bytes` is None where its size is not known."""
        ...

    def advance(self, count: int) -> None:
        """`count` more bytes of the current step are done."""
        ...


class SilentProgress:
    """Shows nothing."""

    __slots__ = ()

    def begin(self, step: Step, total_bytes: int | None = None) -> None:
        """Ignore it."""

    def advance(self, count: int) -> None:
        """Ignore it."""


SILENT: Final[Progress] = SilentProgress()
"""The progress of callers that did not ask for one."""
