"""Commands that go on without their terminal: started in a session of their own, followed by their log.

A detached command is known by its name: ``<base>/detached/<name>.json`` holds its process, and
``<name>.log`` what it says, after what earlier ones of that name said.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nanochat.errors import UserError
from nanochat.processes import is_alive

FOLDER_NAME = "detached"
#: How often a log is looked at while it is followed.
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Detached:
    """A command that was started detached."""

    name: str
    pid: int
    log: Path
    #: What it was told, without the program's name.
    arguments: tuple[str, ...]
    #: When, in unix seconds.
    time: float
    #: Where in the log its own lines begin, in bytes.
    log_offset: int

    def is_running(self) -> bool:
        return is_alive(self.pid, self.time)


def start_detached(arguments: Sequence[str], base: Path, name: str) -> Detached:
    """Run ``nanochat <arguments>`` in a session of its own and return at once.

    It hears nothing of the terminal that started it, neither its keys nor its end. Its output goes to
    ``<base>/detached/<name>.log``.

    Raises:
        UserError: when one of that name still runs, the name cannot be a file's, or the folder cannot be written.
    """
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(f"a detached run cannot be named {name!r}: use letters, digits, '-', '_' and '.'")
    earlier = find_detached(base, name)
    if earlier is not None and earlier.is_running():
        raise UserError(
            f"{name} is still running (process {earlier.pid}): follow it with `nanochat attach {name}`,"
            f" or stop it with `kill {earlier.pid}` first"
        )
    folder = base / FOLDER_NAME
    log = folder / f"{name}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            offset = output.tell()
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            output.write(f"{stamp} nanochat {' '.join(arguments)}\n".encode())
            output.flush()
            pid = _spawn([sys.executable, "-m", "nanochat", *arguments], output.fileno(), base)
        detached = Detached(name, pid, log, tuple(arguments), time.time(), offset)
        beside = folder / f".{name}.json.tmp"
        beside.write_text(json.dumps(asdict(detached), default=str) + "\n", encoding="utf-8")
        os.replace(beside, folder / f"{name}.json")
    except OSError as error:
        raise UserError(f"{name} cannot be started from {folder} ({error.strerror}): check it") from None
    return detached


def _spawn(command: Sequence[str], output: int, base: Path) -> int:
    """Start a process without terminal, group or input of ours; returns its id."""
    environment = {**os.environ, "NANOCHAT_BASE_DIR": str(base.resolve()), "PYTHONUNBUFFERED": "1"}
    flags = getattr(subprocess, "DETACHED_PROCESS", 0) | getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # ignored on Windows, where the flags say the same
        creationflags=flags,
    )
    process.returncode = 0  # it is not ours to wait for: no warning when the object goes
    return process.pid


def find_detached(base: Path, name: str) -> Detached | None:
    """What was last started under ``name``; None when nothing was."""
    try:
        values = json.loads((base / FOLDER_NAME / f"{name}.json").read_text(encoding="utf-8"))
        return Detached(
            name=str(values["name"]),
            pid=int(values["pid"]),
            log=Path(values["log"]),
            arguments=tuple(map(str, values["arguments"])),
            time=float(values["time"]),
            log_offset=int(values["log_offset"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def all_detached(base: Path) -> list[Detached]:
    """Everything that was started detached, the latest first."""
    found = [find_detached(base, path.stem) for path in (base / FOLDER_NAME).glob("[!.]*.json")]
    return sorted((each for each in found if each is not None), key=lambda each: each.time, reverse=True)


def follow(detached: Detached, poll_seconds: float = POLL_SECONDS) -> Iterator[str]:
    """Yield what a detached command has said and says, until it ends."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with detached.log.open("rb") as file:
        file.seek(detached.log_offset)
        while True:
            running = detached.is_running()  # asked first: what it says last is read after it has ended
            while block := file.read(1 << 16):
                yield decoder.decode(block)
            if not running:
                return
            time.sleep(poll_seconds)
