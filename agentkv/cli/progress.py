"""Showing progress: bars on a terminal, plain lines elsewhere; on standard error always."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichBars
from rich.text import Text

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


class TokenBars:
    """Progress over the tokens of one text after the other: a bar on a terminal, nothing elsewhere.

    Shown while it is used as a context manager.
    """

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        shows = console.is_terminal
        self._bars = RichBars(
            *columns, console=console, redirect_stdout=False, transient=True, disable=not shows
        )
        self._current: TaskID | None = None

    def begin(self, title: str) -> None:
        """Put the bar of a text in place of the one before."""
        if self._current is not None:
            self._bars.remove_task(self._current)
        self._current = self._bars.add_task(escape(title), total=None)

    def __call__(self, done: int, total: int) -> None:
        """Show how many of its tokens are done."""
        if self._current is not None:
            self._bars.update(self._current, completed=done, total=total)

    def say(self, line: str) -> None:
        """Print a line on standard output, above the bar if both are on the terminal."""
        if self._bars.disable or not sys.stdout.isatty():
            print(line, flush=True)
        else:
            self._bars.console.print(Text(line), soft_wrap=True, highlight=False)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


def megabytes(count: int) -> str:
    """Write a number of bytes for people."""
    return f"{count / 1e6:.0f} MB"
