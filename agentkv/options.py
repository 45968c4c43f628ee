"""How a context behaves: its options, its mode and how its answers are sampled."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from agentkv.backends.base import SamplingOptions
from agentkv.costs import Costs
from agentkv.errors import ConfigurationError
from agentkv.plan import Mode
from agentkv.profile import GENERIC, Profile
from agentkv.salts import Namespace, process_key, salt
from agentkv.segments import Splicing

MODE_VARIABLE: Final = "AGENTKV_MODE"
"""Environment variable that overrides every context's mode; ``off`` is the kill switch."""


_KINDS: Final[Mapping[str, type]] = {
    "tenant": str,
    "conversation": str,
    "routing_key": str,
    "profile": Profile,
    "sampling": SamplingOptions,
    "costs": Costs,
    "splicing": Splicing,
}


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """How a context behaves; the keyword arguments of its constructor.

    Raises
    ------
    ConfigurationError
        An option is of the wrong type, the salt key is too short, or the tenant is no name.
    """

    mode: Mode = Mode.ON
    tenant: str = "default"
    """Whose conversation it is; prefix caches are never shared between tenants."""
    salt_key: bytes = field(default_factory=process_key, repr=False)
    """Secret of at least 16 bytes that salts are made with."""
    profile: Profile = GENERIC
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    costs: Costs = field(default_factory=Costs)
    conversation: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Stable id: where KV is kept."""
    splicing: Splicing = Splicing.AUTO
    """Whether compiled skills and documents are spliced, where they do not say it themselves and the backend
    can. `Splicing.NEVER` keeps the conversation exact."""
    routing_key: str = ""
    """What keeps the requests of a conversation and its forks on one replica; empty: `conversation`."""

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ConfigurationError(f"{name} is a {type(value).__name__}; give a {kind.__name__}")
        salt(self.salt_key, tenant=self.tenant, namespace=Namespace.EXACT)


def effective_mode(asked: Mode | str) -> Mode:
    """Return the mode to use: the environment's, if it names one.

    Raises
    ------
    ConfigurationError
        There is no such mode.
    """
    named = os.environ.get(MODE_VARIABLE, "").strip().lower() or asked
    try:
        return Mode(named)
    except ValueError:
        known = ", ".join(Mode)
        raise ConfigurationError(f"mode {named!r} is unknown; use one of {known}") from None


def sampling_of(base: SamplingOptions, changes: Mapping[str, Any]) -> SamplingOptions:
    """Return sampling options with some changed by name.

    Raises
    ------
    ConfigurationError
        There is no such option.
    """
    if not changes:
        return base
    try:
        return replace(base, **changes)
    except TypeError as error:
        known = ", ".join(SamplingOptions.__dataclass_fields__)
        raise ConfigurationError(f"unknown sampling option ({error}); options are: {known}") from error
