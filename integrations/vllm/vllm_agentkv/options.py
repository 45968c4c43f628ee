"""The connector's options, read from ``kv_connector_extra_config``; keys are never among them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentkv.errors import ConfigurationError

_LEAST_KEY: Final = 16
_GIB: Final = 1 << 30


class Switch(StrEnum):
    """Whether the connector does something."""

    ON = "on"
    OFF = "off"


class KeySource(BaseModel):
    """Where a secret key is found: exactly one of the two."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    env: str | None = None
    """Environment variable of the server that holds it."""
    file: Path | None = None
    """File that holds it; white space around it is no part of it."""

    @model_validator(mode="after")
    def _exactly_one(self) -> KeySource:
        if (self.env is None) == (self.file is None):
            raise ValueError("give either 'env' or 'file'")
        return self

    def read(self) -> bytes:
        """Return the key.

        Raises
        ------
        ConfigurationError
            It is not there, or shorter than 16 bytes. The message never holds it.
        """
        if self.env is not None:
            place, key = f"environment variable {self.env}", os.environ.get(self.env, "").encode()
        else:
            place = f"file {self.file}"
            try:
                key = (self.file or Path()).read_bytes()
            except OSError as error:
                raise ConfigurationError(f"the key's {place} cannot be read: {error.strerror}") from None
        key = key.strip()
        if len(key) < _LEAST_KEY:
            raise ConfigurationError(
                f"the key in {place} has {len(key)} bytes; put {_LEAST_KEY} random ones or more there"
            )
        return key


class SpliceOptions(BaseModel):
    """What ``kv_connector_extra_config`` may hold."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: Path
    """Folder of artifacts; every process of the server sees the same one."""
    splice: Switch = Switch.ON
    """Whether artifacts are loaded; *off* computes everything, and counts what was asked for."""
    compile: Switch = Switch.OFF
    """Whether requests may have chunks compiled and written to the store."""
    compile_quota_bytes: int = Field(default=8 * _GIB, ge=0)
    """Most that one tenant's artifacts may take on disk before compiling for it is refused."""
    ram_bytes: int = Field(default=2 * _GIB, ge=0)
    """Most that artifacts may take in the memory of each worker; 0 reads the file every time."""
    signing_key: KeySource | None = None
    """Key that artifacts are signed with; with one, an unsigned artifact is refused."""
    ticket_key: KeySource | None = None
    """Key that tickets are signed with; with one, nothing is done without a ticket."""
    allow_untested: bool = False
    """Start although the release of vLLM or another connector beside this one was never tested with it."""


def read_options(extra: Mapping[str, Any]) -> SpliceOptions:
    """Read the options.

    Raises
    ------
    ConfigurationError
        One is unknown, malformed or missing.
    """
    try:
        return SpliceOptions.model_validate(dict(extra))
    except ValidationError as error:
        raise ConfigurationError(
            f"kv_connector_extra_config of the SpliceConnector is wrong (its options are "
            f"{', '.join(SpliceOptions.model_fields)}): {error}"
        ) from None
