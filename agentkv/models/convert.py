"""Turning fetched weights into a folder that transformers and inference servers load."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, Protocol

from agentkv.errors import MissingDependencyError, ModelError
from agentkv.models.fetch import last_lines
from agentkv.models.progress import Progress, Step

_NEEDED: Final = ("torch", "transformers", "gguf", "accelerate")
_SCRIPT: Final = Path(__file__).with_name("gguf_script.py")
_QUIET: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "PYTHONIOENCODING": "utf-8",
}


class Converter(Protocol):
    """Makes a model folder out of fetched weights."""

    @property
    def version(self) -> str:
        """Changes whenever the same weights would give another folder."""
        ...

    def check(self) -> None:
        """Say before the download whether the conversion can run.

        Raises
        ------
        MissingDependencyError
            Something it needs is not installed.
        """
        ...

    def convert(self, weights: Path, folder: Path, progress: Progress) -> str:
        """Write the model of `weights` into the empty `folder`; return the version of transformers used.

        Raises
        ------
        ModelError
            The weights cannot be converted.
        """
        ...


class GGUFConverter:
    """Unpacks a GGUF file into bfloat16 safetensors, with tokenizer and chat template, by transformers.

    The call is that of https://huggingface.co/docs/transformers/gguf; it runs in a process of its own.
    """

    __slots__ = ()

    @property
    def version(self) -> str:
        """Version of the conversion."""
        return "gguf-bfloat16-1"

    def check(self) -> None:
        """Check that the packages are there, without importing them."""
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise MissingDependencyError(
                f"converting a model needs {', '.join(missing)}, not installed: "
                f"pip install 'agentkv-middleware[transformers]', or '.[transformers]' in a checkout"
            )

    def convert(self, weights: Path, folder: Path, progress: Progress) -> str:
        """Run the conversion and follow its steps."""
        # -P keeps this folder's module names from hiding others.
        command = [sys.executable, "-P", str(_SCRIPT), str(weights), str(folder)]
        version: str | None = None
        with tempfile.TemporaryFile() as noise:
            with subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=noise,
                env=os.environ | _QUIET,
                encoding="utf-8",
                errors="replace",
            ) as child:
                try:
                    for line in child.stdout or ():
                        match line.split():
                            case ["agentkv", "load"]:
                                progress.begin(Step.LOAD)
                            case ["agentkv", "save"]:
                                progress.begin(Step.SAVE)
                            case ["agentkv", "done", version]:
                                pass
                except BaseException:
                    child.kill()
                    raise
            noise.seek(0)
            said = noise.read().decode("utf-8", "replace")
        if child.returncode != 0 or version is None:
            raise ModelError(
                f"converting {weights.name} failed (exit code {child.returncode}): {last_lines(said, 1)}. "
                f"A negative code means that it was killed, mostly for lack of memory; otherwise update "
                f"transformers and gguf, or pass a model folder"
            )
        return version
