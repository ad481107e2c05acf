"""The time of a step is foreseen from measured steps of other shapes, and never without them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nanochat.forecast import speed
from nanochat.forecast.memory import Choices
from nanochat.forecast.run import foresee
from nanochat.forecast.speed import KINDS, Basis, bases_from_keys, fit, read_bases, utilisation, work
from nanochat.hardware import detect
from nanochat.model.config import ModelConfig
from nanochat.model.cost import flops_per_token, scaling_parameters
from nanochat.ops import windows
from nanochat.optim import muon
from nanochat.plan import model_config
from nanochat.train.calibration import Shape, calibrate, shapes

CHOICES = Choices("float32", compiled=False, on_cpu=True)
SECONDS = dict.fromkeys(KINDS, 0.0) | {"products": 2e-12, "causal pairs": 3e-11, "blocks": 4e-4, "tables": 5e-10}
BASIS = Basis("a chip", 2, "float32", False, "2.13.0", SECONDS)


def test_constants_of_light_modules_are_those_of_the_modules_they_stand_for() -> None:
    assert windows.BLOCK_QUERIES == speed.BLOCK_QUERIES
    assert len(muon.POLAR_EXPRESS) == speed.POLYNOMIALS


def test_the_products_of_a_step_are_the_familys_count() -> None:
    config = model_config(12, window_pattern="L")
    amounts = work(config, 4, 2048, 8, CHOICES)
    tokens = 4 * 2048 * 8
    assert amounts["products"] == 6 * scaling_parameters(config) * tokens
    attention = (flops_per_token(config) - 6 * scaling_parameters(config)) * tokens
    assert 24 * amounts["causal pairs"] == attention  # forward and backward, every pair counted, halved here


def test_a_window_costs_what_it_covers() -> None:
    far, near = (work(model_config(12, window_pattern=pattern), 1, 2048, 1, CHOICES) for pattern in ("L", "SSSL"))
    assert far["window pairs"] == 0
    assert near["window pairs"] / 9 < far["causal pairs"] / 12
    assert near["causal pairs"] == far["causal pairs"] / 4
    assert far["products"] == near["products"]


def test_recomputed_activations_cost_another_forward() -> None:
    config = model_config(4)
    plain, again = (
        work(config, 1, 2048, 1, replace(CHOICES, recompute_activations=recompute)) for recompute in (False, True)
    )
    assert again["causal pairs"] == pytest.approx(plain["causal pairs"] * 4 / 3)
    assert plain["products"] < again["products"] < plain["products"] * 4 / 3
    assert again["activations"] >= plain["activations"]


def test_seconds_are_found_again_from_steps_that_took_them() -> None:
    drawn = np.random.default_rng(0)
    amounts = []
    for shape in shapes():
        for count in (1, 3):
            amounts.append(work(shape.config, shape.device_batch, shape.config.sequence_len, count, CHOICES))
    seconds = [sum(row[kind] * SECONDS[kind] for kind in KINDS) * drawn.uniform(0.999, 1.001) for row in amounts]
    found = fit(amounts, seconds)
    assert all(value >= 0 for value in found.values())
    config = ModelConfig(300, 4000, 3, 6, 3, 384, "SL")
    expected, foreseen = (
        replace(BASIS, seconds=each).step_seconds(config, 2, 300, 4, CHOICES) for each in (SECONDS, found)
    )
    assert foreseen == pytest.approx(expected, rel=0.02)


def test_a_basis_comes_back_from_a_machines_measurements(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    assert read_bases(path) == []
    other = replace(BASIS, compiled=True, dtype="bfloat16")
    keys: dict[str, object] = {**BASIS.to_keys(), **other.to_keys(), "bf16 speed-up": 2.0, "step seconds | x": 1.0}
    path.write_text(json.dumps(keys))
    assert read_bases(path) == [BASIS, other]
    keys.pop(next(iter(BASIS.to_keys())))
    assert bases_from_keys(keys) == [other]  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "[]", '{"step seconds | a | 2 | b | plain | c | blocks": "x"}', "{"])
def test_a_damaged_file_of_measurements_holds_no_basis(text: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    assert read_bases(path) == []


def test_a_run_is_foreseen_only_from_what_was_measured_in_its_own_way() -> None:
    config = ModelConfig(64, 300, 2, 2, 2, 64)
    known = foresee(config, 2, 64, 4, CHOICES, [BASIS], "a chip", 2)
    assert known.step_seconds == BASIS.step_seconds(config, 2, 64, 4, CHOICES)
    assert known.peak_bytes > foresee(config, 2, 64, 1, CHOICES, [], "a chip", 2).peak_bytes
    for device, threads, choices in (
        ("a chip", 4, CHOICES),
        ("another", 2, CHOICES),
        ("a chip", 2, replace(CHOICES, dtype="bfloat16")),
        ("a chip", 2, replace(CHOICES, compiled=True)),
    ):
        unknown = foresee(config, 2, 64, 4, choices, [BASIS], device, threads)
        assert unknown.step_seconds is None
        assert "nanochat plan --calibrate" in unknown.basis


def test_more_micro_batches_take_their_time_but_one_update() -> None:
    config = ModelConfig(64, 300, 2, 2, 2, 64)
    one, two, three = (BASIS.step_seconds(config, 2, 64, count, CHOICES) for count in (1, 2, 3))
    assert three - two == pytest.approx(two - one)
    assert two < 2 * one


def test_a_share_of_an_unknown_peak_is_not_known_and_a_wrong_one_is_not_hidden() -> None:
    config = model_config(12, window_pattern="L")
    assert utilisation(config, 55_660, None).share is None
    assert utilisation(config, 55_660, None).flops_per_second == pytest.approx(49.4e12, rel=0.001)
    assert utilisation(config, 55_660, 40e12).share == pytest.approx(1.234, rel=0.001)


def test_this_machine_can_be_measured() -> None:
    chosen = [Shape(ModelConfig(32, 300, layers, 2, 2, 64, pattern), 2) for layers, pattern in ((1, "L"), (3, "SL"))]
    told: list[tuple[int, int]] = []
    device = detect("cpu")
    basis = calibrate(device, torch.float32, chosen=chosen, progress=lambda done, total: told.append((done, total)))
    assert (basis.device, basis.threads, basis.dtype, basis.compiled) == (
        device.name,
        torch.get_num_threads(),
        "float32",
        False,
    )
    assert all(value >= 0 for value in basis.seconds.values())
    assert basis.step_seconds(chosen[1].config, 2, 32, 1, CHOICES) > 0
    assert told == [(0, 2), (1, 2), (2, 2)]
