"""One optimizer step: Σ token loss ÷ number of targets, over all micro-batches together.

The targets are counted on the host before the first backward, so the loss is scaled once and every
target weighs the same, however the micro-batches share them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanochat.errors import UserError
from nanochat.model.gpt import GPT
from nanochat.optim.optimizer import Optimizer

Losses = Callable[[Tensor, Tensor], Tensor]


class MicroBatch(Protocol):
    """Token ids and what should follow each of them; a target of -1 is no target."""

    @property
    def inputs(self) -> NDArray[np.int64]: ...

    @property
    def targets(self) -> NDArray[np.int64]: ...


@dataclass(frozen=True)
class StepRates:
    """What the schedule says for one step."""

    lr_multiplier: float
    muon_momentum: float
    muon_weight_decay: float


@dataclass(frozen=True)
class StepResult:
    """What an update came from.

    Attributes:
        loss: mean, in nats per target.
        num_targets: how many targets there were.
        grad_norm: of all gradients together, before anything is done with them.
    """

    loss: float
    num_targets: int
    grad_norm: float


class Trainer:
    """A model with its optimizer, and the way its losses are computed here.

    Args:
        compile_mode: ``off`` computes plainly; ``on`` compiles and fails when that fails; ``auto``
            compiles, and goes on uncompiled when that fails at the first batch.
        obstacle: why compiling cannot work on this device, or None.
        compile_cache: folder for what the compiler makes, so that the next start is quicker.
        say: told in one line when ``auto`` goes on uncompiled.

    Raises:
        UserError: for ``on`` when there is an obstacle.
    """

    def __init__(
        self,
        model: GPT,
        optimizer: Optimizer,
        device: torch.device,
        *,
        compile_mode: str = "off",
        obstacle: str | None = None,
        compile_cache: Path | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.compile_mode = compile_mode
        self._say = say
        self._losses: Losses = model.losses
        #: Whether a compiled graph may still fail for the first time.
        self._untried = False
        if compile_mode == "on" and obstacle:
            raise UserError(f"the model cannot be compiled here: {obstacle}; use --compile auto or off")
        if compile_mode == "auto" and obstacle:
            say(f"not compiled, steps take longer: {obstacle}")
        elif compile_mode != "off":
            if compile_cache is not None:
                os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compile_cache))
            self._losses = torch.compile(model.losses, dynamic=False)
            self._untried = True

    @property
    def compiled(self) -> bool:
        return self._losses != self.model.losses

    def losses(self, inputs: NDArray[np.int64], targets: NDArray[np.int64]) -> Tensor:
        """Token losses (B, T) of a batch without touching gradients, detached.

        The graph of training serves here too (with gradients enabled, then dropped), so a
        validation between steps compiles nothing of its own.
        """
        x, y = to_device(inputs, self.device), to_device(targets, self.device)
        return self._attempt(lambda: self._losses(x, y).detach())

    def step(self, micro_batches: Sequence[MicroBatch], rates: StepRates) -> StepResult:
        """Forward and backward over the micro-batches, then one update of the parameters.

        Where the loss or a gradient is not finite there is no update: the caller stops, and the
        parameters are still the last good ones.
        """
        num_targets = sum(int((batch.targets != -1).sum()) for batch in micro_batches)
        assert num_targets > 0, "a step needs at least one target"
        total = torch.zeros((), device=self.device)
        for batch in micro_batches:
            inputs, targets = to_device(batch.inputs, self.device), to_device(batch.targets, self.device)
            total += self._attempt(lambda x=inputs, y=targets: self._accumulate(x, y, num_targets))
        result = StepResult(total.item() / num_targets, num_targets, self._grad_norm())
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            self.optimizer.zero_grad()
            return result
        self.optimizer.step(rates.lr_multiplier, rates.muon_momentum, rates.muon_weight_decay)
        self.optimizer.zero_grad()
        return result

    def _grad_norm(self) -> float:
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients).item()

    def _accumulate(self, inputs: Tensor, targets: Tensor, num_targets: int) -> Tensor:
        loss_sum = self._losses(inputs, targets).sum()
        (loss_sum / num_targets).backward()  # type: ignore[no-untyped-call]
        return loss_sum.detach()

    def _attempt(self, compute: Callable[..., Tensor]) -> Tensor:
        """Compute; when the very first use of a compiled graph fails under ``auto``, go on without it."""
        if not self._untried:
            return compute()
        try:
            result = compute()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if self.compile_mode == "on":
                raise UserError(
                    f"compiling the model failed ({_first_line(error)}); use --compile auto or off"
                ) from error
            self._say(f"not compiled, steps take longer: compiling failed ({_first_line(error)})")
            self._losses = self.model.losses
            self._untried = False
            self.optimizer.zero_grad()  # a backward may have died half way
            return compute()
        self._untried = False
        return result


def to_device(array: NDArray[np.int64], device: torch.device) -> Tensor:
    """A batch of token ids as a tensor on a device."""
    return torch.from_numpy(array).to(device, non_blocking=True)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
