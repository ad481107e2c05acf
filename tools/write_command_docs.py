"""Writes docs/commands.md from the commands themselves: ``python tools/write_command_docs.py``.

A test fails when the file and the commands differ.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"


def text() -> str:
    """The page: the help of ``nanochat`` and of every subcommand."""
    from nanochat.commands import COMMANDS

    parts = ["# Commands\n", "Made by `python tools/write_command_docs.py` from the commands' own help.\n"]
    for words in ([], *([name] for name in COMMANDS)):
        title = " ".join(["nanochat", *words])
        parts.append(f"## {title}\n\n```\n{_help(words)}\n```\n")
    return "\n".join(parts)


def _help(words: list[str]) -> str:
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-m", "nanochat", *words, "--help"],
        capture_output=True,
        encoding="utf-8",
        env=environment,
        check=True,
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    print(f"wrote {FILE}")
