"""What a person sees while something works: on stderr, so that stdout holds results alone.

On a terminal: short lines and progress bars. Elsewhere: plain timestamped lines, no colours.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """How far a task has come."""

    def update(self, done: int, note: str = "") -> None: ...


class Terminal:
    """Says lines and shows progress on stderr.

    Args:
        interval_seconds: without a terminal, progress lines are at least this far apart.
    """

    def __init__(self, interval_seconds: float = 10.0) -> None:
        self.interval_seconds = interval_seconds
        self.interactive = sys.stderr.isatty()
        self._bar: _Bar | None = None

    def say(self, text: str) -> None:
        """Print one line; above the bar, when there is one."""
        if not self.interactive:
            stamp = time.strftime("%H:%M:%S")
            for line in text.splitlines() or [""]:
                print(f"{stamp} {line}", file=sys.stderr, flush=True)
        elif self._bar is not None:
            self._bar.print_above(text)
        else:
            print(text, file=sys.stderr, flush=True)

    @contextmanager
    def progress(self, title: str, total: int, start: int = 0) -> Iterator[Progress]:
        """Show how far a task of ``total`` parts has come while the block runs."""
        if not self.interactive or self._bar is not None:
            yield _Lines(self, title, total)
            return
        with _Bar(title, total, start) as bar:
            self._bar = bar
            try:
                yield bar
            finally:
                self._bar = None


class _Lines:
    """Progress as plain lines, the first and last always, others at intervals."""

    def __init__(self, terminal: Terminal, title: str, total: int) -> None:
        self.terminal, self.title, self.total = terminal, title, total
        self._next = 0.0

    def update(self, done: int, note: str = "") -> None:
        now = time.monotonic()
        if now < self._next and done < self.total:
            return
        self._next = now + self.terminal.interval_seconds
        share = f" ({done / self.total:.1%})" if self.total else ""
        self.terminal.say(f"{self.title} {done:,}/{self.total:,}{share}{'  ' + note if note else ''}")


class _Bar:
    """Progress as a bar; rich is imported only when one is shown."""

    def __init__(self, title: str, total: int, start: int) -> None:
        from rich import progress
        from rich.console import Console

        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[note]}"),
            console=Console(file=sys.stderr),
        )
        self._task = self._progress.add_task(title, total=total, completed=start, note="")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, done: int, note: str = "") -> None:
        self._progress.update(self._task, completed=done, note=note)

    def print_above(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)
