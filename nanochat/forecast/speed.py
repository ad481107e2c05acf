"""How long a training step takes, from what it has to do and what this machine needs for it. No torch here.

A step is a sum of kinds of work (:data:`KINDS`), each an amount that follows from the shape. A calibration
(:mod:`nanochat.train.calibration`) times a few real steps of other shapes; fitted to them are seconds of one unit of
each kind.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanochat.forecast.memory import Choices, activation_bytes, chunks_loss, matrix_shapes
from nanochat.model.config import ModelConfig
from nanochat.model.cost import flops_per_token, parameter_counts

#: Queries in a block of windowed attention, as in nanochat.ops.windows, which loads torch; a test holds them equal.
BLOCK_QUERIES = 128
#: Products in the orthogonalisation of Muon: five polynomials.
POLYNOMIALS = 5

#: What a micro-batch does: FLOPs of products, pairs of query and key channel, bytes of activations, logits, blocks;
#: and an update: FLOPs of Muon, numbers of the matrices, numbers of the rest, stacks and single tensors.
KINDS = (
    *("products", "causal pairs", "window pairs", "activations", "logits", "chunked logits", "blocks"),
    *("orthogonalising", "matrices", "tables", "tensors"),
)

#: Beginning of the keys under which a basis is remembered among what was measured of this machine.
KEY = "step seconds"
SEPARATOR = " | "


@dataclass(frozen=True)
class Basis:
    """Seconds of one unit of each kind of work, measured on one machine in one way of computing."""

    device: str
    threads: int
    dtype: str
    compiled: bool
    #: Version of torch.
    torch: str
    #: By kind; one that is missing or 0 took no time that could be told from the others.
    seconds: Mapping[str, float]

    def step_seconds(
        self, config: ModelConfig, device_batch: int, sequence_len: int, micro_batches: int, choices: Choices
    ) -> float:
        """Seconds of one optimizer step."""
        amounts = work(config, device_batch, sequence_len, micro_batches, choices)
        return sum(amount * self.seconds.get(kind, 0.0) for kind, amount in amounts.items())

    def describe(self) -> str:
        how = "compiled" if self.compiled else "not compiled"
        return f"measured here: {self.device}, {self.threads} threads, {self.dtype}, {how}, torch {self.torch}"

    def to_keys(self) -> dict[str, float]:
        """As flat figures, the form in which a machine's measurements are kept."""
        how = "compiled" if self.compiled else "plain"
        name = SEPARATOR.join((KEY, self.device, str(self.threads), self.dtype, how, self.torch))
        return {f"{name}{SEPARATOR}{kind}": self.seconds.get(kind, 0.0) for kind in KINDS}


def bases_from_keys(known: Mapping[str, float]) -> list[Basis]:
    """Every complete basis among a machine's measurements; the inverse of :meth:`Basis.to_keys`."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for key, value in known.items():
        parts = key.split(SEPARATOR)
        if parts[0] == KEY and len(parts) == 7 and parts[-1] in KINDS:
            found.setdefault(tuple(parts[1:-1]), {})[parts[-1]] = float(value)
    return [
        Basis(device, int(threads), dtype, how == "compiled", torch, seconds)
        for (device, threads, dtype, how, torch), seconds in found.items()
        if len(seconds) == len(KINDS) and threads.isdecimal()
    ]


def read_bases(path: Path) -> list[Basis]:
    """The bases that lie in a machine's file of measurements; none when there is no such file."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return bases_from_keys({key: float(value) for key, value in known.items() if key.startswith(KEY)})
    except (OSError, ValueError, TypeError, AttributeError):
        return []


