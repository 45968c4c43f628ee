"""Processes as Linux tells of them: which one a number means, which ones belong together."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def birth(pid: int) -> str | None:
    """Return when a process began, as text to compare; None if it ended, reaped or not.

    A number is given to another process one day; number and birth together are not.
    """
    told = _stat(pid)
    if told is None:
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{told[19]}"  # field 22 of proc(5): clock ticks from boot to start


def group(leader: int) -> list[int]:
    """Return the living processes of the group that `leader` leads or led."""
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in numbers if (told := _stat(pid)) is not None and int(told[2]) == leader]


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Tell whether `condition` became true within `limit_s` seconds."""
    until = time.monotonic() + limit_s
    while not (met := condition()) and time.monotonic() < until:
        time.sleep(0.05)
    return met


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on; None if the process ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    told = text.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return None if told[0] in ("Z", "X") else told
