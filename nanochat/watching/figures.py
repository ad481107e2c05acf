"""What follows from a run's history: its state, pace, what is left, the share of the peak, what is saved."""

from __future__ import annotations

import math
import platform
import statistics
from dataclasses import dataclass
from typing import Any, Literal

from nanochat.processes import is_alive
from nanochat.watching.events import Step, number
from nanochat.watching.history import RunHistory
from nanochat.watching.words import duration

StateName = Literal["running", "finished", "stopped", "died", "imported", "unknown"]

#: Steps over which the present pace is taken.
PACE_STEPS = 50
#: A process elsewhere, or a running one, is called silent after this, and after this many steps' time.
SILENT_SECONDS = 600.0
SILENT_STEPS = 30
#: Stretches of steps whose pace is compared, at most.
MAX_STRETCHES = 40


@dataclass(frozen=True)
class State:
    """Whether a run still goes on, and a sentence about it."""

    name: StateName
    text: str


def state(history: RunHistory, now: float) -> State:
    """Running, finished, stopped or died: from the last record, the process and the machine it ran on."""
    start = history.start
    if start is None:
        return State("imported", "imported, or trained by a version that kept no records")
    silence = max(0.0, now - (history.last_time or start.time))
    if history.end is not None:
        return State("finished", f"finished {duration(silence)} ago")
    if history.stop is not None:
        return _stopped(history, silence)
    pid, host = number(start.get("pid")), start.get("host")
    pace = measure_pace(history)
    patience = max(SILENT_SECONDS, SILENT_STEPS * pace.step_seconds if pace else 0.0)
    told = f"last record {duration(silence)} ago"
    if pid is None:
        name: StateName = "running" if silence < patience else "unknown"
        return State(name, f"{told}; its process was not recorded, so that is all that can be told")
    if host is not None and host != platform.node():
        if silence < patience:
            return State("running", f"running on {host}, {told}")
        return State("unknown", f"on {host}, which cannot be asked from here; {told}")
    if not is_alive(int(pid), start.time):
        lost = "" if history.step else ", before its first step was done"
        return State(
            "died", f"process {pid:.0f} is gone without a word: killed, crashed or out of memory{lost}; {told}"
        )
    if silence > patience:
        return State("running", f"process {pid:.0f} runs but is silent: {told}")
    return State("running", f"process {pid:.0f}, {told}")


def _stopped(history: RunHistory, silence: float) -> State:
    assert history.stop is not None
    reason, text = history.stop.get("reason"), history.stop.get("text")
    why = {
        "signal": "stopped by a signal, after saving",
        "not finite": "stopped at a loss that is not finite",
        "error": "stopped by an error",
    }.get(str(reason), f"stopped ({reason})")
    detail = f": {text}" if text and reason != "signal" else ""
    return State("stopped", f"{why} {duration(silence)} ago{detail}")


@dataclass(frozen=True)
class Pace:
    """How fast the latest steps of the latest start were; its first step, which may compile, does not count."""

    num_steps: int
    step_seconds: float
    tokens_per_second: float | None
    #: Half the distance between the 10th and the 90th percentile of the step times, as a share of their median.
    spread: float | None
    #: Slower than the fastest stretch of the same length in this start, as a share.
    slowdown: float | None

    @property
    def steadiness(self) -> str:
        """In words and per cent."""
        if self.spread is None:
            return "n/a (too few steps yet)"
        word = "steady" if self.spread < 0.02 else "fairly steady" if self.spread < 0.1 else "uneven"
        text = f"{word}: ±{self.spread:.1%} over the last {self.num_steps:,} steps"
        if self.slowdown is not None and self.slowdown > 0.05:
            text += f", {self.slowdown:.0%} slower than earlier in this start"
        return text


def measure_pace(history: RunHistory) -> Pace | None:
    """The present pace; None before anything was timed."""
    steps = history.latest_steps
    timed = [step for step in (steps[1:] or steps) if step.seconds]
    recent = timed[-PACE_STEPS:]
    if not recent:
        return None
    times = [step.seconds or 0.0 for step in recent]
    batch = _batch_tokens(history, recent)
    spread = None
    if len(times) >= 10:
        tenths = statistics.quantiles(times, n=10)
        spread = (tenths[-1] - tenths[0]) / 2 / statistics.median(times)
    mean = statistics.fmean(times)
    return Pace(len(recent), mean, batch / mean if batch else None, spread, _slowdown(timed))


