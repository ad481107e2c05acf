"""Folders that appear whole or not at all, whenever the process is killed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from nanochat.processes import is_alive

_LEFTOVER = re.compile(r"\.(.+)\.(tmp|old)-(\d+)")


@contextlib.contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Give an empty folder beside ``final`` to fill; at the end sync its files to the disk and rename it to ``final``.

    What lies at ``final`` is replaced only then; when the body raises it stays, and the new folder is removed.

    Raises:
        OSError: when the disk refuses.
    """
    temporary = final.parent / f".{final.name}.tmp-{os.getpid()}"
    try:
        temporary.mkdir()
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            _sync(path)
        _replace(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Remove what dead processes left of :func:`new_folder` in ``parent``; a folder only set aside is put back."""
    for path in parent.glob(".*"):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or _belongs_to_another(int(match[3])):
            continue
        if match[2] == "old" and not (parent / match[1]).exists():
            path.rename(parent / match[1])
        else:
            shutil.rmtree(path, ignore_errors=True)


def _replace(temporary: Path, final: Path) -> None:
    """Rename ``temporary`` to ``final``; a folder that is there is set aside first and removed afterwards."""
    aside = final.parent / f".{final.name}.old-{os.getpid()}"
    if final.exists():
        final.rename(aside)
    try:
        temporary.rename(final)
    except OSError:
        if aside.exists():
            aside.rename(final)
        raise
    _sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _belongs_to_another(pid: int) -> bool:
    """Whether a leftover is the work of another process that still runs.

    One of our own number was left by a process that had it before us: restarted containers reuse them.
    """
    return pid != os.getpid() and is_alive(pid)


def _sync(path: Path) -> None:
    """Force a file's bytes, or a folder's entries, to the disk."""
    with contextlib.suppress(PermissionError):  # Windows opens no folders
        handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
