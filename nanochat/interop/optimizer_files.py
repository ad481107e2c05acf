"""Reads the optimizer state of the family: one file per rank, joined and keyed by parameter name.

In a file parameters are numbered, in the order of :func:`nanochat.optim.groups.parameter_groups`. With W ranks,
AdamW's tensors of 1,024 elements and more are split along axis 0, and each Muon stack of k matrices into chunks of
⌈k/W⌉, the last one padded; a stack's state stands under its first parameter's number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat.interop.torch_archive import read_torch
from nanochat.optim.groups import MuonGroup, Rates, parameter_groups

#: AdamW tensors smaller than this are whole on every rank.
SPLIT_ELEMENTS = 1024

State = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class Moments:
    """Optimizer state by ``<parameter name>.<moment>``, and how many updates it has seen."""

    tensors: dict[str, Tensor]
    step_count: int


class UnusableMoments(Exception):
    """Why the optimizer state of a checkpoint cannot be used, in one sentence; the model can be all the same."""


def read_moments(folder: Path, step: int, parameters: Mapping[str, Tensor], model_dim: int) -> Moments | None:
    """The optimizer state saved with a model.

    Args:
        folder: where the model's files lie.
        step: of the model.
        parameters: of the model, by public name.
        model_dim: of the model.

    Returns:
        The state, or None when none was saved.

    Raises:
        UnusableMoments: when it is of before February 2026, a rank's file is missing, or it fits another model.
        UserError: when a file is damaged or refused.
    """
    named = re.compile(rf"optim_0*{step}_rank(\d+)\.pt")
    ranks = {int(match[1]): path for path in folder.glob("optim_*.pt") if (match := named.fullmatch(path.name))}
    old = folder / f"optim_{step:06d}.pt"
    if not ranks:
        if old.exists():
            raise UnusableMoments(f"{old} is of before February 2026 and is not read")
        return None
    if sorted(ranks) != list(range(len(ranks))):
        absent = sorted(set(range(max(ranks))) - set(ranks))
        raise UnusableMoments(f"the optimizer files of step {step} in {folder} lack rank {absent[0]}")
    files = [read_torch(ranks[rank]) for rank in range(len(ranks))]
    if any(not isinstance(file, dict) or "param_groups" not in file for file in files):
        raise UnusableMoments(f"{ranks[0]} is of before February 2026 and is not read")
    try:
        return _join([file["state"] for file in files], files[0]["param_groups"], parameters, model_dim)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError):
        raise UnusableMoments(
            f"the optimizer files of step {step} in {folder} ({len(ranks)}) do not fit the model: is a rank missing?"
        ) from None


def _join(
    states: Sequence[State], param_groups: Sequence[Mapping[str, Any]], parameters: Mapping[str, Tensor], model_dim: int
) -> Moments:
    """One state from those of all ranks; raises ValueError and the like when something does not fit."""
    groups = parameter_groups(parameters, Rates(), model_dim)
    numbers = [number for group in param_groups for number in group["params"]]
    if [len(group.names) for group in groups] != [len(group["params"]) for group in param_groups]:
        raise ValueError("other groups")
    if numbers != list(range(len(numbers))):
        raise ValueError("other numbering")
    tensors: dict[str, Tensor] = {}
    first = 0
    for group in groups:
        if isinstance(group, MuonGroup):
            tensors |= _muon_tensors([state.get(first, {}) for state in states], group)
        else:
            for number, name in enumerate(group.names, start=first):
                tensors |= _adam_tensors([state[number] for state in states], name, parameters[name])
        first += len(group.names)
    return Moments(tensors, int(states[0][0]["step"]))


def _adam_tensors(ranks: Sequence[Mapping[str, Any]], name: str, parameter: Tensor) -> dict[str, Tensor]:
    joined: dict[str, Tensor] = {}
    for moment in ("exp_avg", "exp_avg_sq"):
        parts = [rank[moment] for rank in ranks]
        whole = torch.cat(parts) if len(parts) > 1 and parameter.numel() >= SPLIT_ELEMENTS else parts[0]
        joined[f"{name}.{moment}"] = _of_shape(whole, tuple(parameter.shape))
    return joined


def _muon_tensors(ranks: Sequence[Mapping[str, Any]], group: MuonGroup) -> dict[str, Tensor]:
    count, (rows, columns) = len(group.names), group.shape
    shapes = {
        "momentum_buffer": (rows, columns),
        "second_momentum_buffer": (rows, 1) if rows >= columns else (1, columns),
    }
    chunk = -(-count // len(ranks))
    joined: dict[str, Tensor] = {}
    for moment, shape in shapes.items():
        # A rank whose whole chunk is padding may have no state.
        parts = [_of_shape(rank[moment], (chunk, *shape)) for rank in ranks if moment in rank]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        if len(whole) < count:
            raise ValueError("too few matrices")
        joined |= {f"{name}.{moment}": whole[i] for i, name in enumerate(group.names)}
    return joined


def _of_shape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"shape {tuple(tensor.shape)} instead of {shape}")
    return tensor
