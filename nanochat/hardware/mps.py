"""Apple's GPUs."""

from __future__ import annotations

import platform

import torch

from nanochat.hardware import cpu

KIND = "mps"
PRIORITY = 20


class AppleGpu:
    kind = KIND

    def __init__(self) -> None:
        self.torch_device = torch.device("mps")
        self.name = f"Apple GPU ({platform.machine()})"

    def preferred_dtype(self) -> tuple[torch.dtype, str]:
        return torch.float32, "fp32 is the safe choice on Apple's GPUs"

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def peak_memory_bytes(self) -> int | None:
        """Memory is shared with the processor, so the resident set is the telling figure."""
        return cpu.Cpu().peak_memory_bytes()

    def compile_obstacle(self) -> str | None:
        return "torch.compile is not finished for Apple's GPUs"


def probe() -> AppleGpu | str:
    if not torch.backends.mps.is_available():
        return "torch sees no Apple GPU"
    return AppleGpu()
