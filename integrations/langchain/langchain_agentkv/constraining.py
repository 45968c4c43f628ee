"""Whether an answer is held to the tools' schemas, and by whom."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, Final

from agentkv.backends.base import Backend, Request
from agentkv.errors import MissingDependencyError

_FREE: Final = (None, "auto", "none")


def held(backend: Backend, request: Request, constrain: str) -> tuple[Backend, Request]:
    """Return who answers a request, and what is asked of it.

    Servers hold answers to schemas by themselves. A model in this process is held by llguidance: what it
    calls is one of the tools, with arguments of its schema.

    Parameters
    ----------
    constrain
        ``"auto"``, ``"always"`` or ``"never"``, as of `ChatAgentKV`.

    Raises
    ------
    MissingDependencyError
        The answer has to be held, and llguidance is not installed.
    ConfigurationError
        A schema is none that answers can be held to.
    """
    options = request.options
    required = options.tool_choice not in _FREE or options.response_format is not None
    wanted = required or (bool(request.tools) and options.tool_choice != "none")
    if not wanted or constrain == "never" or not _is_embedded(backend):
        return backend, request
    try:
        from langchain_agentkv.constrained import hold
    except MissingDependencyError:
        if required or constrain == "always":
            raise
        return backend, request
    made = hold(backend, request)
    if made is None:
        return backend, request
    return made, replace(request, options=replace(options, tool_choice=None, response_format=None))


def _is_embedded(backend: Any) -> bool:
    # Whoever has such a backend has imported its module: torch is not loaded to find out.
    module = sys.modules.get("agentkv.backends.transformers")
    return module is not None and isinstance(backend, module.TransformersBackend)
