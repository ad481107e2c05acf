"""Stopping politely: a first signal asks the loop to stop between two steps, a second one stops at once.

A lost terminal stops nothing: a run started by hand over a connection that breaks goes on.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: Signals that ask to stop, by the names of those that the platform has.
ASKING = ("SIGINT", "SIGTERM")
#: Signals of a lost terminal.
IGNORED = ("SIGHUP",)


class StopRequested(Exception):
    """Raised inside something long (a validation) that should give way to a stop."""


class Interruption:
    """Whether a stop was asked for."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        #: Name of the signal that asked, None while none has.
        self.signal_name: str | None = None

    @property
    def requested(self) -> bool:
        return self.signal_name is not None

    def check(self) -> None:
        """Raise :class:`StopRequested` when a stop was asked for."""
        if self.requested:
            raise StopRequested

    def ask(self, name: str) -> None:
        """Ask to stop; asking a second time raises :class:`KeyboardInterrupt`."""
        if self.requested:
            raise KeyboardInterrupt
        self.signal_name = name
        self._say(f"{name}: finishing this step, then saving; once more stops at once")

    @contextmanager
    def listening(self) -> Iterator[Interruption]:
        """Handle signals while the block runs, as they were handled before it afterwards.

        Only the main thread may handle signals: in another one nothing is changed.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before: list[tuple[int, Any]] = []

        def handle(number: int, frame: FrameType | None) -> None:
            self.ask(signal.Signals(number).name)

        try:
            for names, handler in ((ASKING, handle), (IGNORED, signal.SIG_IGN)):
                for name in names:
                    number = getattr(signal, name, None)
                    if number is not None:
                        before.append((number, signal.signal(number, handler)))
            yield self
        finally:
            for number, handler in before:
                signal.signal(number, handler)
