"""The loop: occasions 0 … n around n updates.

At every step, before the update, the hooks see the model as it is after that many updates; after
the last update they see it once more. So n updates have n + 1 occasions, and whatever hooks do
(save, evaluate, sample) happens at a boundary between steps, in the order of the hooks. A stop that
was asked for happens at such a boundary too.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nanochat.errors import UserError
from nanochat.train.interrupt import Interruption, StopRequested
from nanochat.train.step import MicroBatch, StepRates, StepResult, Trainer


@dataclass
class LoopState:
    """Where a run stands; part of every checkpoint."""

    #: Updates done.
    step: int = 0
    #: Input tokens trained on.
    tokens: int = 0
    #: Loss in nats per target, smoothed over about ten steps; None before the first step.
    smooth_loss: float | None = None
    #: Time spent in steps, summed over all starts of the run.
    training_seconds: float = 0.0
    #: Lowest validation figure so far, in bits per byte, and its step.
    best_val_bpb: float | None = None
    best_val_step: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Occasion:
    """A boundary between steps, as the hooks see it."""

    step: int
    last: bool
    state: LoopState

    def due(self, every: int | None, *, at_start: bool) -> bool:
        """Whether something wanted every so many steps is wanted now.

        None is wanted at the last step alone, a positive number there too, 0 and below never.
        """
        if self.last:
            return every is None or every > 0
        if every is None or every <= 0:
            return False
        return at_start if self.step == 0 else self.step % every == 0


@dataclass(frozen=True)
class StepReport:
    """What one finished update tells."""

    #: Updates done, this one included.
    step: int
    result: StepResult
    rates: StepRates
    tokens: int
    seconds: float
    state: LoopState


Hook = Callable[[Occasion], None]
Reporter = Callable[[StepReport], None]


class StepSource(Protocol):
    """Where micro-batches come from, and when they end."""

    def finished(self, step: int) -> bool:
        """Whether the run is over after ``step`` updates."""
        ...

    def rates(self, step: int) -> StepRates:
        """Schedule of the update that follows ``step`` updates."""
        ...

    def next_step(self) -> Sequence[MicroBatch]:
        """The micro-batches of the next update."""
        ...

    def where(self) -> str:
        """The place in the data that the last micro-batches came from, for messages."""
        ...


def train(
    trainer: Trainer,
    source: StepSource,
    *,
    state: LoopState,
    hooks: Sequence[Hook],
    report: Reporter,
    synchronize: Callable[[], None],
    interruption: Interruption,
) -> bool:
    """Train until the source is finished or a stop is asked for, keeping ``state`` up to date.

    Returns:
        True when the source is finished, False when the loop was stopped before.

    Raises:
        NotFinite: at the first loss or gradient that is not finite; the parameters are those
            before that update.
    """
    while True:
        last = source.finished(state.step)
        try:
            occasion = Occasion(state.step, last, state)
            for hook in hooks:
                hook(occasion)
        except StopRequested:
            return False
        if last:
            return True
        if interruption.requested:
            return False
        synchronize()
        began = time.perf_counter()
        rates = source.rates(state.step)
        micro_batches = source.next_step()
        result = trainer.step(micro_batches, rates)
        synchronize()
        seconds = time.perf_counter() - began
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            raise NotFinite(state.step, result, source.where())
        tokens = sum(batch.inputs.size for batch in micro_batches)
        _advance(state, result, tokens, seconds)
        report(StepReport(state.step, result, rates, tokens, seconds, state))


class NotFinite(UserError):
    """A loss or gradient that is not a finite number, after ``step`` updates."""

    def __init__(self, step: int, result: StepResult, where: str) -> None:
        self.step = step
        what = "loss" if not math.isfinite(result.loss) else "gradient"
        value = result.loss if what == "loss" else result.grad_norm
        super().__init__(
            f"the {what} of the update after step {step} is {value}, on the batch at {where}: training was stopped"
            " before that update and the last checkpoint is kept; lower the learning rates or look at that text"
        )


def _advance(state: LoopState, result: StepResult, tokens: int, seconds: float) -> None:
    state.step += 1
    state.tokens += tokens
    state.training_seconds += seconds
    state.smooth_loss = result.loss if state.smooth_loss is None else 0.9 * state.smooth_loss + 0.1 * result.loss
