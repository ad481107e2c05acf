"""How a run tells of itself: records and log file always, progress for whoever watches.

Hooks made here share the run's folder; the loop calls them between steps, in order: save first,
so that nothing which fails afterwards costs the work before it, then evaluate, then sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nanochat.records import Records
from nanochat.terminal import Progress, Terminal
from nanochat.train.loop import Hook, Occasion, StepReport


class RunLog:
    """One run's records, log lines and messages."""

    def __init__(self, records: Records, terminal: Terminal) -> None:
        self.records, self.terminal = records, terminal

    def say(self, text: str) -> None:
        """A line for the person and the log file."""
        self.records.log(text)
        self.terminal.say(text)

    def step_reporter(
        self, progress: Progress, num_steps: int | None, done: Callable[[int], int] = lambda step: step
    ) -> Callable[[StepReport], None]:
        """A reporter for the loop: a record and a log line each step, and the progress.

        Args:
            num_steps: how many there will be, where that is known.
            done: how far the progress has come after so many steps.
        """

        def report(step: StepReport) -> None:
            rate = step.tokens / step.seconds
            self.records.write(
                "step",
                step=step.step,
                loss=step.result.loss,
                smooth_loss=step.state.smooth_loss,
                lr_multiplier=step.rates.lr_multiplier,
                tokens=step.state.tokens,
                seconds=step.seconds,
            )
            of = f"/{num_steps}" if num_steps is not None else ""
            note = f"loss {step.result.loss:.4f}  {rate:,.0f} tokens/s"
            self.records.log(f"step {step.state.step}{of}  {note}  rate x {step.rates.lr_multiplier:.3f}")
            progress.update(done(step.state.step), note)

        return report


def save_hook(save: Callable[[Occasion], None], every: int | None) -> Hook:
    """Save at intervals and always at the end, never before the first step."""

    def hook(occasion: Occasion) -> None:
        if occasion.last or occasion.due(every, at_start=False):
            save(occasion)

    return hook


def validate_hook(measure: Callable[[], float | None], every: int | None, log: RunLog) -> Hook:
    """Validation bits per byte at step 0, at intervals and at the end; keeps the best in the state."""

    def hook(occasion: Occasion) -> None:
        if not occasion.due(every, at_start=True):
            return
        value = measure()
        state = occasion.state
        if value is not None and (state.best_val_bpb is None or value < state.best_val_bpb):
            state.best_val_bpb, state.best_val_step = value, occasion.step
        log.records.write("validation", step=occasion.step, val_bpb=value, tokens=state.tokens)
        shown = "n/a (no target stands for a byte)" if value is None else f"{value:.4f} bits per byte"
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
