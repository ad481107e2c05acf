"""How rates change with the model's width, and rates, momentum and decay over a run. Numbers only, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from nanochat.errors import UserError

#: Learning rates of the embeddings and of the output projection were tuned at this model dim.
REFERENCE_MODEL_DIM = 768


def width_lr_scale(model_dim: int) -> float:
    """(C / 768)^-0.5: factor on the rates of embeddings, value embeddings and output projection."""
    return 1 / math.sqrt(model_dim / REFERENCE_MODEL_DIM)


@dataclass(frozen=True)
class PretrainSchedule:
    """Linear warm-up, plateau, linear warm-down, over the steps 0 … ``num_iterations`` - 1.

    Raises:
        UserError: for fewer than one step, or shares outside 0 … 1.
    """

    num_iterations: int
    warmup_steps: int = 40
    #: Share of the steps over which the rates fall.
    warmdown_ratio: float = 0.65
    #: Where the rates end, as a share of their full value.
    final_lr_frac: float = 0.05
    #: Decay of the matrices at step 0.
    weight_decay: float = field(kw_only=True)

    def __post_init__(self) -> None:
        if self.num_iterations < 1:
            raise UserError(f"the number of steps is {self.num_iterations}: it must be at least 1")
        if self.warmup_steps < 0:
            raise UserError(f"--warmup-steps is {self.warmup_steps}: it must be 0 or more")
        _check_shares(warmdown_ratio=self.warmdown_ratio, final_lr_frac=self.final_lr_frac)

    @property
    def warmdown_steps(self) -> int:
        return round(self.warmdown_ratio * self.num_iterations)

    def lr_multiplier(self, step: int) -> float:
        """Factor in 0 … 1 on every learning rate."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        left = self.num_iterations - step
        if left >= self.warmdown_steps:
            return 1.0
        share_left = max(left, 0) / self.warmdown_steps
        return share_left + (1 - share_left) * self.final_lr_frac

    def muon_momentum(self, step: int) -> float:
        """Rises from 0.85 to 0.97 over 400 steps, falls to 0.90 in the warm-down; the rise has precedence."""
        if step < 400:
            return 0.85 + 0.12 * step / 400
        fallen = step - (self.num_iterations - self.warmdown_steps)
        if fallen <= 0 or not self.warmdown_steps:
            return 0.97
        return 0.97 - 0.07 * min(fallen / self.warmdown_steps, 1.0)

    def muon_weight_decay(self, step: int) -> float:
        """Falls from ``weight_decay`` to 0 along half a cosine."""
        return self.weight_decay * (1 + math.cos(math.pi * min(step / self.num_iterations, 1.0))) / 2


@dataclass(frozen=True)
class SftSchedule:
    """Warm-up and warm-down over the progress of a chat training, a share of 0 … 1.

    Raises:
        UserError: for shares outside 0 … 1.
    """

    warmup_ratio: float = 0.0
    warmdown_ratio: float = 0.5
    final_lr_frac: float = 0.0

    def __post_init__(self) -> None:
        _check_shares(
            warmup_ratio=self.warmup_ratio, warmdown_ratio=self.warmdown_ratio, final_lr_frac=self.final_lr_frac
        )

    def lr_multiplier(self, progress: float) -> float:
        """Factor in 0 … 1 on every learning rate; progress past the end counts as the end."""
        if progress < self.warmup_ratio:
            return min((progress + 1e-8) / self.warmup_ratio, 1.0)
        past = progress - (1 - self.warmdown_ratio)
        if past <= 0 or not self.warmdown_ratio:
            return 1.0
        share_done = min(past / self.warmdown_ratio, 1.0)
        return (1 - share_done) + share_done * self.final_lr_frac

    def muon_momentum(self, step: int) -> float:
        """Rises from 0.85 to 0.95 over 300 steps."""
        share = min(step / 300, 1.0)
        return (1 - share) * 0.85 + share * 0.95

    def muon_weight_decay(self, step: int) -> float:
        """None in chat training."""
        return 0.0


def _check_shares(**shares: float) -> None:
    for name, value in shares.items():
        if not 0 <= value <= 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}: it must be between 0 and 1")
