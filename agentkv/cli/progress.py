"""Showing progress: bars on a terminal, plain lines elsewhere; on standard error always."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichBars

from agentkv.models.progress import Progress, Step


class PlainProgress:
    """One line as each step begins."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title

    def begin(self, step: Step, total_bytes: int | None = None) -> None:
        """Print the step."""
        size = "" if total_bytes is None else f" ({megabytes(total_bytes)})"
        line = f"{self._title}: {step.value}{size}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def advance(self, count: int) -> None:
        """Print nothing: lines that come by the megabyte help nobody."""


class BarProgress:
    """One bar per step; a step of unknown size gets a moving one."""

    def __init__(self, bars: RichBars) -> None:
        self._bars = bars
        self._current: TaskID | None = None

    def begin(self, step: Step, total_bytes: int | None = None) -> None:
        """Finish the bar before and open the next."""
        self.finish()
        size = "" if total_bytes is None else megabytes(total_bytes)
        self._current = self._bars.add_task(step.value, total=total_bytes, size=size)

    def advance(self, count: int) -> None:
        """Move the bar."""
        if self._current is not None:
            self._bars.advance(self._current, count)

    def finish(self) -> None:
        """Show the current bar as full."""
        if self._current is not None:
            self._bars.update(self._current, total=1, completed=1)


@contextmanager
def shown(title: str) -> Iterator[Progress]:
    """Show the progress of one operation on the model `title` while the block runs."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield PlainProgress(console, title)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[size]}"),
        TimeElapsedColumn(),
    )
    with RichBars(*columns, console=console) as bars:
        progress = BarProgress(bars)
        yield progress
        progress.finish()


def megabytes(count: int) -> str:
    """Write a number of bytes for people."""
    return f"{count / 1e6:.0f} MB"
