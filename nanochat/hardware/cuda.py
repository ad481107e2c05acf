"""NVIDIA and AMD GPUs: torch names both of them "cuda"."""

from __future__ import annotations

import importlib.util

import torch

KIND = "cuda"
PRIORITY = 10


class CudaGpu:
    kind = KIND

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(index)

    def preferred_dtype(self) -> tuple[torch.dtype, str]:
        # Emulated bf16 does not count: it is slower than fp32 on the cards that need it.
        if torch.version.hip is not None or torch.cuda.get_device_capability(self.torch_device) >= (8, 0):
            return torch.bfloat16, "the GPU computes bf16 natively"
        return torch.float32, "the GPU has no native bf16"

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def peak_memory_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def compile_obstacle(self) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed beside this torch; installing it would make steps faster"
        return None


def probe() -> CudaGpu | str:
    if not torch.cuda.is_available():
        return "torch sees no CUDA or ROCm device"
    return CudaGpu()
