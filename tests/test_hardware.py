"""Devices: found by asking, refused with the reason, and honest about what they do well."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nanochat import hardware
from nanochat.errors import UserError
from nanochat.hardware import cpu
from nanochat.hardware.device import compute_dtype


def test_the_processor_is_found_when_nothing_else_is() -> None:
    assert hardware.detect("cpu").torch_device.type == "cpu"
    assert hardware.detect().kind in hardware.probers()


def test_a_device_that_is_not_here_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="torch sees no CUDA"):
        hardware.detect("cuda")
    with pytest.raises(UserError, match="toaster"):
        hardware.detect("toaster")


def test_peak_memory_is_the_resident_set_and_never_zero() -> None:
    peak = hardware.detect("cpu").peak_memory_bytes()
    assert peak is not None
    assert peak > 10e6


@pytest.mark.parametrize(("bf16_seconds", "expected"), [(0.5, torch.bfloat16), (2.0, torch.float32)])
def test_a_processor_computes_in_bf16_only_when_that_is_faster(
    bf16_seconds: float, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "processor_features", lambda: frozenset({"avx512_bf16"}))
    monkeypatch.setattr(cpu, "_product_seconds", lambda dtype: bf16_seconds if dtype is torch.bfloat16 else 1.0)
    monkeypatch.delenv("NANOCHAT_DTYPE", raising=False)
    dtype, reason = compute_dtype(hardware.detect("cpu"))
    assert dtype is expected
    assert "2.0 times" in reason


def test_a_processor_without_bf16_is_not_asked_to_emulate_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "processor_features", frozenset)
    assert cpu.Cpu().preferred_dtype()[0] is torch.float32


def test_without_a_compiler_the_obstacle_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/no-such-compiler")
    obstacle = cpu.Cpu().compile_obstacle()
    assert obstacle is not None
    assert "g++" in obstacle


def test_without_headers_the_obstacle_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "sh")
    monkeypatch.setattr(cpu.sysconfig, "get_path", lambda _: str(tmp_path))
    obstacle = cpu.Cpu().compile_obstacle()
    assert obstacle is not None
    assert "python3-dev" in obstacle
