"""What the rest of the program may ask of a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

import torch

from nanochat.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Device(Protocol):
    """One kind of device, as the training loop and the engine see it."""

    kind: str
    #: The name its maker gave it, for people.
    name: str
    torch_device: torch.device

    def preferred_dtype(self) -> tuple[torch.dtype, str]:
        """The dtype it computes well in, and the reason in a few words."""
        ...

    def synchronize(self) -> None:
        """Wait until all queued work is done, so that a clock tells the truth."""
        ...

    def peak_memory_bytes(self) -> int | None:
        """The most memory held so far, or None when it cannot be told."""
        ...

    def compile_obstacle(self) -> str | None:
        """Why ``torch.compile`` cannot work here, and what would change it; None when nothing is known."""
        ...


#: Looks for a device; returns it, or the reason why there is none.
Prober = Callable[[], "Device | str"]


def compute_dtype(device: Device) -> tuple[torch.dtype, str]:
    """``NANOCHAT_DTYPE`` when set, else what the device prefers; with the reason.

    Raises:
        UserError: when the variable names something else than a dtype we compute in.
    """
    chosen = os.environ.get("NANOCHAT_DTYPE")
    if not chosen:
        return device.preferred_dtype()
    if chosen not in DTYPES:
        raise UserError(f"NANOCHAT_DTYPE is {chosen!r}: set it to one of {', '.join(DTYPES)}, or leave it away")
    return DTYPES[chosen], "NANOCHAT_DTYPE says so"
