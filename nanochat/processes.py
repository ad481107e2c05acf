"""Whether a process still runs: asked of its number, without disturbing it."""

from __future__ import annotations

import os
import time
from pathlib import Path

#: A process that began this much after it was noted down is still believed to be that one: clocks are set now and then.
SLACK_SECONDS = 60.0


def is_alive(pid: int, noted_at: float | None = None) -> bool:
    """Whether the process ``pid`` runs; with ``noted_at``, whether it is still the one that ran at that time.

    A process that has ended but was not waited for does not run. Where a process's age cannot be
    told, one of that number is believed to be the same.
    """
    if not 0 < pid < 2**31:  # no process of its own: 0 and below mean groups of them
        return False
    if os.name == "nt":
        return _is_alive_on_windows(pid)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it runs, and is another user's
    state, began = _linux_process(pid)
    if state in ("Z", "X"):
        return False
    return noted_at is None or began is None or began <= noted_at + SLACK_SECONDS


def _linux_process(pid: int) -> tuple[str | None, float | None]:
    """State letter and unix time of birth of a process, from /proc; None where that cannot be told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        age = uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return fields[0], time.time() - age if age >= 0 else None  # some containers hide how long the machine is up
    except (OSError, ValueError, IndexError):
        return None, None


def _is_alive_on_windows(pid: int) -> bool:
    """Asked of the kernel: the signal that asks elsewhere would end the process there."""
    import ctypes

    query_limited_information, still_active = 0x1000, 259
    kernel = getattr(ctypes, "windll").kernel32  # noqa: B009  (absent elsewhere)
    handle = kernel.OpenProcess(query_limited_information, False, pid)
    if not handle:
        return False
    code = ctypes.c_ulong()
    asked = kernel.GetExitCodeProcess(handle, ctypes.byref(code))
    kernel.CloseHandle(handle)
    return bool(asked) and code.value == still_active
