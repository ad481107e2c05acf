"""Attention within a window by blocks, against the fused kernels without a window and with a mask.

    python benchmarks/windows.py

Time of forward and backward at T 4,096 and window 512, each way in turn and the shortest of a few times; then the
memory above the inputs at window 256. Each line of the first and each figure of the second table comes from a process
of its own.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.ops.windows import windowed

BATCH_SIZE, NUM_HEADS = 1, 6
LENGTH, WINDOW, REPEATS = 4096, 512, 3
MEMORY_LENGTHS, MEMORY_WINDOW = (4096, 8192, 16384), 256


def inputs(length: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values laid out as the model gives them."""
    shape = (BATCH_SIZE, length, NUM_HEADS, head_dim)
    return [torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = torch.arange(q.size(2))
    distance = positions[:, None] - positions
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance <= WINDOW))


def blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return windowed(q, k, v, WINDOW)


WAYS: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...] = (causal, masked, blocks)


def seconds(head_dim: int, dtype: torch.dtype) -> list[float]:
    """Shortest time of forward and backward of each way."""
    q, k, v = inputs(LENGTH, head_dim, dtype)
    upstream = torch.randn_like(q)
    shortest = [float("inf")] * len(WAYS)
    for _ in range(REPEATS):
        for number, way in enumerate(WAYS):
            began = time.perf_counter()
            way(q, k, v).backward(upstream)
            shortest[number] = min(shortest[number], time.perf_counter() - began)
            q.grad = k.grad = v.grad = None
    return shortest


def peak_mib() -> float:
    """Peak resident set of this process."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def memory_mib(length: int, head_dim: int, dtype: torch.dtype) -> float:
    """Peak of forward and backward above the inputs."""
    q, k, v = inputs(length, head_dim, dtype)
    upstream = torch.randn_like(q)
    before = peak_mib()
    windowed(q, k, v, MEMORY_WINDOW).backward(upstream)
    return peak_mib() - before


def main() -> None:
    cases = [(head_dim, dtype) for head_dim in (64, 128) for dtype in (torch.float32, torch.bfloat16)]
    print(f"batch {BATCH_SIZE}, {NUM_HEADS} heads, torch {torch.__version__}, {torch.get_num_threads()} threads")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        print(f"T {LENGTH:,}, window {WINDOW}: milliseconds of forward and backward, and how much faster blocks are")
        print("head dim  dtype      causal   masked   blocks   vs causal  vs masked")
        for head_dim, dtype in cases:
            plain, mask, ours = (1000 * time_ for time_ in pool.apply(seconds, (head_dim, dtype)))
            print(
                f"{head_dim:>8}  {str(dtype)[6:]:<9} {plain:>7,.0f} {mask:>8,.0f} {ours:>8,.0f}"
                f" {plain / ours:>9.2f} × {mask / ours:>8.2f} ×",
                flush=True,
            )
        print(f"window {MEMORY_WINDOW}: MiB above the inputs, and growth from {MEMORY_LENGTHS[-2]:,} on")
        print("head dim  dtype    " + "".join(f"{f'T {length:,}':>10}" for length in MEMORY_LENGTHS) + "    growth")
        for head_dim, dtype in cases:
            peaks = [pool.apply(memory_mib, (length, head_dim, dtype)) for length in MEMORY_LENGTHS]
            print(
                f"{head_dim:>8}  {str(dtype)[6:]:<9}"
                + "".join(f"{peak:>10,.0f}" for peak in peaks)
                + f" {peaks[-1] / peaks[-2]:>7.2f} ×",
                flush=True,
            )


if __name__ == "__main__":
    main()
