"""Runs the parts that were asked for; what was measured before an interrupt is kept."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress

from agentkv import Mode
from benchmarks.splice.plan import Part, Plan
from benchmarks.splice.targets import ModelTarget, ServerTarget, Target
from benchmarks.splice.times import Row, Times
from benchmarks.splice.watch import Watched
from scripts.vllm_server import DType, Execution, Options, serving
from scripts.vllm_server.options import chosen_dtype, find_model

KV_GIB: Final = 4
_SPARE_TOKENS: Final = 64
"""Room for artifacts beside the one that fills their memory: less than the smallest that is measured."""
_TIMED: Final = (Part.TTFT, Part.SKILLS, Part.APPEND)
LONGEST_S: Final = 3600.0

Told = Callable[..., None]
"""Takes facts of what is measured, by name."""


def no_rows() -> dict[str, list[Row]]:
    """Return a place for the rows of all parts."""
    return {name: [] for name in (*Part, "artifacts")}


def run_times(
    target: Target,
    plan: Plan,
    parts: Sequence[Part],
    mode: Mode,
    rows: dict[str, list[Row]],
    progress: Progress,
) -> None:
    """Measure times to the first token."""
    task = progress.add_task("time to first token", total=Times.steps(plan, parts))
    times = Times(target, plan, mode, rows, lambda: progress.advance(task))
    for part, measure in ((Part.TTFT, times.sizes), (Part.SKILLS, times.skills), (Part.APPEND, times.append)):
        if part in parts:
            progress.update(task, description=f"time to first token: {part}")
            measure()
    progress.remove_task(task)


def run_fidelity(
    model: Any, tokenizer: Any, plan: Plan, mode: Mode, rows: dict[str, list[Row]], progress: Progress
) -> None:
    """Compare spliced prompts with full prefills."""
    from benchmarks.splice.fidelity import FidelityRun
    from benchmarks.splice.kvmodel import KVModel

    run = FidelityRun(KVModel(model, tokenizer), plan.probes, mode)
    task = progress.add_task("fidelity", total=run.steps)
    for row in run.rows(lambda: progress.advance(task)):
        rows[Part.FIDELITY].append(row)
    progress.remove_task(task)


def loaded(model: str) -> tuple[Any, Any, Path | None]:
    """Load a model in float32, and its tokenizer; the folder of its files comes last, if it is one."""
    import torch

    from agentkv.backends.loading import load_model
    from agentkv.huggingface import HuggingFaceTokenizer

    name, found = load_model(model, "cpu", torch.float32, {})
    folder = Path(name)
    return found, HuggingFaceTokenizer.from_pretrained(name), folder if folder.is_dir() else None


@contextmanager
def model_target(model: Any, tokenizer: Any, files: Path | None) -> Iterator[ModelTarget]:
    """Give a model in this process, with a store of artifacts of its own."""
    with tempfile.TemporaryDirectory(prefix="agentkv-splice-") as store:
        yield ModelTarget(model, tokenizer, Path(store), files)


@contextmanager
def server_target(
    url: str | None,
    options: Options,
    plan: Plan,
    console: Console,
    told: Told,
) -> Iterator[ServerTarget]:
    """Give a server at an address, or one that is started with the connector and ended here."""
    with ExitStack() as stack:
        store: Path | None = None
        if url is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agentkv-splice-")))
            store = folder / "artifacts"
            store.mkdir()
            ram = (plan.most_tokens + _SPARE_TOKENS) * bytes_per_token(options)
            connector = {"store": str(store), "compile": "on", "ram_bytes": ram}
            options = replace(options, connector=connector, state_dir=folder)
            # Ended by `kill` or a time limit too, the server goes first.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            with console.status("a vLLM server starts"):
                url = stack.enter_context(serving(options)).url
            told(dtype=str(chosen_dtype(options.dtype)), execution=str(options.execution))
        yield stack.enter_context(_client(url, store, plan, told))


@contextmanager
def _client(url: str, store: Path | None, plan: Plan, told: Told) -> Iterator[ServerTarget]:
    import httpx2

    from agentkv.backends import VLLMBackend

    # A call that is sent twice would count as one that is late: better that it fails.
    with VLLMBackend(url, splices="always", stall_s=LONGEST_S, deadline_s=LONGEST_S, attempts=1) as backend:
        version = httpx2.get(f"{url}/version").json().get("version")
        told(vllm=version, block_size=backend.capabilities.block_size, model=backend.model)
        yield ServerTarget(
            Watched(backend), lambda: httpx2.get(f"{url}/metrics").text, store, plan.most_tokens
        )


def server_options(model: str, dtype: DType, execution: Execution, python: Path | None) -> Options:
    """Return how a server is started."""
    options = Options(model=model, dtype=dtype, execution=execution, kv_gib=KV_GIB, limit_s=600.0)
    return options if python is None else replace(options, python=python)


def bytes_per_token(options: Options) -> int:
    """Return the bytes of KV that a server keeps of a token, by the model's configuration."""
    config = json.loads((Path(find_model(options.model)) / "config.json").read_text(encoding="utf-8"))
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    width = 4 if chosen_dtype(options.dtype) is DType.FLOAT32 else 2
    return int(2 * config["num_hidden_layers"] * heads * size * width)


def timed(parts: Sequence[Part]) -> bool:
    """Whether any part needs a backend."""
    return any(part in _TIMED for part in parts)
