"""Schedules equal the family's, and stay in bounds for runs of any length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat.errors import UserError
from nanochat.optim.schedule import PretrainSchedule, SftSchedule

GOLDEN = json.loads((Path(__file__).parent / "golden" / "schedules.json").read_text())
TOLERANCE = 1e-12

shares = st.floats(0, 1)


def close(expected: float) -> object:
    return pytest.approx(expected, rel=0, abs=TOLERANCE)


@pytest.mark.parametrize("golden", GOLDEN["pretrain"], ids=lambda golden: f"{golden['inputs']['num_iterations']}-steps")
def test_pretrain_schedule_equals_the_familys(golden: dict) -> None:
    schedule = PretrainSchedule(**golden["inputs"])
    for point in golden["points"]:
        step = point["step"]
        assert schedule.lr_multiplier(step) == close(point["lr_multiplier"]), step
        assert schedule.muon_momentum(step) == close(point["muon_momentum"]), step
        assert schedule.muon_weight_decay(step) == close(point["muon_weight_decay"]), step


@pytest.mark.parametrize("golden", GOLDEN["sft"], ids=str)
def test_sft_schedule_equals_the_familys(golden: dict) -> None:
    schedule = SftSchedule(**golden["inputs"])
    for point in golden["points"]:
        assert schedule.lr_multiplier(point["progress"]) == close(point["lr_multiplier"]), point


def test_sft_momentum_equals_the_familys_and_nothing_decays() -> None:
    for point in GOLDEN["sft_muon_momentum"]:
        assert SftSchedule().muon_momentum(point["step"]) == close(point["momentum"]), point
        assert SftSchedule().muon_weight_decay(point["step"]) == 0


@given(
    num_iterations=st.integers(1, 3000),
    warmup_steps=st.integers(0, 4000),
    warmdown_ratio=shares,
    final_lr_frac=shares,
    data=st.data(),
)
def test_pretrain_schedule_stays_in_bounds(
    num_iterations: int, warmup_steps: int, warmdown_ratio: float, final_lr_frac: float, data: st.DataObject
) -> None:
    schedule = PretrainSchedule(num_iterations, warmup_steps, warmdown_ratio, final_lr_frac, weight_decay=0.28)
    step = data.draw(st.integers(0, num_iterations))
    assert 0 <= schedule.lr_multiplier(step) <= 1
    assert 0.85 <= schedule.muon_momentum(step) <= 0.97
    assert 0 <= schedule.muon_weight_decay(step) <= 0.28


@given(
    warmup_ratio=shares,
    warmdown_ratio=shares,
    final_lr_frac=shares,
    progress=st.floats(0, 1.5),
    step=st.integers(0, 10_000),
)
def test_sft_schedule_stays_in_bounds(
    warmup_ratio: float, warmdown_ratio: float, final_lr_frac: float, progress: float, step: int
) -> None:
    schedule = SftSchedule(warmup_ratio, warmdown_ratio, final_lr_frac)
    assert 0 <= schedule.lr_multiplier(progress) <= 1
    assert 0.85 <= schedule.muon_momentum(step) <= 0.95


def test_without_warmup_and_warmdown_the_rate_is_constant() -> None:
    schedule = PretrainSchedule(10, 0, 0.0, 0.05, weight_decay=0.1)
    assert [schedule.lr_multiplier(step) for step in range(11)] == [1.0] * 11
    assert [SftSchedule(0, 0, 0).lr_multiplier(progress / 10) for progress in range(12)] == [1.0] * 12


def test_one_step_has_rates() -> None:
    schedule = PretrainSchedule(1, weight_decay=0.1)
    assert schedule.lr_multiplier(0) == 1 / 40
    assert schedule.muon_weight_decay(0) == 0.1


def test_rates_end_at_the_final_share() -> None:
    assert PretrainSchedule(1000, weight_decay=0.1).lr_multiplier(1000) == 0.05
    assert SftSchedule(final_lr_frac=0.25).lr_multiplier(1.0) == 0.25


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_iterations": 0}, "steps"),
        ({"warmup_steps": -1}, "--warmup-steps"),
        ({"warmdown_ratio": 1.5}, "--warmdown-ratio"),
        ({"final_lr_frac": -0.1}, "--final-lr-frac"),
        ({"final_lr_frac": float("nan")}, "--final-lr-frac"),
    ],
)
def test_shares_and_steps_out_of_range_are_refused(changes: dict, word: str) -> None:
    with pytest.raises(UserError, match=word):
        PretrainSchedule(**({"num_iterations": 10, "weight_decay": 0.1} | changes))
    with pytest.raises(UserError, match="--warmup-ratio"):
        SftSchedule(warmup_ratio=-0.5)
