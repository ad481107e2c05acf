"""Times a few real steps of small models on this device, so that the time of any other can be foreseen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from nanochat.forecast.memory import Choices
from nanochat.forecast.speed import Basis, fit, work
from nanochat.hardware.device import Device, dtype_name
from nanochat.model.config import ModelConfig
from nanochat.model.gpt import GPT
from nanochat.model.init import initialize
from nanochat.optim.groups import Rates, parameter_groups
from nanochat.optim.optimizer import Optimizer
from nanochat.train.step import StepRates, Trainer

#: Steps of one and of this many micro-batches tell the time of a micro-batch from that of an update.
MICRO_BATCHES = (1, 3)
#: Steps of each kind; the shortest counts, since other work on the machine only ever adds.
REPEATS = 2
#: Shapes grow until the largest needs this long for a micro-batch: less tells of launches, not of the device.
LEAST_SECONDS = 0.1
LARGEST_SCALE = 16


@dataclass(frozen=True)
class Shape:
    """A model and how many rows of it go through at once."""

    config: ModelConfig
    device_batch: int


@dataclass(frozen=True)
class _RandomBatch:
    """Tokens drawn at random: time does not depend on what they say."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]


def shapes(scale: int = 1) -> tuple[Shape, ...]:
    """Models that differ in what takes the time: products, attention of both kinds, logits of both kinds, many layers.

    Args:
        scale: multiplies model dim and rows.
    """

    def shape(rows: int, length: int, vocab: int, layers: int, heads: int, pattern: str = "L") -> Shape:
        heads *= scale
        return Shape(ModelConfig(length, vocab, layers, heads, heads, 64 * heads, pattern), rows * scale)

    return (
        shape(4, 256, 2048, 2, 4),
        shape(2, 512, 2048, 4, 8),
        shape(4, 256, 2048, 6, 4),
        shape(2, 1024, 2048, 2, 4),
        shape(2, 1024, 2048, 4, 4, "S"),
        shape(2, 500, 16384, 2, 4),
        shape(4, 512, 16384, 2, 4),
        shape(1, 128, 1024, 8, 2),
    )


def calibrate(
    device: Device,
    dtype: torch.dtype,
    *,
    compile_mode: str = "off",
    compile_cache: Path | None = None,
    chosen: Sequence[Shape] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Basis:
    """Measure this device.

    Args:
        dtype: of the activations.
        compile_mode: as for training; what is measured counts as compiled when it was.
        chosen: shapes to measure instead of :func:`shapes`.
        progress: told how many shapes of how many are done.
    """
    measured = list(chosen or shapes(_scale(device, dtype)))
    amounts, seconds, compiled = [], [], compile_mode != "off"
    for done, shape in enumerate(measured):
        progress(done, len(measured))
        timer = StepTimer(shape, device, dtype, compile_mode, compile_cache)
        compiled = timer.trainer.compiled
        choices = Choices(dtype_name(dtype), compiled=compiled, on_cpu=device.torch_device.type == "cpu")
        for count in MICRO_BATCHES:
            amounts.append(work(shape.config, shape.device_batch, shape.config.sequence_len, count, choices))
            seconds.append(timer.shortest(count, REPEATS))
    progress(len(measured), len(measured))
    return Basis(
        device.name, torch.get_num_threads(), dtype_name(dtype), compiled, torch.__version__, fit(amounts, seconds)
    )


class StepTimer:
    """A fresh model with its optimizer, whose steps are timed; it has done one step already."""

    def __init__(
        self, shape: Shape, device: Device, dtype: torch.dtype, compile_mode: str, compile_cache: Path | None = None
    ) -> None:
        self.shape, self._device = shape, device
        model = GPT(shape.config)
        initialize(model, 0)
        model.to(device.torch_device)
        model.set_compute_dtype(dtype)
        parameters = dict(model.named_parameters())
        groups = parameter_groups(parameters, Rates(), shape.config.model_dim)
        self.trainer = Trainer(
            model,
            Optimizer(parameters, groups, compute_dtype=dtype),
            device.torch_device,
            compile_mode=compile_mode,
            obstacle=device.compile_obstacle(),
            compile_cache=compile_cache,
            say=lambda text: None,
        )
        size = (shape.device_batch, shape.config.sequence_len)
        ids = np.random.default_rng(0).integers(0, shape.config.vocab_size, size)
        self._batch = _RandomBatch(ids, np.roll(ids, -1, axis=1))
        self.seconds(1)

    def seconds(self, micro_batches: int) -> float:
        """Seconds of one step."""
        self._device.synchronize()
        began = time.perf_counter()
        # A rate of 0 keeps the weights as they are, so nothing diverges however often it is asked.
        self.trainer.step([self._batch] * micro_batches, StepRates(0.0, 0.95, 0.0))
        self._device.synchronize()
        return time.perf_counter() - began

    def shortest(self, micro_batches: int, repeats: int) -> float:
        """Seconds of the quickest of several steps."""
        return min(self.seconds(micro_batches) for _ in range(repeats))


def _scale(device: Device, dtype: torch.dtype) -> int:
    """How large the shapes must be for this device to be busy with them."""
    scale = 1
    while scale < LARGEST_SCALE:
        largest = shapes(scale)[1]
        if StepTimer(largest, device, dtype, "off").shortest(1, 1) >= LEAST_SECONDS:
            break
        scale *= 2
    return scale
