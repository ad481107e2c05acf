"""Devices: found by asking, refused with the reason, and honest about what they do well."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from nanochat import hardware
from nanochat.errors import UserError
from nanochat.hardware import cpu, measured
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


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    return tmp_path / "base"


@pytest.mark.parametrize(("speedup", "expected"), [(2.0, torch.bfloat16), (0.5, torch.float32)])
def test_a_processor_computes_in_bf16_only_when_that_is_faster(
    speedup: float, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "processor_features", lambda: frozenset({"avx512_bf16"}))
    monkeypatch.setattr(cpu, "bf16_speedup", lambda: speedup)
    monkeypatch.delenv("NANOCHAT_DTYPE", raising=False)
    dtype, reason = compute_dtype(hardware.detect("cpu"))
    assert dtype is expected
    assert f"{speedup} times" in reason


def test_what_was_measured_is_remembered(base: Path) -> None:
    figures = iter([2.0, 3.0, 4.0])
    assert [measured.remembered("speed", lambda: next(figures)) for _ in range(2)] == [2.0, 2.0]
    (base / measured.FILE_NAME).write_text("damaged")
    assert measured.remembered("speed", lambda: next(figures)) == 3.0


def test_the_speedup_of_bf16_is_a_ratio() -> None:
    assert 0.01 < cpu.bf16_speedup() < 100


def test_a_processor_without_bf16_is_not_asked_to_emulate_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "processor_features", frozenset)
    assert cpu.Cpu().preferred_dtype()[0] is torch.float32


@pytest.mark.parametrize("compiler", ["/bin/no-such-compiler", "false"])
def test_without_a_compiler_that_works_the_obstacle_says_what_to_install(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    obstacle = cpu.Cpu().compile_obstacle()
    assert obstacle is not None
    assert "g++" in obstacle


def test_without_headers_the_obstacle_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(cpu.sysconfig, "get_path", lambda _: str(tmp_path))
    obstacle = cpu.Cpu().compile_obstacle()
    assert obstacle is not None
    assert "python3-dev" in obstacle


def test_figures_are_kept_beside_older_ones(base: Path) -> None:
    measured.keep({"a": 1.0, "b": 2.0})
    assert measured.keep({"b": 3.0}) == base / measured.FILE_NAME
    assert measured.remembered("a", lambda: 0.0) == 1.0
    assert measured.remembered("b", lambda: 0.0) == 3.0


def test_figures_that_cannot_be_kept_are_no_failure(base: Path) -> None:
    base.write_text("a file in the place of the folder")
    assert measured.keep({"a": 1.0}) is None
