"""``nanochat runs``: every run in the base folder. Loads no torch."""

from __future__ import annotations

import sys
import time
from typing import Any

from nanochat.context import Context, Result
from nanochat.watching.configs import RunsConfig
from nanochat.watching.detach import all_detached
from nanochat.watching.figures import measure_pace, remaining, saved_steps, state
from nanochat.watching.history import RunHistory, find_runs, read_history
from nanochat.watching.render import render_table
from nanochat.watching.text_use import text_use
from nanochat.watching.words import DAY_SECONDS, duration, moment, size

COLUMNS = ("run", "source", "state", "step", "done", "last bpb", "best", "left", "saved", "last sign")
NUMBERS = frozenset({"step", "done", "last bpb", "best", "left", "saved", "last sign"})


def run(config: RunsConfig, context: Context) -> Result:
    """List every run, the one that told of itself last first, and what was started detached."""
    now = time.time()
    runs = [_values(read_history(place.folder), place.last_written, now) for place in find_runs(context.base)]
    detached = [
        {"name": each.name, "running": each.is_running(), "pid": each.pid, "log": str(each.log)}
        for each in all_detached(context.base)
    ]
    if not runs:
        text = f"there is no run in {context.base}: start one with `nanochat pretrain`"
    else:
        rows = [_row(values, now) for values in runs]
        text = render_table(COLUMNS, rows, colours=sys.stdout.isatty(), right=NUMBERS)
        if any(values["figures_differ"] for values in runs):
            text += "\n* measured on several texts in turn: best of the last one"
    for each in detached:
        goes = f"runs as process {each['pid']}" if each["running"] else "has ended"
        text += f"\ndetached {each['name']} {goes}: nanochat attach {each['name']}"
    return Result({"runs": runs, "detached": detached}, text)


def _values(history: RunHistory, last_written: float, now: float) -> dict[str, Any]:
    pace, left, saves = measure_pace(history), remaining(history), saved_steps(history)
    known = [v for v in history.validations if v.val_bpb is not None]
    best = history.best_validation(known[-1].segment) if known else None
    steps = [save["step"] for save in saves if save["step"] is not None]
    return {
        "tag": history.tag,
        "source": history.source,
        "folder": str(history.folder),
        "state": state(history, now).name,
        "step": history.step if history.starts else max(steps, default=0),
        "num_iterations": history.start.num_iterations if history.start else None,
        "val_bpb": known[-1].val_bpb if known else None,
        "best_val_bpb": best.val_bpb if best else None,
        "best_val_step": best.step if best else None,
        "figures_differ": bool(known) and known[-1].segment > 0,
        "tokens": text_use(history).trained,
        "tokens_per_second": pace.tokens_per_second if pace else None,
        "remaining_seconds": left.wall_seconds if left else None,
        "saved_bytes": sum(save["bytes"] for save in saves),
        "last_time": history.last_time or last_written,
    }


def _row(values: dict[str, Any], now: float) -> list[str]:
    total, left = values["num_iterations"], values["remaining_seconds"]
    running = values["state"] == "running"
    star = "*" if values["figures_differ"] else ""
    return [
        values["tag"],
        values["source"],
        values["state"],
        f"{values['step']:,}",
        f"{values['step'] / total:.0%}" if total else "n/a",
        _figure(values["val_bpb"]),
        _figure(values["best_val_bpb"]) + star,
        "n/a" if left is None else duration(left).split(" (")[0] if running else "-",
        size(values["saved_bytes"]),
        _since(values["last_time"], now),
    ]


def _figure(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"


def _since(then: float, now: float) -> str:
    """How long ago, for two days; then the day."""
    return f"{duration(max(0.0, now - then))} ago" if now - then < 2 * DAY_SECONDS else moment(then)[:10]
