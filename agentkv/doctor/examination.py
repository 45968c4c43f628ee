"""The order of checks, what depends on what, and how a failure leaves the others alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agentkv.doctor import blocks, cache, endpoints, server, splicing, template, tokens
from agentkv.doctor.findings import Examination, Finding, Outcome, Status, failed, unchecked
from agentkv.doctor.session import Asked, Lengths, Session
from agentkv.errors import AgentKVError, CapabilityError
from agentkv.http import HttpClient, ServerOptions

if TYPE_CHECKING:
    from agentkv.template import TemplateTraits
    from agentkv.tokenizer import ChatTokenizer

_PASSED: Final = frozenset({Status.OK, Status.WARNING})
_HIDDEN: Final = "…"
_LEAST_SECRET: Final = 6
"""Shorter header values stand in ordinary words too."""
_ODD: Final = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""What reading an answer of some other server may raise."""


class _Measured:
    """What several checks look at, measured once."""

    def __init__(self, session: Session) -> None:
        self.session = session

    @cached_property
    def repeats(self) -> cache.Repeats:
        return cache.repeat(self.session)

    @cached_property
    def partition(self) -> cache.Partition:
        return cache.partition(self.session, self.repeats)

    @property
    def partition_or_none(self) -> cache.Partition | None:
        return self.partition if self.repeats.cached else None

    @cached_property
    def traits(self) -> TemplateTraits:
        if self.session.template.path is None:
            raise CapabilityError("the server renders no messages (neither a render endpoint nor /tokenize)")
        return template.traits(self.session)


@dataclass(frozen=True, slots=True)
class Check:
    """One check."""

    name: str
    run: Callable[[_Measured], Outcome]
    after: tuple[str, ...] = ()
    """Checks without which this one cannot be made."""
    needed: bool = False
    """Whether agentkv cannot do without it."""


def _asks(check: Callable[[Session], Outcome]) -> Callable[[_Measured], Outcome]:
    return lambda measured: check(measured.session)


def _trait(check: template.TraitsCheck) -> Callable[[_Measured], Outcome]:
    return lambda measured: check(measured.traits)


CHECKS: Final = (
    Check("reachable", _asks(server.reachable), needed=True),
    Check("API key", _asks(server.api_key), ("reachable",), needed=True),
    Check("model", _asks(server.model), ("API key",), needed=True),
    Check("version", _asks(server.version), ("API key",)),
    Check("metrics", _asks(server.metrics), ("API key",)),
    Check("restarts", _asks(server.restarts), ("metrics",)),
    Check("tokenizer", _asks(tokens.tokenizer), ("model",), needed=True),
    Check("rendering", _asks(tokens.messages), ("tokenizer",)),
    Check("token-id prompts", _asks(tokens.prompts), ("model",), needed=True),
    Check("generated ids", _asks(tokens.generated), ("token-id prompts",)),
    Check("token details", lambda m: cache.details(m.repeats, m.session), ("model",), needed=True),
    Check("prefix caching", lambda m: cache.caching(m.repeats, m.session), ("model",), needed=True),
    Check(
        "block size",
        lambda m: blocks.block_size(m.session, m.repeats),
        ("token-id prompts", "prefix caching"),
    ),
    Check("salts", lambda m: cache.salts(m.partition), ("prefix caching",), needed=True),
    Check("replicas", lambda m: cache.replicas(m.repeats, m.session), ("prefix caching",)),
    Check("parameters", lambda m: endpoints.parameters(m.session, m.partition_or_none), ("model",)),
    Check("scale-out", _asks(endpoints.scale_out), ("model",)),
    Check("tool parser", _asks(endpoints.tool_parser), ("model",)),
    Check("tool_choice none", _asks(endpoints.tool_choice_none), ("model",)),
    Check("structured output", _asks(endpoints.structured_output), ("model",)),
    Check("priority", _asks(endpoints.priority), ("model",)),
    Check("append-only", _trait(template.append_only), ("model",)),
    Check("late system messages", _trait(template.late_system), ("model",)),
    Check("tool messages", _trait(template.tool_role), ("model",)),
    Check("alternation", _trait(template.alternation), ("model",)),
    Check("reasoning", _trait(template.reasoning), ("model",)),
    Check("date", _asks(template.date), ("model",)),
    Check("connector", _asks(splicing.connector), ("model",)),
    Check("exact answers", _asks(splicing.canary), ("connector", "token-id prompts", "prefix caching")),
)
"""Every check, in the order in which they are made."""


def examine(
    options: ServerOptions,
    *,
    model: str | None = None,
    tokenizer: ChatTokenizer | str | Path | None = None,
    lengths: Lengths = Lengths.SHORT,
    progress: Callable[[str], None] | None = None,
) -> Examination:
    """Measure what a server can do for agentkv.

    Probes are short and carry random salts; one unsalted prompt of random ids stays in the server's cache.

    Parameters
    ----------
    options
        How the server is reached.
    model
        The served name; None takes the only one.
    tokenizer
        The served model's, as `agentkv.backends.VLLMBackend` takes it; None loads what the server says it
        loaded.
    lengths
        How long the prompts may get that look for large blocks.
    progress
        Called with the name of each check before it is made.

    Returns
    -------
    Examination
        A finding for each check; what a server cannot do is a finding, not an exception.
    """
    http = HttpClient(options)
    session = Session(http, Asked(model, tokenizer, lengths))
    measured = _Measured(session)
    findings: list[Finding] = []
    try:
        for check in CHECKS:
            if progress is not None:
                progress(check.name)
            outcome = _made(check, measured, {finding.name: finding.status for finding in findings})
            findings.append(_finding(check, outcome, options))
    finally:
        http.close()
    served = next(finding for finding in findings if finding.name == "model")
    name = session.model.name if served.status in _PASSED else None
    return Examination(options.root, name, tuple(findings))


def _made(check: Check, measured: _Measured, before: dict[str, Status]) -> Outcome:
    missing = [name for name in check.after if before[name] not in _PASSED]
    if missing:
        return unchecked(f"needs {missing[0]!r} first")
    try:
        return check.run(measured)
    except AgentKVError as error:
        said = str(error)
    except _ODD as error:
        said = f"the server's answer is of no known form ({type(error).__name__}: {error})"
    return failed(said) if check.needed else unchecked(said)


def _finding(check: Check, outcome: Outcome, options: ServerOptions) -> Finding:
    found = outcome.found
    # A server may repeat in its words what it was sent.
    headers = (value for value in options.headers.values() if len(value) >= _LEAST_SECRET)
    for secret in (options.api_key, *headers):
        if secret:
            found = found.replace(secret, _HIDDEN)
    return Finding(check.name, outcome.status, check.needed, found, outcome.fix)
