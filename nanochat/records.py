"""The run's machine-readable log: one JSON object a line, and ``log.txt`` beside it for ``tail -f``.

Written always, whatever else watches the run; status and report read it back.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORDS_NAME = "records.jsonl"
LOG_NAME = "log.txt"


class Records:
    """Appends records and log lines of one run to its folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record; each is flushed, so a reader beside us sees it at once."""
        record = {"kind": kind, "time": round(time.time(), 3), **fields}
        with (self.folder / RECORDS_NAME).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def log(self, text: str) -> None:
        """Append one timestamped plain line to ``log.txt``."""
        with (self.folder / LOG_NAME).open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


def read(folder: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """The records of a run, oldest first; a last line that is still being written is left out."""
    path = folder / RECORDS_NAME
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            record = json.loads(line)
            if kind is None or record["kind"] == kind:
                yield record
