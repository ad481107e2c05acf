"""How much memory this process holds; without torch, unlike the hardware room."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def resident_bytes() -> int | None:
    """Resident set of this process now, or where only that is known its peak; None where neither is."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return peak_resident_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int | None:
    """Peak resident set of this process; None where it is not known."""
    try:
        import resource
    except ImportError:  # Windows has none
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
