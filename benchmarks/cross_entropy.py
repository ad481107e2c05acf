"""Memory and time of the cross-entropy over a large vocabulary, all logits at once and chunk by chunk.

    python benchmarks/cross_entropy.py

Forward and backward at the size of depth 6: 8 rows of 1,024 tokens, model dim 384, vocabulary 32,768, first behind the
output projection alone, then in the whole model. Each figure comes from a process of its own: its peak resident set
above what it was after imports, and the shortest of a few times.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from nanochat.model.gpt import GPT
from nanochat.model.init import initialize
from nanochat.ops import reference
from nanochat.ops.cross_entropy import cross_entropy
from nanochat.plan import model_config

BATCH_SIZE, SEQUENCE_LEN, DEPTH, VOCAB_SIZE, SOFTCAP = 8, 1024, 6, 32768, 15.0
WAYS: dict[str, Callable[..., Tensor]] = {"at once": reference.cross_entropy, "chunked": cross_entropy}
REPEATS = {"projection": 3, "model": 2}


def peak_mib() -> float:
    """Peak resident set of this process."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def measure(what: str, way: str, dtype: torch.dtype) -> tuple[float, float]:
    """Peak in MiB above the baseline, and seconds, of forward and backward."""
    baseline = peak_mib()
    config = model_config(DEPTH, max_seq_len=SEQUENCE_LEN, vocab_size=VOCAB_SIZE)
    torch.manual_seed(0)
    ids, targets = torch.randint(0, VOCAB_SIZE, (2, BATCH_SIZE, SEQUENCE_LEN))
    if what == "model":
        model = GPT(config)
        initialize(model, 0)
        model.set_compute_dtype(dtype)
        matrix = model.lm_head.weight
    else:
        hidden = torch.randn(BATCH_SIZE, SEQUENCE_LEN, config.model_dim, dtype=dtype, requires_grad=True)
        matrix = torch.randn(VOCAB_SIZE, config.model_dim).mul_(0.02).requires_grad_()
    shortest = float("inf")
    for _ in range(REPEATS[what]):
        began = time.perf_counter()
        states = model.hidden(ids) if what == "model" else hidden
        losses = WAYS[way](states, matrix, targets, VOCAB_SIZE, SOFTCAP)
        (losses.sum() / targets.numel()).backward()
        shortest = min(shortest, time.perf_counter() - began)
        for leaf in model.parameters() if what == "model" else (hidden, matrix):
            leaf.grad = None
    return peak_mib() - baseline, shortest


def main() -> None:
    print(f"{BATCH_SIZE} × {SEQUENCE_LEN:,} tokens, depth {DEPTH}, vocabulary {VOCAB_SIZE:,}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; peak above imports, forward and backward")
    print("what        dtype            at once               chunked         memory   time")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for what in REPEATS:
            for dtype in (torch.float32, torch.bfloat16):
                plain, chunked = (pool.apply(measure, (what, way, dtype)) for way in WAYS)
                print(
                    f"{what:<11} {str(dtype)[6:]:<9} {plain[0]:>7,.0f} MiB {plain[1]:>6.2f} s"
                    f" {chunked[0]:>9,.0f} MiB {chunked[1]:>6.2f} s"
                    f" {plain[0] / chunked[0]:>8.1f} ÷ {plain[1] / chunked[1]:>5.2f} ×",
                    flush=True,
                )


if __name__ == "__main__":
    main()
