"""Where a benchmark ran."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any


def environment(**more: Any) -> dict[str, Any]:
    """Return the machine, the versions, the commit and the date, and what else is given."""
    versions = {}
    for name in ("agentkv-middleware", "torch", "transformers", "tokenizers", "pydantic"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "commit": _commit(),
        "versions": versions,
        **more,
    }


def write_results(file: Path | None, result: dict[str, Any], *, indent: int | None = None) -> None:
    """Write what was measured as JSON, making its folder; nothing if no file was asked for."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    separators = (",", ":") if indent is None else None
    text = json.dumps(result, ensure_ascii=False, indent=indent, separators=separators)
    file.write_text(text + "\n", encoding="utf-8")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"],  # noqa: S607 - the git on the path
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
