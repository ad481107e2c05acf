"""The loop: occasions 0 … n around n updates.

At every step, before the update, the hooks see the model as it is after that many updates; after
the last update they see it once more. So n updates have n + 1 occasions, and whatever hooks do
(save, evaluate, sample) happens at a boundary between steps, in the order of the hooks.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nanochat.errors import UserError
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
        """Whether something wanted every so many steps is wanted now; always at the last step."""
        if self.last:
            return every != 0
        if self.step == 0:
            return at_start and bool(every)
        return bool(every) and self.step % (every or 1) == 0


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


def train(
    trainer: Trainer,
    source: StepSource,
    *,
    state: LoopState,
    hooks: Sequence[Hook],
    report: Reporter,
    synchronize: Callable[[], None],
) -> LoopState:
    """Train until the source is finished; returns the state, which it has kept up to date.

    Raises:
        UserError: at the first loss that is not finite; the parameters are those before that step.
    """
    while True:
        last = source.finished(state.step)
        occasion = Occasion(state.step, last, state)
        for hook in hooks:
            hook(occasion)
        if last:
            return state
        synchronize()
        began = time.perf_counter()
        rates = source.rates(state.step)
        micro_batches = source.next_step()
        result = trainer.step(micro_batches, rates)
        synchronize()
        seconds = time.perf_counter() - began
        if not math.isfinite(result.loss):
            raise UserError(
                f"the loss of step {state.step} is {result.loss}: training has diverged and was stopped"
                " before the update; lower the learning rates and start again from the last checkpoint"
            )
        tokens = sum(batch.inputs.size for batch in micro_batches)
        _advance(state, result, tokens, seconds)
        report(StepReport(state.step, result, rates, tokens, seconds, state))


def _advance(state: LoopState, result: StepResult, tokens: int, seconds: float) -> None:
    state.step += 1
    state.tokens += tokens
    state.training_seconds += seconds
    state.smooth_loss = result.loss if state.smooth_loss is None else 0.9 * state.smooth_loss + 0.1 * result.loss
