"""What an examination finds: one line for each check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    """agentkv works, with less than it could."""
    FAILED = "failed"
    """agentkv does not work, or saves nothing, until it is mended."""
    UNCHECKED = "not checked"
    """It could not be measured; `Finding.found` says why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one check found."""

    status: Status
    found: str
    fix: str = ""
    """What to do; empty where there is nothing to do."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An outcome with its check's name."""

    name: str
    status: Status
    needed: bool
    """Whether agentkv cannot do without it."""
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Examination:
    """All that was found of a server."""

    url: str
    model: str | None
    """The served model's name; None if there was none to examine."""
    findings: tuple[Finding, ...]
    """In the order in which they were measured."""

    @property
    def ok(self) -> bool:
        """Whether nothing that is needed failed."""
        return not any(finding.status is Status.FAILED for finding in self.findings)

    def __getitem__(self, name: str) -> Finding:
        """Return the finding of a check by name.

        Raises
        ------
        KeyError
            There is no such check.
        """
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)

    def to_dict(self) -> Mapping[str, Any]:
        """Return it as plain JSON values."""
        checks = [asdict(finding) | {"status": finding.status.value} for finding in self.findings]
        return {"url": self.url, "model": self.model, "checks": checks, "ok": self.ok}


def ok(found: str) -> Outcome:
    """Return that all is well."""
    return Outcome(Status.OK, found)


def warning(found: str, fix: str = "") -> Outcome:
    """Return that something is amiss that agentkv can do without."""
    return Outcome(Status.WARNING, found, fix)


def failed(found: str, fix: str = "") -> Outcome:
    """Return that something is amiss that agentkv needs."""
    return Outcome(Status.FAILED, found, fix)


def unchecked(why: str, fix: str = "") -> Outcome:
    """Return that it could not be measured."""
    return Outcome(Status.UNCHECKED, why, fix)