def _slowdown(timed: list[Step]) -> float | None:
    """How much slower the median of the last stretch is than that of the fastest one before."""
    ends = range(len(timed), PACE_STEPS - 1, -PACE_STEPS)
    stretches = [timed[end - PACE_STEPS : end] for end in ends[:: 1 + len(ends) // MAX_STRETCHES]]
    if len(stretches) < 4:
        return None
    medians = [statistics.median(step.seconds or 0.0 for step in stretch) for stretch in stretches]
    return max(0.0, 1 - min(medians[2:]) / min(medians[:2]))  # one slow stretch alone says nothing


def _batch_tokens(history: RunHistory, recent: list[Step]) -> float | None:
    """Tokens of an update."""
    first, last = recent[0], recent[-1]
    if last.step > first.step and last.tokens is not None and first.tokens is not None:
        return (last.tokens - first.tokens) / (last.step - first.step)
    return history.start.total_batch_size if history.start else None


@dataclass(frozen=True)
class Remaining:
    """What is left of a run."""

    steps: int
    #: Pure training, at the present pace.
    training_seconds: float | None
    #: With evaluations, samples and saves taking the share that they took in this start.
    wall_seconds: float | None


def remaining(history: RunHistory) -> Remaining | None:
    """None when the number of steps is not known beforehand."""
    total = history.start.num_iterations if history.start else None
    if total is None:
        return None
    left, pace = max(0, total - history.step), measure_pace(history)
    if pace is None:
        return Remaining(left, None, None)
    training = left * pace.step_seconds
    return Remaining(left, training, training * _pause_factor(history))


def _pause_factor(history: RunHistory) -> float:
    """Wall time over training time since the first step of this start; at least 1."""
    steps = history.latest_steps
    if len(steps) < 2:
        return 1.0
    trained = sum(step.seconds or 0.0 for step in steps[1:])
    return max(1.0, (steps[-1].time - steps[0].time) / trained) if trained else 1.0


@dataclass(frozen=True)
class Utilization:
    """Model FLOPs done a second, and their share of the peak; each with the reason when it is not known."""

    flops_per_second: float | None
    share: float | None
    text: str


def utilization(history: RunHistory) -> Utilization:
    """MFU with its basis; never clamped: a share over 100 % tells that the basis is wrong."""
    start, pace = history.start, measure_pace(history)
    token_flops = start.number("flops_per_token") or start.number("plan", "flops_per_token") if start else None
    if start is None or token_flops is None:
        return Utilization(None, None, "n/a (the FLOPs of a token were not recorded)")
    if pace is None or pace.tokens_per_second is None:
        return Utilization(None, None, "n/a (no step was timed yet)")
    done = token_flops * pace.tokens_per_second
    teraflops = f"{done / 1e12:,.1f} TFLOP/s" if done >= 1e11 else f"{done / 1e9:,.1f} GFLOP/s"
    peak = start.number("peak_flops")
    device, dtype = start.get("device") or "this device", start.get("dtype") or "its dtype"
    if not peak:
        return Utilization(done, None, f"n/a (the peak of {device} in {dtype} is not known); {teraflops} done")
    share, basis = done / peak, f"{peak / 1e12:,.1f} TFLOP/s of {device} in {dtype}"
    if share > 1:
        text = f"{share:.1%} of {basis}: more than all of it, so that peak is the wrong basis; {teraflops} done"
        return Utilization(done, share, text)
    return Utilization(done, share, f"{share:.1%} of the {basis}; {teraflops} done")


def saved_steps(history: RunHistory) -> list[dict[str, Any]]:
    """The saves that are on the disk: folder, step, bytes, and whether it is a recovery save."""
    recorded = {str(save.get("folder")): save for save in history.saves}
    names = {path.parent.name for path in history.folder.glob("[!.]*/manifest.json")}
    found = []
    for name in sorted(names):
        save = recorded.get(name, {})
        digits = "".join(filter(str.isdigit, name))
        step = save.get("step", int(digits) if digits else None)
        num_bytes = save.get("bytes") or sum(path.stat().st_size for path in (history.folder / name).iterdir())
        recovery = bool(save.get("recovery")) or save.get("save_kind") == "recovery"
        found.append({"folder": name, "step": step, "bytes": num_bytes, "recovery": recovery})
    return sorted(found, key=lambda save: (save["step"] is None, save["step"]))


def non_finite_steps(history: RunHistory) -> int:
    """Updates whose loss was not finite, and those that training stopped before."""
    recorded = sum(1 for step in history.steps if step.loss is not None and not math.isfinite(step.loss))
    return recorded + sum(1 for stop in history.stops if stop.get("reason") == "not finite")
