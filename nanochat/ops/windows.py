"""Attention within a window at the cost of the window: a block of queries at a time, against its own keys only.

Nothing here grows with the square of the text: forward holds the scores of one block, backward computes them again
instead of keeping them. Plain torch, so every device has it. The plain twin is
:func:`nanochat.ops.reference.attention`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

#: Queries in a block. Fewer read fewer keys outside their window, more make larger products.
BLOCK_QUERIES = 128


def windowed(q: Tensor, k: Tensor, v: Tensor, window: int, query_offset: int = 0) -> Tensor:
    """Causal attention within a window; the last query stands at the last key.

    Args:
        q: (B, H, Tq, d) at positions query_offset … query_offset + Tq − 1.
        k, v: (B, K, query_offset + Tq, d) from position 0; query head h reads key-value head ⌊h·K/H⌋.
        window: how many tokens before itself a query sees, so window + 1 keys.

    Returns:
        (B, H, Tq, d) in the dtype of q; the softmax is computed in at least fp32.
    """
    out: Tensor = _forward(q, k, v, window, query_offset)
    return out


@torch.library.custom_op("nanochat::windowed_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, window: int, query_offset: int) -> Tensor:
    out = _like_activations(q)
    scale = 1 / math.sqrt(q.size(-1))
    keys, values = _batched(k), _batched(v)
    for block, span, hidden in _blocks(q, k, window, query_offset):
        rows = _rows(q[:, :, block], k).mul_(scale)
        mixed = _weights(rows, keys[:, span], hidden) @ values[:, span]
        out[:, :, block] = mixed.view(q.size(0), q.size(1), -1, q.size(3))
    return out


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, window: int, query_offset: int) -> Tensor:
    return _like_activations(q)


@torch.library.custom_op("nanochat::windowed_attention_backward", mutates_args=())
def _gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, window: int, query_offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of the result (B, H, Tq, d)."""
    for_q = _like_activations(q)
    keys, values = _batched(k), _batched(v)
    for_keys, for_values = (torch.zeros_like(x, dtype=_precise(x)) for x in (keys, values))
    scale = 1 / math.sqrt(q.size(-1))
    for block, span, hidden in _blocks(q, k, window, query_offset):
        rows, upstream = _rows(q[:, :, block], k).mul_(scale), _rows(gradient[:, :, block], k)
        weights = _weights(rows, keys[:, span], hidden)
        for_values[:, span] += weights.mT @ upstream
        for_weights = upstream @ values[:, span].mT
        for_scores = torch.ops.aten._softmax_backward_data(for_weights, weights, -1, weights.dtype)
        for_keys[:, span] += for_scores.mT @ rows
        for_rows = (for_scores @ keys[:, span]).mul_(scale)
        for_q[:, :, block] = for_rows.view(q.size(0), q.size(1), -1, q.size(3))
    return for_q, for_keys.view(k.shape).to(k.dtype), for_values.view(v.shape).to(v.dtype)


@_gradients.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, window: int, query_offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _like_activations(q), k.new_empty(k.shape), v.new_empty(v.shape)


def _blocks(q: Tensor, k: Tensor, window: int, query_offset: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Of each block its queries, the keys that any of them sees, and what to add to its scores to hide the others."""
    group, num_queries, num_keys = q.size(1) // k.size(1), q.size(2), k.size(2)
    assert num_keys == query_offset + num_queries, "keys must end where the queries end"
    window = min(window, num_keys)
    block = min(BLOCK_QUERIES, num_queries)
    # One table serves all: at the start of a text it loses the columns of keys before the first, at its end rows.
    distance = window + torch.arange(block, device=q.device)[:, None] - torch.arange(window + block, device=q.device)
    outside = (distance < 0) | (distance > window)
    table = torch.zeros(distance.shape, dtype=_product_dtype(q), device=q.device).masked_fill_(outside, -math.inf)
    for start in range(0, num_queries, block):
        stop = min(start + block, num_queries)
        first = query_offset + start - window
        span = slice(max(0, first), query_offset + stop)
        hidden = table[: stop - start, span.start - first : span.stop - first]
        yield slice(start, stop), span, hidden.repeat(group, 1)


def _weights(rows: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
    """Attention weights (B · K, G · n, keys) of scaled queries (B · K, G · n, d)."""
    scores = torch.baddbmm(hidden, rows, keys.mT)
    return scores.softmax(dim=-1, dtype=_precise(scores)).to(scores.dtype)


def _rows(x: Tensor, k: Tensor) -> Tensor:
    """A copy of (B, H, n, d) as (B · K, G · n, d) for the products: the queries of a group share keys and values."""
    rows = torch.empty(x.shape, dtype=_product_dtype(x), device=x.device).copy_(x)
    return rows.view(k.size(0) * k.size(1), -1, x.size(3))


def _batched(x: Tensor) -> Tensor:
    """Keys or values (B, K, T, d) as (B · K, T, d) for the products."""
    return x.to(_product_dtype(x)).flatten(0, 1).contiguous()


def _product_dtype(x: Tensor) -> torch.dtype:
    """Processors multiply small matrices in fp32 at least as fast as in bf16, and more exactly; others do not."""
    return _precise(x) if x.is_cpu else x.dtype


def _precise(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _like_activations(q: Tensor) -> Tensor:
    """Uninitialised (B, H, T, d), laid out as (B, T, H, d) as the projections around attention are."""
    return q.new_empty(q.size(0), q.size(2), q.size(1), q.size(3)).transpose(1, 2)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, ctx.window, ctx.query_offset = inputs
    ctx.save_for_backward(q, k, v)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients(gradient, *ctx.saved_tensors, ctx.window, ctx.query_offset), None, None


_forward.register_autograd(_backward, setup_context=_remember)
