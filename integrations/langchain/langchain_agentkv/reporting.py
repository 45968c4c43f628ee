"""Reports on their way to people: callbacks and traces."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from langchain_core.callbacks import adispatch_custom_event, dispatch_custom_event
from langsmith.run_helpers import get_current_run_tree

EVENT: Final = "agentkv"
"""Name of the event that carries a call's report."""


def emit(report: Mapping[str, Any]) -> None:
    """Send a report to the callbacks of the run, and put it into the metadata of the traced run, if any."""
    if not report:
        return
    with suppress(RuntimeError):
        # Outside of a run there is nobody to tell.
        dispatch_custom_event(EVENT, dict(report))
    _trace(report)


async def aemit(report: Mapping[str, Any]) -> None:
    """As `emit`, for asynchronous runs."""
    if not report:
        return
    with suppress(RuntimeError):
        await adispatch_custom_event(EVENT, dict(report))
    _trace(report)


def metadata_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report as flat run metadata, each name with ``agentkv_`` in front."""
    return {
        f"agentkv_{key}": value if isinstance(value, str | int | float | bool) else str(value)
        for key, value in report.items()
        if value not in (None, "", [], {})
    }


def _trace(report: Mapping[str, Any]) -> None:
    run = get_current_run_tree()
    if run is not None:
        run.add_metadata(metadata_of(report))
