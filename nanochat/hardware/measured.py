"""What was measured of this machine, remembered in the base folder: measured once, the same at every start."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from nanochat.paths import base_folder

FILE_NAME = "machine.json"


def remembered(key: str, measure: Callable[[], float]) -> float:
    """The figure kept under ``key``, else a measurement, which is then kept where the base folder can be written."""
    path = base_folder() / FILE_NAME
    known = _read(path)
    if key not in known:
        known[key] = measure()
        _write(path, known)
    return known[key]


def keep(figures: Mapping[str, float]) -> Path | None:
    """Keep these figures too, in place of older ones of the same keys; the file, or None when it cannot be written."""
    path = base_folder() / FILE_NAME
    known = _read(path) | dict(figures)
    _write(path, known)
    return path if _read(path) == known else None


def _read(path: Path) -> dict[str, float]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    usable = isinstance(known, dict) and all(isinstance(value, (int, float)) for value in known.values())
    return known if usable else {}


def _write(path: Path, known: dict[str, float]) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # a folder that cannot be written only costs a measurement at every start
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, path)
