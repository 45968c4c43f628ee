"""What a vLLM server counts of its prefix cache."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Final

_COUNTER: Final = re.compile(r"^vllm:prefix_cache_(hits|queries)_total(?:\{[^}]*\})? (\S+)", re.MULTILINE)
_PAUSE_S: Final = 0.5
"""The server counts a step when it reports it, which may be after its last token was sent."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Tokens of all prompts so far."""

    queries: int
    """Looked for in the cache."""
    hits: int
    """Found there."""

    def __sub__(self, other: Counters) -> Counters:
        return Counters(self.queries - other.queries, self.hits - other.hits)


def parsed(metrics: str) -> Counters:
    """Read what ``/metrics`` says, all engines together."""
    sums = {"hits": 0.0, "queries": 0.0}
    for name, value in _COUNTER.findall(metrics):
        sums[name] += float(value)
    return Counters(round(sums["queries"]), round(sums["hits"]))


class CounterReader:
    """Reads a server's counters."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __call__(self) -> Counters:
        """Return them now."""
        import httpx2

        await asyncio.sleep(_PAUSE_S)
        async with httpx2.AsyncClient(timeout=60) as client:
            answer = await client.get(f"{self._url}/metrics")
        return parsed(answer.raise_for_status().text)
