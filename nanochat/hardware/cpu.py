"""The processor: always there."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch

from nanochat.hardware import measured

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
        key = f"bf16 speed-up, {self.name}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        ratio = measured.remembered(key, bf16_speedup)
        if ratio > 1:
            return torch.bfloat16, f"bf16 products measured {ratio:.1f} times as fast as fp32"
        return torch.float32, f"bf16 products measured at {ratio:.1f} times the speed of fp32"

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
        if not any(map(_runs, names)):
            return f"no C++ compiler ({' or '.join(names)}) works here; installing g++ would make steps faster"
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


def _runs(compiler: str) -> bool:
    """Whether there is such a program and it answers."""
    path = shutil.which(compiler)
    if path is None:
        return False
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def bf16_speedup() -> float:
    """How many times faster than in fp32 a product is in bf16, of the shape an MLP of a small model has.

    The two are timed in turn and the shortest times compared, so that other work on the machine
    disturbs both alike.
    """
    operands = {
        dtype: (torch.ones(4096, 256, dtype=dtype), torch.ones(1024, 256, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    }
    shortest = dict.fromkeys(operands, float("inf"))
    for _ in range(20):
        for dtype, (x, weight) in operands.items():
            began = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            shortest[dtype] = min(shortest[dtype], time.perf_counter() - began)
    return shortest[torch.float32] / shortest[torch.bfloat16]


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
