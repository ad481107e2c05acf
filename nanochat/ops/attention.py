"""Causal attention within a window, fast. The plain twin is :func:`nanochat.ops.reference.attention`."""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from nanochat.ops.windows import windowed


class Attention(Protocol):
    """What the model asks of an attention; shapes as in :func:`nanochat.ops.reference.attention`."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, window: int, query_offset: int = 0) -> Tensor: ...


def sdpa(q: Tensor, k: Tensor, v: Tensor, window: int, query_offset: int = 0) -> Tensor:
    """Attention by torch's fused kernels where the window hides nothing, else by blocks at the cost of the window.

    No (Tq, Tk) mask is ever built: a whole text under a long window and one query of decoding need none, and
    everything else, also several queries that continue a text, goes through :mod:`nanochat.ops.windows`.

    Args:
        q: (B, H, Tq, d) at positions query_offset … query_offset + Tq − 1.
        k, v: (B, K, query_offset + Tq, d) from position 0; the last query stands at the last key.
        window: how many tokens before itself a query sees.

    Returns:
        (B, H, Tq, d).
    """
    num_queries, num_keys = q.size(2), k.size(2)
    assert num_keys == query_offset + num_queries, "keys must end where the queries end"
    first_key = max(0, query_offset - window)  # earlier ones are seen by no query
    k, v = k[:, :, first_key:], v[:, :, first_key:]
    if num_queries == 1:
        return _attend_all(q, k, v)
    if query_offset == 0 and window >= num_keys - 1:
        # Few of the fused kernels know grouped heads, all of them know equal numbers.
        k, v = _repeat_heads(k, q.size(1)), _repeat_heads(v, q.size(1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return windowed(q, k, v, window, query_offset - first_key)


def _attend_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query (B, H, 1, d) over all keys: the heads of a group become rows, so no key is copied."""
    rows = q.reshape(q.size(0), k.size(1), -1, q.size(-1))
    return F.scaled_dot_product_attention(rows, k, v).reshape(q.shape)


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, K, T, d) → (B, num_heads, T, d), each head as often in a row as it has query heads."""
    repeats = num_heads // x.size(1)
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)
