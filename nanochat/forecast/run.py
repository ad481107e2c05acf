"""One run foreseen: memory from its shape, time from what was measured of this machine. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from nanochat.forecast.memory import Choices, Memory, step_memory
from nanochat.forecast.speed import Basis
from nanochat.model.config import ModelConfig


@dataclass(frozen=True)
class RunForecast:
    """What a run's steps will take on one device.

    Attributes:
        memory: at the fullest moment, by part; see :func:`nanochat.forecast.memory.step_memory` for what is counted.
        step_seconds: of one optimizer step; None where nothing like it was measured.
        basis: what the time rests on, or what to do to have one.
    """

    memory: Memory
    step_seconds: float | None
    basis: str

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes


def foresee(
    config: ModelConfig,
    device_batch: int,
    sequence_len: int,
    micro_batches: int,
    choices: Choices,
    bases: Iterable[Basis],
    device_name: str,
    threads: int,
) -> RunForecast:
    """Foresee the steps of a run.

    Args:
        device_batch: rows of a forward pass on each device.
        micro_batches: forward passes of an optimizer step on each device.
        choices: how the step is computed; whether gradients accumulate follows from ``micro_batches``.
        bases: what was measured, as :func:`nanochat.forecast.speed.read_bases` has it.
        device_name: name of the device the run is on; only what was measured on that one counts.
        threads: of torch, on a processor.
    """
    choices = replace(choices, accumulate=micro_batches > 1)
    memory = step_memory(config, device_batch, sequence_len, choices)
    basis = find_basis(bases, device_name, threads, choices)
    if basis is None:
        return RunForecast(memory, None, missing_basis(device_name, choices))
    seconds = basis.step_seconds(config, device_batch, sequence_len, micro_batches, choices)
    return RunForecast(memory, seconds, basis.describe())


def find_basis(bases: Iterable[Basis], device_name: str, threads: int, choices: Choices) -> Basis | None:
    """The last basis that was measured in the same way on the same device; None when there is none."""
    found = [
        basis
        for basis in bases
        if basis.device == device_name
        and basis.dtype == choices.dtype
        and basis.compiled == choices.compiled
        and (basis.threads == threads or not choices.on_cpu)
    ]
    return found[-1] if found else None


def missing_basis(device_name: str, choices: Choices) -> str:
    """The sentence in place of a basis."""
    how = "compiled" if choices.compiled else "not compiled"
    return f"not measured on {device_name} in {choices.dtype}, {how}: nanochat plan --calibrate measures it"
