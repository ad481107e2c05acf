"""How a run tells of itself: records and log file always, progress for whoever watches.

Hooks made here share the run's folder; the loop calls them between steps, in order: save first,
so that nothing which fails afterwards costs the work before it, then evaluate, then sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanochat.records import Records
from nanochat.terminal import Progress, Terminal
from nanochat.train.interrupt import StopRequested
from nanochat.train.loop import Hook, Occasion, StepReport
from nanochat.watching import health
from nanochat.watching.history import read_history


class RunLog:
    """One run's records, log lines and messages."""

    def __init__(self, records: Records, terminal: Terminal) -> None:
        self.records, self.terminal = records, terminal
        self._noticed: set[str] = set()
        #: The last validation figure, in bits per byte; None before the first.
        self.last_val_bpb: float | None = None

    def say(self, text: str) -> None:
        """A line for the person and the log file."""
        self.records.log(text)
        self.terminal.say(text)

    def tell_of_failure(self) -> None:
        """Say once that the records or the log cannot be written."""
        if self.records.failure is not None and "records" not in self._noticed:
            self._noticed.add("records")
            self.terminal.say(self.records.failure)

    def notice(self, step: int, name: str, text: str) -> None:
        """Say that something looks wrong; of each name once a run."""
        if name not in self._noticed:
            self._noticed.add(name)
            self.records.write("notice", step=step, name=name, text=text)
            self.say(f"step {step}: {text}")

    def step_reporter(
        self,
        progress: Progress,
        num_steps: int | None,
        *,
        done: Callable[[int], int] = lambda step: step,
        data: Callable[[], Mapping[str, Any]] = dict,
        memory: Callable[[], int | None] = lambda: None,
        alive: Callable[[], None] = lambda: None,
    ) -> Callable[[StepReport], None]:
        """A reporter for the loop: a record and a log line each step, and the progress.

        Args:
            num_steps: how many there will be, where that is known.
            done: how far the progress has come after so many steps.
            data: where the data stands: position, tokens read and lost.
            memory: peak memory so far in bytes.
            alive: told at each step, as a sign of life.
        """

        def report(step: StepReport) -> None:
            alive()
            rate = step.tokens / step.seconds
            self.records.write(
                "step",
                step=step.step,
                loss=step.result.loss,
                smooth_loss=step.state.smooth_loss,
                lr_multiplier=step.rates.lr_multiplier,
                grad_norm=step.result.grad_norm,
                tokens=step.state.tokens,
                seconds=step.seconds,
                training_seconds=step.state.training_seconds,
                memory_bytes=memory(),
                **data(),
            )
            of = f"/{num_steps}" if num_steps is not None else ""
            note = f"loss {step.result.loss:.4f}  {rate:,.0f} tokens/s"
            self.records.log(f"step {step.state.step}{of}  {note}  rate x {step.rates.lr_multiplier:.3f}")
            progress.update(done(step.state.step), note)
            self.tell_of_failure()

        return report


def guarded(name: str, hook: Hook, log: RunLog) -> Hook:
    """A hook whose failure is told and does not end the training."""

    def safe(occasion: Occasion) -> None:
        try:
            hook(occasion)
        except StopRequested:
            raise
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            log.notice(
                occasion.step, f"{name} failed", f"{name} failed ({type(error).__name__}: {first}); training goes on"
            )

    return safe


def validate_hook(measure: Callable[[], float | None], every: int | None, log: RunLog, text: str | None = None) -> Hook:
    """Validation bits per byte at step 0, at intervals and at the end; keeps the best in the state.

    Args:
        text: fingerprint of what is measured, since figures on other text do not compare.
    """

    def hook(occasion: Occasion) -> None:
        if not occasion.due(every, at_start=True):
            return
        value = measure()
        if value is not None and not math.isfinite(value):
            log.notice(occasion.step, "validation not finite", f"the validation is {value}: training has diverged")
            value = None
        state = occasion.state
        if value is not None and (state.best_val_bpb is None or value < state.best_val_bpb):
            state.best_val_bpb, state.best_val_step = value, occasion.step
        log.last_val_bpb = value
        log.records.write("validation", step=occasion.step, val_bpb=value, tokens=state.tokens, data=text)
        shown = "n/a" if value is None else f"{value:.4f} bits per byte"
        log.say(f"step {occasion.step}: validation {shown}")

    return hook


def sample_hook(continue_text: Callable[[str], str], prompts: Sequence[str], every: int | None, log: RunLog) -> Hook:
    """Samples at intervals and at the end, not before the first step."""

    def hook(occasion: Occasion) -> None:
        if not prompts or not occasion.due(every, at_start=False):
            return
        for prompt in prompts:
            text = continue_text(prompt)
            log.records.write("sample", step=occasion.step, prompt=prompt, text=text)
            log.say(f"step {occasion.step}: {prompt!r} → {text!r}")

    return hook


def health_hook(every: int | None, log: RunLog) -> Hook:
    """Say what looks wrong with the run so far, at the same steps as validations; each thing once."""

    def hook(occasion: Occasion) -> None:
        if occasion.due(every, at_start=False):
            for found in health.new_notices(read_history(log.records.folder)):
                log.notice(occasion.step, found.name, found.text)

    return hook
