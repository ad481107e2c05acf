"""How large the tensors are that a computation handles, inside its own operators too."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def largest_tensor(compute: Callable[[], object]) -> int:
    """Elements of the largest tensor that any operation of a computation reads."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        compute()
    shapes = [shape for event in recorded.events() for shape in event.input_shapes]
    flat = [shape for shape in shapes if all(isinstance(size, int) for size in shape)]
    assert flat, "nothing was recorded"
    return max(map(math.prod, flat))
