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
    """Appends records and log lines of one run to its folder.

    A disk that refuses them does not end the run: training is worth more than its log.

    Attributes:
        failure: the first refusal, in words; None while there was none.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.failure: str | None = None
        _end_torn_line(folder / RECORDS_NAME)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record; each is flushed, so a reader beside us sees it at once."""
        record = {"kind": kind, "time": round(time.time(), 3), **fields}
        self._append(RECORDS_NAME, json.dumps(record) + "\n")

    def log(self, text: str) -> None:
        """Append one timestamped plain line to ``log.txt``."""
        self._append(LOG_NAME, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def _append(self, name: str, text: str) -> None:
        try:
            with (self.folder / name).open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            if self.failure is None:
                self.failure = f"{self.folder / name} cannot be written ({error.strerror}); training goes on without it"


def _end_torn_line(path: Path) -> None:
    """End a line that a killed process left unfinished, so that the next record stands on its own."""
    if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


def read(folder: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """The records of a run, oldest first; lines that are torn or still being written are left out."""
    path = folder / RECORDS_NAME
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and (kind is None or record.get("kind") == kind):
                yield record
