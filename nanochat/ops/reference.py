"""Plainly right arithmetic that every faster form is held against. Slow, and meant to be."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, window: int, query_offset: int = 0) -> Tensor:
    """Causal attention within a window, scores and softmax in fp32.

    Args:
        q: (B, H, Tq, d), the queries at positions query_offset, query_offset + 1, …
        k, v: (B, K, Tk, d), keys and values from position 0; query head h reads key-value head ⌊h·K/H⌋.
        window: how many tokens before itself a query sees, so window + 1 keys.

    Returns:
        (B, H, Tq, d) in the dtype of q. "Attention Is All You Need" (Vaswani et al. 2017), eq. 1.
    """
    precise = torch.promote_types(q.dtype, torch.float32)
    heads_per_key = q.size(1) // k.size(1)
    keys = k.to(precise).repeat_interleave(heads_per_key, dim=1)
    values = v.to(precise).repeat_interleave(heads_per_key, dim=1)
    scores = q.to(precise) @ keys.mT / math.sqrt(q.size(-1))
    query_positions = query_offset + torch.arange(q.size(2), device=q.device)
    distance = query_positions[:, None] - torch.arange(k.size(2), device=q.device)
    hidden = (distance < 0) | (distance > window)
    return (scores.masked_fill(hidden, -math.inf).softmax(dim=-1) @ values).to(q.dtype)
