"""Bits per byte: a loss that does not depend on the tokenizer.

Σ nats ÷ (ln 2 · Σ bytes), over all targets that stand for bytes of text: special tokens (0 bytes)
and targets of -1 are left out of both sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nanochat.train.step import MicroBatch

BatchLosses = Callable[[NDArray[np.int64], NDArray[np.int64]], Tensor]


@dataclass(frozen=True)
class BitsPerByte:
    """A measured text: Σ nats over the counted targets, how many, and the bytes they stand for."""

    nats: float
    num_tokens: int
    num_bytes: int

    @property
    def value(self) -> float | None:
        """Bits per byte; None when no target stood for a byte."""
        return self.nats / (math.log(2) * self.num_bytes) if self.num_bytes else None


def bits_per_byte(losses: BatchLosses, batches: Iterable[MicroBatch], token_bytes: NDArray[np.int64]) -> BitsPerByte:
    """Measure a model on batches.

    Args:
        losses: token losses (B, T) in nats of inputs and targets (B, T).
        token_bytes: (V,) length in bytes of every token, 0 for special ones.
    """
    nats, num_tokens, num_bytes = 0.0, 0, 0
    for batch in batches:
        lengths = np.where(batch.targets >= 0, token_bytes[np.maximum(batch.targets, 0)], 0)
        counted = lengths > 0
        values = losses(batch.inputs, batch.targets).float().cpu().numpy()
        nats += float(values[counted].sum(dtype=np.float64))
        num_tokens += int(counted.sum())
        num_bytes += int(lengths.sum())
    return BitsPerByte(nats, num_tokens, num_bytes)
