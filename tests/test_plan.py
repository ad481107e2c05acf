"""The plan equals the family's, entry by entry, and refuses what cannot be trained."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat.errors import UserError
from nanochat.model.config import Constants, ModelConfig
from nanochat.model.cost import flops_per_token, parameter_counts, scaling_parameters
from nanochat.plan import PlanInputs, gradient_accumulation, model_config, plan

GOLDEN = Path(__file__).parent / "golden"
PLANS = json.loads((GOLDEN / "plan.json").read_text())
FLOAT_TOLERANCE = 1e-12

#: The later program that wrote these files also counts the weights of the smear gate.
SMEAR_GATE_FLOPS = 6 * 24


def assert_equal(actual: object, expected: object, name: str) -> None:
    if isinstance(expected, dict):
        assert isinstance(actual, dict)
        assert list(actual) == list(expected), name
        for key in expected:
            assert_equal(actual[key], expected[key], f"{name}.{key}")
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=FLOAT_TOLERANCE, abs=0), name
    else:
        assert type(actual) is type(expected), name
        assert actual == expected, name


@pytest.mark.parametrize("golden", PLANS, ids=lambda golden: f"d{golden['inputs']['depth']}")
def test_plan_equals_the_familys(golden: dict) -> None:
    expected = {key: value for key, value in golden.items() if key != "inputs"}
    assert_equal(plan(PlanInputs(**golden["inputs"])).to_dict(), expected, "plan")


@pytest.mark.parametrize(
    "name", ["plain_gqa_window", "default_gqa_window", "plain_mha_full_odd", "default_mha_full_odd"]
)
def test_costs_equal_the_familys_models(name: str) -> None:
    golden = json.loads((GOLDEN / "model" / f"{name}.json").read_text())
    shape = golden["config"]
    config = ModelConfig(
        sequence_len=shape["sequence_len"],
        vocab_size=shape["vocab_size"],
        num_layers=shape["n_layer"],
        num_heads=shape["n_head"],
        num_kv_heads=shape["n_kv_head"],
        model_dim=shape["n_embd"],
        window_pattern=shape["window_pattern"],
    )
    counts = parameter_counts(config)
    assert dataclasses.asdict(counts) | {"total": counts.total} == golden["params"]
    assert golden["flops_per_token"] - flops_per_token(config) == (SMEAR_GATE_FLOPS if "default" in name else 0)


@pytest.mark.parametrize("era", ["oct2025", "jan16", "mar02", "mar09"])
def test_parameters_of_every_era_are_those_in_its_file(era: str) -> None:
    safetensors = pytest.importorskip("safetensors")
    shape = json.loads((GOLDEN / "eras" / f"{era}.json").read_text())["model_config"]
    constants = {
        "oct2025": Constants(
            value_embed_scale=0.0, vocab_multiple=1, residual_lambdas=False, smear=False, backout=False
        ),
        "mar09": Constants(smear=False, backout=False),
    }.get(era, Constants(value_gate_channels=32, smear=False, backout=False))
    config = ModelConfig(
        sequence_len=shape["sequence_len"],
        vocab_size=shape["vocab_size"],
        num_layers=shape["n_layer"],
        num_heads=shape["n_head"],
        num_kv_heads=shape["n_kv_head"],
        model_dim=shape["n_embd"],
        constants=constants,
    )
    with safetensors.safe_open(GOLDEN / "eras" / f"{era}.safetensors", "np") as file:
        names = [name for name in file.keys() if name.startswith("param.")]  # noqa: SIM118 - not a mapping
        sizes = {name: file.get_tensor(name).size for name in names}
    counts = parameter_counts(config)
    assert counts.total == sum(sizes.values())
    assert counts.value_embeds == sum(size for name, size in sizes.items() if "value_embeds" in name)
    assert counts.transformer_matrices == sum(size for name, size in sizes.items() if "transformer.h." in name)


def test_every_number_of_the_plan_has_a_reason() -> None:
    for inputs in (PlanInputs(), PlanInputs(num_iterations=7, total_batch_size=2**15, target_param_data_ratio=0)):
        planned = plan(inputs)
        assert set(planned.reasons) == set(planned.to_dict())
        assert all(planned.reasons.values())


def test_both_ratios_divide_the_tokens_really_trained_on() -> None:
    planned = plan(
        PlanInputs(depth=12, window_pattern="L", total_batch_size=2**16, num_iterations=87_000, max_seq_len=2048)
    )
    assert planned.tokens_per_scaling_param == pytest.approx(51.8, abs=0.05)
    assert planned.tokens_per_param == pytest.approx(19.9, abs=0.05)


def test_fewer_key_value_heads_change_the_model_but_not_the_reference() -> None:
    few, all_heads = plan(PlanInputs(depth=12, num_kv_heads=2)), plan(PlanInputs(depth=12))
    assert few.to_dict()["model"]["n_kv_head"] == 2
    assert few.scaling_params < all_heads.scaling_params
    assert few.weight_decay > all_heads.weight_decay == 0.28


def test_batch_and_decay_without_a_ratio_are_those_of_any_ratio() -> None:
    without = plan(PlanInputs(target_param_data_ratio=-1, num_iterations=100))
    given_ratio = plan(PlanInputs(target_param_data_ratio=12, num_iterations=100))
    assert without.total_batch_size == given_ratio.total_batch_size
    assert without.weight_decay == pytest.approx(given_ratio.weight_decay, rel=1e-6)
    assert without.target_tokens == without.total_tokens == 100 * without.total_batch_size


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"depth": 0}, "--depth"),
        ({"aspect_ratio": 0}, "--aspect-ratio"),
        ({"aspect_ratio": -64}, "--aspect-ratio"),
        ({"head_dim": 0}, "--head-dim"),
        ({"head_dim": 127}, "head dim 127"),
        ({"depth": 1, "aspect_ratio": 1, "head_dim": 2}, "model dim"),
        ({"max_seq_len": 0}, "sequence_len"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"window_pattern": "SXL"}, "window pattern"),
        ({"num_kv_heads": 3}, "key-value heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"target_param_data_ratio": 0}, "--target-param-data-ratio"),
        ({"target_param_data_ratio": -1.0}, "--target-param-data-ratio"),
        ({"target_param_data_ratio": 1e-12}, "--target-param-data-ratio"),
        ({"target_param_data_ratio": float("nan")}, "--target-param-data-ratio"),
        ({"target_flops": float("inf")}, "--target-flops"),
        ({"target_flops": 1.0}, "--target-flops"),
        ({"weight_decay": -0.1}, "--weight-decay"),
        ({"total_batch_size": 100}, "--total-batch-size"),
        ({"total_batch_size": 2**40}, "--total-batch-size"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_sentence(changes: dict, word: str) -> None:
    with pytest.raises(UserError) as refusal:
        plan(PlanInputs(**changes))
    assert word in str(refusal.value)
    assert "\n" not in str(refusal.value)


@given(
    depth=st.integers(1, 64),
    aspect_ratio=st.integers(1, 256),
    head_dim=st.integers(1, 128).map(lambda half: 2 * half),
)
def test_model_dim_is_the_least_number_of_whole_heads(depth: int, aspect_ratio: int, head_dim: int) -> None:
    wanted = depth * aspect_ratio
    if -(-wanted // head_dim) * head_dim < 24:
        with pytest.raises(UserError):
            model_config(depth, aspect_ratio, head_dim)
        return
    config = model_config(depth, aspect_ratio, head_dim)
    assert config.head_dim == head_dim
    assert wanted <= config.model_dim < wanted + head_dim
    assert scaling_parameters(config) < parameter_counts(config).total


def test_gradient_accumulation_is_the_number_of_passes() -> None:
    assert gradient_accumulation(524_288, 32, 2048, 1) == 8
    assert gradient_accumulation(524_288, 32, 2048, 8) == 1
    assert gradient_accumulation(65_536, 8, 2048, 1) == 4


@pytest.mark.parametrize(
    ("sizes", "choices"),
    [
        ((65_536, 24, 2048, 1), ["--total-batch-size 49152", "--device-batch-size 16"]),
        ((65_536, 64, 2048, 1), ["--total-batch-size 131072", "--device-batch-size 32"]),
        ((500_000, 32, 2048, 1), ["--total-batch-size 524288"]),
        ((0, 32, 2048, 1), ["total batch"]),
        ((65_536, 0, 2048, 1), ["device batch"]),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_choices(sizes: tuple, choices: list[str]) -> None:
    with pytest.raises(UserError) as refusal:
        gradient_accumulation(*sizes)
    for choice in choices:
        assert choice in str(refusal.value)


@given(
    total=st.integers(1, 2**20),
    device=st.integers(1, 64),
    sequence_len=st.sampled_from([64, 100, 512]),
    world=st.integers(1, 8),
)
def test_the_choices_named_do_divide(total: int, device: int, sequence_len: int, world: int) -> None:
    try:
        assert gradient_accumulation(total, device, sequence_len, world) * device * sequence_len * world == total
    except UserError as refusal:
        words = str(refusal).split()
        suggested = {flag: int(words[words.index(flag) + 1]) for flag in words if flag.startswith("--")}
        assert gradient_accumulation(suggested["--total-batch-size"], device, sequence_len, world) >= 1
        if "--device-batch-size" in suggested:
            assert suggested["--device-batch-size"] <= device
            assert gradient_accumulation(total, suggested["--device-batch-size"], sequence_len, world) >= 1


def test_planning_loads_no_torch() -> None:
    code = "import nanochat.plan, nanochat.optim.schedule, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
