"""Choosing the next token. A draw depends on (seed, sample, position) alone, never on the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nanochat.errors import UserError

#: Colder than this is greedy: fp32 logits that differ at all would differ beyond any draw.
MIN_TEMPERATURE = 1e-6

_MASK_64 = 2**64 - 1


def sample(
    logits: Tensor, temperature: float, top_k: int, seed: int, sample_indices: Sequence[int], position: int
) -> Tensor:
    """Next token of each row.

    Args:
        logits: (B, V).
        temperature: 0 takes the likeliest token.
        top_k: draw among this many likeliest tokens; 0 = among all.
        seed: the same seed gives the same text again.
        sample_indices: B numbers, which sample of the prompt each row is.
        position: of the token to be chosen in its text.

    Returns:
        (B,) int64 ids.

    Raises:
        UserError: for a temperature or top-k that makes no sense.
    """
    check_sampling(temperature, top_k)
    assert len(sample_indices) == logits.size(0), "every row needs its sample index"
    if temperature < MIN_TEMPERATURE:
        return logits.argmax(dim=-1)
    weights, ids = logits.float(), None
    if 0 < top_k < logits.size(-1):
        weights, ids = weights.topk(top_k, dim=-1)
    weights = weights - weights.amax(dim=-1, keepdim=True)
    cumulative = (weights / temperature).softmax(dim=-1).cumsum(dim=-1)
    draws = [[uniform(seed, index, position)] for index in sample_indices]
    points = torch.tensor(draws, dtype=torch.float32, device=logits.device) * cumulative[:, -1:]
    chosen = (cumulative <= points).sum(dim=-1, keepdim=True)
    return (chosen if ids is None else ids.gather(-1, chosen)).squeeze(-1)


def check_sampling(temperature: float, top_k: int) -> None:
    """Raise :class:`UserError` for settings that :func:`sample` cannot use."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise UserError(f"temperature is {temperature}: give a number of at least 0 (0 takes the likeliest token)")
    if top_k < 0:
        raise UserError(f"top-k is {top_k}: give a number of at least 0 (0 draws among all tokens)")


def uniform(seed: int, sample_index: int, position: int) -> float:
    """A number in [0, 1) fixed by its three arguments, exact in fp32 (24 bits) and the same on every device.

    A counter-style generator: each argument is stirred into the state by the finaliser of
    SplitMix64 (Steele, Lea and Flood 2014).
    """
    state = 0
    for value in (seed, sample_index, position):
        state = _stir(state + value + 0x9E3779B97F4A7C15)
    return (state >> 40) / 2**24


def _stir(state: int) -> int:
    state &= _MASK_64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK_64
    return state ^ (state >> 31)
