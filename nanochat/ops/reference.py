"""Plainly right arithmetic that every faster form is held against. Slow, and meant to be."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
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


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float) -> Tensor:
    """Losses of tokens whose logits are a soft-capped product, all logits at once.

    Args:
        hidden: (…, C).
        weight: (rows, C), cast to the dtype of the hidden states; rows from ``vocab_size`` on are padding.
        targets: (…) int64 below ``vocab_size``, −1 for none.
        softcap: logits are softcap · tanh(product / softcap), computed in at least fp32.

    Returns:
        (…) in nats, in fp32 (float64 when the hidden states are), 0 where there is no target.
    """
    logits = (hidden @ weight.to(hidden.dtype).T)[..., :vocab_size]
    capped = softcap * torch.tanh(logits.to(torch.promote_types(logits.dtype, torch.float32)) / softcap)
    losses = F.cross_entropy(capped.flatten(0, -2), targets.flatten(), ignore_index=-1, reduction="none")
    return losses.view_as(targets)