def work(
    config: ModelConfig, device_batch: int, sequence_len: int, micro_batches: int, choices: Choices
) -> dict[str, float]:
    """What one optimizer step has to do, by kind."""
    num_tokens = device_batch * sequence_len
    counts = parameter_counts(config)
    again = 4 / 3 if choices.recompute_activations else 1.0
    causal = windowed = 0.0
    for window in config.windows:
        if window >= sequence_len - 1:
            causal += num_tokens * config.model_dim * sequence_len / 2
        else:
            windowed += num_tokens * config.model_dim * min(sequence_len / 2, window + BLOCK_QUERIES)
    logits = num_tokens * config.vocab_size
    chunked = chunks_loss(config, num_tokens, choices)
    # What is kept tells what is read and written; without it, forward is done twice.
    kept = activation_bytes(config, device_batch, sequence_len, _keeping(choices))
    each = {
        "products": num_tokens * 6.0 * (counts.transformer_matrices * again + counts.lm_head),
        "causal pairs": causal * again,
        "window pairs": windowed * again,
        "activations": kept * again,
        "logits": 0.0 if chunked else logits,
        "chunked logits": logits if chunked else 0.0,
        "blocks": config.num_layers + 2.0,
    }
    orthogonalizing = matrices = 0.0
    shapes = matrix_shapes(config)
    for (rows, columns), count in shapes.items():
        shorter = min(rows, columns)
        orthogonalizing += count * POLYNOMIALS * 2 * (2 * rows * columns * shorter + shorter**3)
        matrices += count * rows * columns
    tables = counts.total - counts.transformer_matrices
    return {kind: amount * micro_batches for kind, amount in each.items()} | {
        "orthogonalising": orthogonalizing,
        "matrices": matrices,
        "tables": tables,
        "tensors": len(shapes) + len(config.value_embed_layers) + 7.0,
    }


def _keeping(choices: Choices) -> Choices:
    return Choices(choices.dtype, compiled=choices.compiled, on_cpu=choices.on_cpu)


def fit(amounts: Sequence[Mapping[str, float]], seconds: Sequence[float]) -> dict[str, float]:
    """Seconds per unit of each kind, none negative, with the least sum of squared relative errors.

    With so few kinds every choice of those that take any time at all is simply tried.

    Args:
        amounts: of :func:`work`, one for each measured step.
        seconds: that each of them took.
    """
    import numpy as np

    times = np.asarray(seconds)
    table = np.array([[row[kind] for kind in KINDS] for row in amounts]) / times[:, None]
    scale = table.max(axis=0)
    used = [column for column in range(len(KINDS)) if scale[column] > 0]
    best: tuple[float, tuple[int, ...], list[float]] = (float("inf"), (), [])
    for columns in _subsets(used, len(times)):
        chosen = table[:, columns] / scale[list(columns)]
        solution = np.linalg.lstsq(chosen, np.ones(len(times)), rcond=None)[0]
        if (solution < 0).any():
            continue
        error = float(((chosen @ solution - 1) ** 2).sum())
        if error < best[0] - 1e-12:
            best = (error, columns, [float(value) for value in solution / scale[list(columns)]])
    return dict.fromkeys(KINDS, 0.0) | {KINDS[c]: value for c, value in zip(best[1], best[2], strict=True)}


def _subsets(columns: Sequence[int], most: int) -> Iterable[tuple[int, ...]]:
    """Every choice of columns, of as many as there are equations at most."""
    for size in range(1, min(len(columns), most) + 1):
        yield from itertools.combinations(columns, size)


@dataclass(frozen=True)
class Utilisation:
    """Model FLOPs ÷ (seconds · peak), by the family's convention: attention counted in full."""

    flops_per_second: float
    peak_flops: float | None

    @property
    def share(self) -> float | None:
        """None where the peak is not known; over 1 means that the basis is wrong, and is not hidden."""
        return self.flops_per_second / self.peak_flops if self.peak_flops else None


def utilisation(config: ModelConfig, tokens_per_second: float, peak_flops: float | None) -> Utilisation:
    """How much of a device's dense peak a training speed is."""
    return Utilisation(flops_per_token(config) * tokens_per_second, peak_flops)
