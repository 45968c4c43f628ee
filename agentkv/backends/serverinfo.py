"""What a server says of itself: its models, its cache and when it was started."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from agentkv.errors import BackendError, CapabilityError

_CACHE: Final = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_STARTED: Final = re.compile(r"^process_start_time_seconds (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a server lists."""

    name: str
    """What requests call it."""
    context_window: int | None
    """Most tokens of prompt and answer together; None if the server does not say."""
    root: str | None
    """What the server loaded: a folder of its machine or an id on a hub."""


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """What vLLM's metrics say of the prefix cache."""

    block_size: int | None
    """Tokens of a block; only whole blocks are found again."""
    enabled: bool | None
    started: float | None
    """When the process was started, in seconds since 1970: another one means an empty cache."""
    engines: int
    """How many engines, each with a cache of its own, answer at this address."""


def served_models(listed: Any) -> tuple[ServedModel, ...]:
    """Read the answer of ``/v1/models``.

    Raises
    ------
    BackendError
        It is no list of models.
    """
    rows = listed.get("data") if isinstance(listed, Mapping) else None
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) and row.get("id") for row in rows):
        raise BackendError("the server's /v1/models is no list of models: is it an OpenAI-compatible server?")
    return tuple(
        ServedModel(str(row["id"]), _whole(row.get("max_model_len")), row.get("root") or None) for row in rows
    )


def choose_model(models: tuple[ServedModel, ...], asked: str | None, url: str) -> ServedModel:
    """Return the model that was asked for, or the only one.

    Raises
    ------
    CapabilityError
        There is no such model, or several and none was asked for.
    """
    names = ", ".join(model.name for model in models) or "none"
    if asked is None:
        if len({model.root or model.name for model in models}) == 1:
            return models[0]
        raise CapabilityError(f"{url} serves several models or none ({names}): say which with model=")
    for model in models:
        if model.name == asked:
            return model
    raise CapabilityError(f"{url} serves no model {asked!r}; it serves: {names}")


def cache_info(metrics: str) -> CacheInfo:
    """Read vLLM's ``/metrics``; what it does not hold is None."""
    found, started = _CACHE.search(metrics), _STARTED.search(metrics)
    labels = dict(_LABEL.findall(found.group(1))) if found else {}
    enabled = labels.get("enable_prefix_caching")
    return CacheInfo(
        block_size=_whole(labels.get("block_size")),
        enabled=None if enabled is None else enabled == "True",
        started=float(started.group(1)) if started else None,
        engines=len(_CACHE.findall(metrics)),
    )


def _whole(value: object) -> int | None:
    try:
        number = int(str(value))
    except ValueError:
        return None
    return number if number > 0 else None
