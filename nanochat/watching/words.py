"""Numbers as people read them."""

from __future__ import annotations

import time

MINUTE_SECONDS = 60.0
HOUR_SECONDS = 3600.0
DAY_SECONDS = 86400.0


def duration(seconds: float) -> str:
    """``42 s``, ``12 min 5 s``, ``16.8 h``, ``62.3 h (2.6 days)``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < MINUTE_SECONDS:
        return f"{seconds:.0f} s"
    if seconds < HOUR_SECONDS:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours = f"{seconds / HOUR_SECONDS:.1f} h"
    return hours if seconds < 2 * DAY_SECONDS else f"{hours} ({seconds / DAY_SECONDS:.1f} days)"


def moment(unix_seconds: float) -> str:
    """A time of day here, with its zone: ``2026-06-04 03:29 UTC``."""
    return time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(unix_seconds)).rstrip()


def count(number: float) -> str:
    """``812``, ``55,660``, ``887 M``, ``2.34 B``: three figures from a million on."""
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(number) >= 0.9995 * scale:
            scaled = number / scale
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{scaled:.{digits}f} {letter}"
    return f"{number:,.0f}"


def size(num_bytes: float) -> str:
    """``512 bytes``, ``3.2 MB``, ``374 GB``, in powers of ten."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= 0.9995 * scale:
            scaled = num_bytes / scale
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {unit}"
    return f"{num_bytes:.0f} bytes"


def times(number: float) -> str:
    """``once``, ``twice``, ``2.3 times``."""
    if abs(number - 1) < 0.05:
        return "once"
    return "twice" if abs(number - 2) < 0.05 else f"{number:.1f} times"
