"""The processor: always there."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
import time
from pathlib import Path

import torch

KIND = "cpu"
PRIORITY = 100


class Cpu:
    kind = KIND

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.name = _processor_name()

    def preferred_dtype(self) -> tuple[torch.dtype, str]:
        """bf16 where the processor multiplies it faster than fp32, which having the instructions does not tell."""
        if not processor_features() & {"amx_bf16", "avx512_bf16"}:
            return torch.float32, "the processor has no bf16 arithmetic"
        ratio = _product_seconds(torch.float32) / _product_seconds(torch.bfloat16)
        if ratio > 1:
            return torch.bfloat16, f"bf16 products measured {ratio:.1f} times as fast as fp32"
        return torch.float32, f"bf16 products measured {1 / ratio:.1f} times slower than fp32"

    def synchronize(self) -> None:
        return

    def peak_memory_bytes(self) -> int | None:
        """Peak resident set of this process."""
        try:
            import resource
        except ImportError:  # Windows has none
            return None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def compile_obstacle(self) -> str | None:
        compiler = os.environ.get("CXX")
        names = [compiler] if compiler else ["g++", "clang++", "cl"]
        if not any(shutil.which(name) for name in names):
            return f"no C++ compiler ({' or '.join(names)}) was found; installing g++ would make steps faster"
        if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
            return "Python's C headers are missing; installing the python3-dev package would make steps faster"
        return None


def processor_features() -> frozenset[str]:
    """Feature flags as Linux lists them; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def _product_seconds(dtype: torch.dtype) -> float:
    """Shortest time of a matrix product of the shape an MLP of a small model has."""
    x, weight = torch.ones(2048, 256, dtype=dtype), torch.ones(1024, 256, dtype=dtype)
    times = []
    for _ in range(8):
        began = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        times.append(time.perf_counter() - began)
    return min(times)


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def probe() -> Cpu | str:
    return Cpu()
