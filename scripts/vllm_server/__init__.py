"""Start vLLM on the CPU of this machine, wait until it answers, and end it.

Linux and the standard library are all it needs, so it runs with any interpreter of the project; only the
name of a known model is looked up with agentkv. The server gets a session and a process group of its own:
it outlasts the terminal, and is ended with all its processes. From the root of the checkout::

    python -m scripts.vllm_server start [--port 8000] [--dtype float32] [--extra --a-flag-of-vllm ...]
    python -m scripts.vllm_server status
    python -m scripts.vllm_server stop

The same for programs: `start`, `running`, `stop`, and `serving` for the length of a block.
"""

from __future__ import annotations

from scripts.vllm_server.lifecycle import Progress, running, serving, start, stop
from scripts.vllm_server.options import DType, Endpoints, Execution, Options, ServerError
from scripts.vllm_server.server import LocalServer, Server

__all__ = [
    "DType",
    "Endpoints",
    "Execution",
    "LocalServer",
    "Options",
    "Progress",
    "Server",
    "ServerError",
    "running",
    "serving",
    "start",
    "stop",
]
