"""How a vLLM server is started: its options, and the command line and environment made of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
HOST: Final = "127.0.0.1"
MODULE: Final = "vllm.entrypoints.openai.api_server"
"""The `vllm` command of the CPU build fails, its module works."""


class ServerError(RuntimeError):
    """A server cannot be started, reached or ended; the message says why and what to do."""


class DType(StrEnum):
    """Number format of weights and KV."""

    AUTO = "auto"
    """bfloat16 where the processor has instructions for it, else float32, which is then far faster."""
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    """Answers do not change with what else runs in the batch."""


class Execution(StrEnum):
    """How vLLM runs the model."""

    EAGER = "eager"
    """Ready in less than half the time."""
    COMPILED = "compiled"


class Endpoints(StrEnum):
    """What the server offers."""

    SERVING = "serving"
    DEVELOPMENT = "development"
    """Also vLLM's development endpoints, such as ``/reset_prefix_cache``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to start a server."""

    model: str = "smollm2-135m"
    """A folder, a known model that was pulled, or a hub id."""
    served_name: str | None = None
    """What requests call the model; None takes the folder's name, or `model` as it is."""
    port: int | None = None
    """None takes a free one."""
    dtype: DType = DType.AUTO
    block_size: int = 32
    """Tokens per block of KV; the CPU kernel takes multiples of 32."""
    kv_gib: int = 4
    """Memory for KV, in GiB."""
    max_model_len: int = 8192
    """Longest prompt and answer together, in tokens."""
    execution: Execution = Execution.EAGER
    endpoints: Endpoints = Endpoints.SERVING
    connector: Mapping[str, Any] | None = None
    """Options of agentkv's KV connector, ``kv_connector_extra_config``; None runs without one."""
    extra: tuple[str, ...] = ()
    """More arguments for vLLM; they come last, so they win."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More environment variables for vLLM; they win."""
    python: Path = ROOT / ".venv-vllm" / "bin" / "python"
    """The interpreter that vLLM is installed for."""
    state_dir: Path = ROOT / "build" / "vllm"
    """Where the state and the log are kept; a folder knows one server."""
    limit_s: float = 300.0
    """Seconds that the server may take until it is healthy."""

    @property
    def model_name(self) -> str:
        """What requests call the model."""
        folder = Path(self.model).expanduser()
        return self.served_name or (folder.resolve().name if folder.is_dir() else self.model)


def chosen_dtype(asked: DType, cpuinfo: Path = Path("/proc/cpuinfo")) -> DType:
    """Return the number format to run with."""
    if asked is not DType.AUTO:
        return asked
    flags = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    fast = "avx512_bf16" in flags or "amx_bf16" in flags
    return DType.BFLOAT16 if fast else DType.FLOAT32


def command(options: Options, model: str, port: int) -> list[str]:
    """Return the command line of a server of `model`, a folder or a hub id."""
    # The link to an environment's interpreter is not resolved. -P: no imports from the working directory.
    words = [str(options.python.absolute()), "-P", "-m", MODULE, "--model", model]
    words += ["--served-model-name", options.model_name, "--host", HOST, "--port", str(port)]
    words += ["--dtype", chosen_dtype(options.dtype).value, "--block-size", str(options.block_size)]
    words += ["--max-model-len", str(options.max_model_len), "--scheduling-policy", "priority"]
    # Cached tokens in the usage; render, generate and derender; tool calls.
    words += ["--enable-prompt-tokens-details", "--enable-scale-out"]
    words += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    if options.execution is Execution.EAGER:
        words.append("--enforce-eager")
    if options.connector is not None:
        words += ["--kv-transfer-config", json.dumps(transfer_config(options.connector))]
    return [*words, *options.extra]


def transfer_config(connector: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``--kv-transfer-config`` of a server whose connector has these options."""
    return {
        "kv_connector": "SpliceConnector",
        "kv_connector_module_path": "vllm_agentkv.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(connector),
    }


def environment(options: Options, model: str) -> dict[str, str]:
    """Return the environment of a server of `model`: the caller's with what vLLM needs on top."""
    made = dict(os.environ)
    if sys.platform == "linux":
        # Left to itself, vLLM binds other cores once it has a connector: servers could not be compared.
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        made.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
    made |= {"VLLM_CPU_KVCACHE_SPACE": str(options.kv_gib), "VLLM_NO_USAGE_STATS": "1"}
    made["VLLM_SERVER_DEV_MODE"] = "1" if options.endpoints is Endpoints.DEVELOPMENT else "0"
    if Path(model).is_dir():
        made["HF_HUB_OFFLINE"] = "1"
    if options.connector is not None:
        # The checkout's own packages, whatever vLLM's environment has installed.
        paths = [str(ROOT), str(ROOT / "integrations" / "vllm"), made.get("PYTHONPATH", "")]
        made["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return made | dict(options.environment)


def find_model(model: str) -> str:
    """Return the folder or hub id that vLLM is given.

    Raises
    ------
    ServerError
        It is nothing that can be served.
    """
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return str(folder.absolute())
    try:
        from agentkv import models
        from agentkv.errors import ModelError
    except ImportError as problem:
        raise ServerError(
            f"{model!r} is no folder with a config.json, and names are looked up with agentkv, which "
            f"{sys.executable} does not have; pass a folder, or run this with .venv/bin/python"
        ) from problem
    try:
        return str(models.resolve(model))
    except ModelError as problem:
        raise ServerError(str(problem)) from problem
