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


def compute_dtype(device: Device, chosen: str | None = None) -> tuple[torch.dtype, str]:
    """The dtype of the activations, with the reason: ``NANOCHAT_DTYPE``, else ``chosen``, else what the device prefers.

    Raises:
        UserError: for anything else than a dtype we compute in.
    """
    asked = os.environ.get("NANOCHAT_DTYPE")
    name = asked or chosen
    if not name:
        return device.preferred_dtype()
    if name not in DTYPES:
        where = "NANOCHAT_DTYPE" if asked else "the dtype"
        raise UserError(f"{where} is {name!r}: set it to one of {', '.join(DTYPES)}, or leave it away")
    return DTYPES[name], "NANOCHAT_DTYPE says so" if asked else "as chosen"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as flags and records have it."""
    return str(dtype).removeprefix("torch.")
