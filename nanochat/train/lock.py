"""One process trains a run at a time: a second one that is started under the same tag is refused."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nanochat.errors import UserError
from nanochat.processes import is_alive

FILE_NAME = ".lock"
#: A lock of another machine (on a shared disk) whose owner has not touched it for so long is a dead one's.
SILENT_SECONDS = 300.0
#: How often the owner touches it at most.
TOUCH_SECONDS = 30.0


@dataclass
class RunLock:
    """The right to write into a run's folder."""

    path: Path
    _touched: float = 0.0

    def touch(self) -> None:
        """Show that the owner lives; cheap to call often."""
        now = time.monotonic()
        if now - self._touched >= TOUCH_SECONDS:
            self._touched = now
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def release(self) -> None:
        with contextlib.suppress(OSError):  # on a disk that refuses, the dead owner tells the same
            self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[RunLock]:
    """Hold the lock of a run's folder while the block runs.

    Raises:
        UserError: when another process that lives holds it.
    """
    lock = acquire(folder)
    try:
        yield lock
    finally:
        lock.release()


def acquire(folder: Path) -> RunLock:
    """Take the lock of a run's folder, from a dead owner too; see :func:`locked`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    content = json.dumps({"pid": os.getpid(), "host": platform.node(), "time": time.time()})
    for _ in range(2):
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(content)
        except FileExistsError:
            if (owner := _living_owner(path)) is not None:
                raise UserError(
                    f"run {folder.name} is being trained by {owner}: wait for it, or choose another --model-tag"
                ) from None
            path.unlink(missing_ok=True)
        else:
            return RunLock(path)
    raise UserError(f"run {folder.name} was taken by another process just now: choose another --model-tag")


def _living_owner(path: Path) -> str | None:
    """Who holds a lock, if that process may still run."""
    try:
        age = time.time() - path.stat().st_mtime
        owner = json.loads(path.read_text(encoding="utf-8"))
        pid, host, since = int(owner["pid"]), str(owner["host"]), float(owner["time"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return f"a process that is just starting (see {path})" if age < 5 else None
    if host != platform.node():
        return f"process {pid} on {host}" if age < SILENT_SECONDS else None
    return f"process {pid}" if pid != os.getpid() and is_alive(pid, since) else None
