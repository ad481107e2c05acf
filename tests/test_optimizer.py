"""The optimizer equals the family's, its groups are numbered like the family's files, and its state is by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Parameter

from nanochat.errors import UserError
from nanochat.model.config import ModelConfig
from nanochat.model.gpt import GPT
from nanochat.model.init import initialize
from nanochat.optim.adamw import adamw_step
from nanochat.optim.groups import AdamGroup, MuonGroup, Rates, parameter_groups
from nanochat.optim.muon import equilibrate_rows, muon_step, orthogonalize
from nanochat.optim.optimizer import Compiler, Optimizer, StepFunction

GOLDEN = Path(__file__).parent / "golden"
MODELS = ["plain_gqa_window", "default_gqa_window", "plain_mha_full_odd", "default_mha_full_odd"]

# After three steps in fp32. The tiny epsilon of AdamW and the mask of the decay amplify rounding, so
# not every element can agree.
LOSS_TOLERANCE = 1e-5
TENSOR_TOLERANCE = 1e-4
ELEMENT_RTOL, ELEMENT_ATOL, ELEMENTS_WITHIN = 1e-4, 1e-5, 0.98
# The first step of AdamW is lr · g / (|g| + 1e-10). Where |g| itself is near that epsilon, the rounding
# of the forward and of the CPU's kernels decides the step (one element of the embedding, 2e-9, moves by
# 5e-3), and the next steps spread it. Those few elements start from the family's own gradient, so that
# the optimizer is compared and not the kernels; gradients are compared in test_model.py.
NEAR_EPSILON = 1e-8
SETTLED_AT_MOST = 2e-4

#: The same arithmetic in another order.
FP32_TOLERANCE = 1e-5
#: Polar Express maps singular values to somewhere near 1.
SINGULAR_VALUES = (0.7, 1.3)


def config_of(shape: dict) -> ModelConfig:
    return ModelConfig(
        sequence_len=shape["sequence_len"],
        vocab_size=shape["vocab_size"],
        num_layers=shape["n_layer"],
        num_heads=shape["n_head"],
        num_kv_heads=shape["n_kv_head"],
        model_dim=shape["n_embd"],
        window_pattern=shape["window_pattern"],
    )


def small_model(num_layers: int = 2, model_dim: int = 32, num_kv_heads: int = 2) -> GPT:
    model = GPT(ModelConfig(16, 50, num_layers, 2, num_kv_heads, model_dim))
    initialize(model, seed=1)
    return model


def optimizer_of(model: GPT, rates: Rates | None = None, compiler: Compiler | None = None) -> Optimizer:
    parameters = dict(model.named_parameters())
    groups = parameter_groups(parameters, rates or Rates(), model.config.model_dim)
    return Optimizer(parameters, groups, compiler=compiler)


def train_steps(model: GPT, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(model.config.vocab_size, (2, 17), generator=generator)
        model.losses(ids[:, :-1], ids[:, 1:]).mean().backward()
        optimizer.step(1 / (1 + step), 0.85 + step / 100, 0.1 / (1 + step))
        optimizer.zero_grad()


def step_on_random_gradients(model: GPT, optimizer: Optimizer, step: int) -> None:
    """One step that rounding cannot grow in, since the gradients do not depend on the parameters."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step(1 / (1 + step), 0.85 + step / 100, 0.1 / (1 + step))


def assert_same_parameters(one: GPT, other: GPT, tolerance: float = 0.0) -> None:
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


def three_steps(name: str, *, settle_rounding: bool) -> tuple[dict[str, Parameter], dict[str, Tensor]]:
    """Train one of the family's models as it was trained there, checking the losses.

    With ``settle_rounding``, elements of the first gradient that are near epsilon come from the file.
    """
    golden = json.loads((GOLDEN / "model" / f"{name}.json").read_text())
    tensors = load_file(GOLDEN / "model" / f"{name}.safetensors")
    model = GPT(config_of(golden["config"]))
    model.load_state_dict({key.removeprefix("param."): value for key, value in tensors.items() if "param." in key})
    settings = golden["optimizer"]
    rates = Rates(settings["embedding_lr"], settings["unembedding_lr"], settings["matrix_lr"], settings["scalar_lr"])
    parameters = dict(model.named_parameters())
    groups = parameter_groups(parameters, rates, model.config.model_dim)
    improved = name.startswith("default")
    optimizer = Optimizer(parameters, groups, row_equilibration=improved, renormalize=improved)
    targets = tensors["targets"]
    for step, expected_loss in enumerate(golden["losses"]):
        loss = model.losses(tensors["tokens"], targets).sum() / (targets != -1).sum()
        assert loss.item() == pytest.approx(expected_loss, rel=LOSS_TOLERANCE)
        loss.backward()
        if settle_rounding and step == 0:
            settle_near_epsilon(parameters, tensors)
        optimizer.step(1.0, 0.95, settings["weight_decay"])
        optimizer.zero_grad()
    return parameters, tensors


def settle_near_epsilon(parameters: dict[str, Parameter], tensors: dict[str, Tensor]) -> None:
    num_settled = num_elements = 0
    for key, parameter in parameters.items():
        expected = tensors[f"grad.{key}"]
        near = (expected != 0) & (expected.abs() < NEAR_EPSILON)
        assert parameter.grad is not None
        parameter.grad[near] = expected[near]
        num_settled += int(near.sum())
        num_elements += near.numel()
    assert num_settled <= SETTLED_AT_MOST * num_elements


@pytest.mark.parametrize("name", MODELS)
def test_losses_of_three_steps_equal_the_familys(name: str) -> None:
    three_steps(name, settle_rounding=False)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_after_three_steps_equal_the_familys(name: str) -> None:
    parameters, tensors = three_steps(name, settle_rounding=True)
    for key, parameter in parameters.items():
        expected = tensors[f"after3.{key}"]
        difference = parameter.detach() - expected
        assert difference.norm() <= TENSOR_TOLERANCE * expected.norm(), key
        within = difference.abs() <= ELEMENT_ATOL + ELEMENT_RTOL * expected.abs()
        assert within.float().mean() >= ELEMENTS_WITHIN, key


def test_groups_are_numbered_like_the_familys_optimizer_file() -> None:
    folder = GOLDEN / "run" / "base_checkpoints" / "d2"
    saved = torch.load(folder / "optim_000060_rank0.pt", weights_only=True, map_location="cpu")
    model = GPT(config_of(json.loads((folder / "meta_000060.json").read_text())["model_config"]))
    parameters = dict(model.named_parameters())
    groups = parameter_groups(parameters, Rates(), model.config.model_dim)

    lengths = [len(group["params"]) for group in saved["param_groups"]]
    # The family keeps one group where there may be several of the same settings: only the order counts.
    assert sum(lengths) == sum(len(group.names) for group in groups)
    number = 0
    for group in groups:
        first = saved["state"][number]
        if isinstance(group, MuonGroup):
            assert first["momentum_buffer"].shape == (len(group.names), *group.shape)
        else:
            for offset, name in enumerate(group.names):
                assert saved["state"][number + offset]["exp_avg"].shape == parameters[name].shape, name
        number += len(group.names)


@pytest.mark.parametrize("era", ["oct2025", "jan16", "mar02", "mar09"])
def test_every_parameter_of_every_era_is_in_one_group(era: str) -> None:
    with safe_open(GOLDEN / "eras" / f"{era}.safetensors", "pt") as file:
        keys = [key for key in file.keys() if key.startswith("param.")]  # noqa: SIM118 - not a mapping
        parameters = {key.removeprefix("param."): file.get_tensor(key) for key in keys}
    names = [name for group in parameter_groups(parameters, Rates(), 64) for name in group.names]
    assert sorted(names) == sorted(parameters)


def test_groups_do_not_depend_on_the_order_of_the_mapping() -> None:
    parameters = dict(small_model(num_layers=12).named_parameters())
    shuffled = dict(sorted(parameters.items(), reverse=True))
    groups = parameter_groups(parameters, Rates(), 32)
    assert parameter_groups(shuffled, Rates(), 32) == groups
    shapes = [group.shape for group in groups if isinstance(group, MuonGroup)]
    assert shapes == sorted(shapes)
    gates = next(group for group in groups if isinstance(group, MuonGroup) and "ve_gate" in group.names[0])
    assert [int(name.split(".")[2]) for name in gates.names] == [1, 3, 5, 7, 9, 11]


def test_width_scales_the_rates_of_tables_only() -> None:
    parameters = dict(small_model().named_parameters())
    rates = Rates(embedding=0.3, unembedding=0.008, matrix=0.02, scalar=0.5, smear=0.2)
    narrow, reference = parameter_groups(parameters, rates, 192), parameter_groups(parameters, rates, 768)
    ratios = {a.names[0]: a.lr / b.lr for a, b in zip(narrow, reference, strict=True)}
    doubled = {name for name, ratio in ratios.items() if ratio == pytest.approx(2.0)}
    assert doubled == {"lm_head.weight", "transformer.wte.weight", "value_embeds.1.weight"}
    assert {ratio for name, ratio in ratios.items() if name not in doubled} == {1.0}
    assert [group.lr for group in reference if isinstance(group, AdamGroup)] == pytest.approx(
        [0.008, 0.3, 0.15, 0.005, 0.5, 0.2]
    )


def test_an_unknown_parameter_is_our_mistake() -> None:
    parameters = dict(small_model().named_parameters()) | {"bias": Parameter(torch.zeros(1))}
    with pytest.raises(AssertionError, match="bias"):
        parameter_groups(parameters, Rates(), 32)


def test_adamw_equals_torchs_own() -> None:
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(7, 5, generator=generator)
    theirs = Parameter(ours.clone())
    reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.1)
    exp_avg, exp_avg_sq = torch.zeros_like(ours), torch.zeros_like(ours)
    for step in range(1, 6):
        grad = torch.randn(7, 5, generator=generator)
        theirs.grad = grad.clone()
        reference.step()
        adamw_step(ours, grad, exp_avg, exp_avg_sq, step, 0.01, 0.8, 0.95, 1e-10, 0.1)
    torch.testing.assert_close(ours, theirs.detach(), rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE)


def test_adamw_on_bf16_storage_is_fp32_arithmetic_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    stored = [torch.rand(40, generator=generator).bfloat16() for _ in range(4)]
    wide = [tensor.float() for tensor in stored]
    for param, grad, exp_avg, exp_avg_sq in (stored, wide):
        adamw_step(param, grad, exp_avg, exp_avg_sq, 3, 0.1, 0.8, 0.95, 1e-10, 0.1)
    for narrow, exact in zip(stored, wide, strict=True):
        assert narrow.dtype == torch.bfloat16
        assert torch.equal(narrow, exact.bfloat16())


@pytest.mark.parametrize("shape", [(24, 24), (48, 12), (12, 48)])
def test_orthogonalized_is_near_the_polar_factor(shape: tuple[int, int]) -> None:
    matrix = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    aligned = left.mT @ orthogonalize(matrix) @ right.mT
    values = aligned.diagonal(dim1=-2, dim2=-1)
    assert SINGULAR_VALUES[0] < values.min()
    assert values.max() < SINGULAR_VALUES[1]
    torch.testing.assert_close(aligned, torch.diag_embed(values), rtol=0, atol=1e-3)


def test_equilibrated_rows_have_one_norm_and_the_matrix_keeps_its_own() -> None:
    matrix = torch.randn(3, 6, 10, generator=torch.Generator().manual_seed(0))
    matrix[:, 0] *= 100
    even = equilibrate_rows(matrix)
    torch.testing.assert_close(even.norm(dim=-1), even.norm(dim=-1)[:, :1].expand(3, 6))
    torch.testing.assert_close(even.norm(dim=(-2, -1)), matrix.norm(dim=(-2, -1)))


def plain_muon_step(param: Tensor, grad: Tensor, first: Tensor, second: Tensor, lr: float, decay: float) -> Tensor:
    """One default step on one matrix, written out in plain loops over rows; returns the new matrix."""
    momentum, beta2 = 0.9, 0.9
    rows, columns = param.shape
    first.copy_(momentum * first + (1 - momentum) * grad)
    x = (1 - momentum) * grad + momentum * first
    even = x.norm() / rows**0.5
    x = torch.stack([row * (even / max(row.norm().item(), 1e-6)) for row in x])
    x = orthogonalize(x[None])[0]
    x = x * (min(rows, columns) ** 0.5 / x.norm())
    lines = list(x if rows >= columns else x.T)
    mean_squares = torch.stack([line.square().mean() for line in lines])
    second.copy_(beta2 * second.flatten() + (1 - beta2) * mean_squares)
    scaled = torch.stack([line / second[i].sqrt() for i, line in enumerate(lines)])
    scaled = scaled * (x.norm() / scaled.norm())
    x = scaled if rows >= columns else scaled.T
    rate = lr * max(1.0, rows / columns) ** 0.5
    decayed = torch.where(x * param >= 0, param * (1 - rate * decay), param)
    return decayed - rate * x


@pytest.mark.parametrize("shape", [(8, 8), (12, 4), (4, 12), (1, 12)])
def test_muon_on_a_stack_equals_plain_steps_one_by_one(shape: tuple[int, int]) -> None:
    rows, columns = shape
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(3, rows, columns, generator=generator)
    plain = list(stack.clone())
    first = torch.zeros_like(stack)
    second = torch.zeros(3, rows, 1) if rows >= columns else torch.zeros(3, 1, columns)
    plain_first, plain_second = torch.zeros_like(stack), torch.zeros(3, max(rows, columns))
    for _ in range(3):
        grads = torch.randn(3, rows, columns, generator=generator)
        before = grads.clone()
        muon_step(stack, grads, first, second, 0.05, 0.9, 0.9, 0.2)
        assert torch.equal(grads, before)
        for i in range(3):
            plain[i] = plain_muon_step(plain[i], grads[i], plain_first[i], plain_second[i], 0.05, 0.2)
    torch.testing.assert_close(stack, torch.stack(plain), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(second.flatten(1), plain_second, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("improved", [True, False])
def test_zero_gradients_only_decay(compute_dtype: torch.dtype, improved: bool) -> None:
    stack = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))
    expected = stack * (1 - 0.02 * 2**0.5 * 0.1)
    first, second = torch.zeros_like(stack), torch.zeros(2, 8, 1)
    settings = {"row_equilibration": improved, "renormalize": improved, "compute_dtype": compute_dtype}
    muon_step(stack, torch.zeros_like(stack), first, second, 0.02, 0.95, 0.9, 0.1, **settings)
    torch.testing.assert_close(stack, expected)
    assert first.count_nonzero() == second.count_nonzero() == 0


def test_orthogonalizing_in_bf16_points_the_same_way() -> None:
    grads = torch.randn(2, 32, 16, generator=torch.Generator().manual_seed(0))
    steps = []
    for dtype in (torch.float32, torch.bfloat16):
        stack = torch.zeros_like(grads)
        muon_step(stack, grads, torch.zeros_like(grads), torch.zeros(2, 32, 1), 0.1, 0.9, 0.9, 0.0, compute_dtype=dtype)
        assert stack.dtype == torch.float32
        steps.append(stack.flatten())
    assert torch.cosine_similarity(*steps, dim=0) > 0.999


def test_float64_parameters_are_computed_in_float64() -> None:
    model = small_model()
    model.set_compute_dtype(torch.float64)
    optimizer = optimizer_of(model)
    train_steps(model, optimizer, range(2))
    assert {tensor.dtype for tensor in optimizer.state_tensors().values()} == {torch.float64}
    assert any((parameter != parameter.float()).any() for parameter in model.parameters())


def test_moments_have_the_dtype_of_their_parameter() -> None:
    model = small_model()
    model.set_compute_dtype(torch.bfloat16)
    optimizer = optimizer_of(model)
    train_steps(model, optimizer, range(1))
    parameters = dict(model.named_parameters())
    for key, tensor in optimizer.state_tensors().items():
        name, _, moment = key.rpartition(".")
        assert tensor.dtype == parameters[name].dtype, key
        if moment != "second_momentum_buffer":
            assert tensor.shape == parameters[name].shape, key


def test_resumed_equals_uninterrupted() -> None:
    model = small_model()
    optimizer = optimizer_of(model)
    train_steps(model, optimizer, range(3))
    resumed = copy.deepcopy(model)
    again = optimizer_of(resumed)
    again.load_state_tensors({key: tensor.clone() for key, tensor in optimizer.state_tensors().items()}, 3)
    train_steps(model, optimizer, range(3, 6))
    train_steps(resumed, again, range(3, 6))
    assert again.step_count == optimizer.step_count == 6
    assert_same_parameters(model, resumed)


def test_state_of_another_model_is_refused_and_changes_nothing() -> None:
    optimizer = optimizer_of(small_model())
    before = {key: tensor.clone() for key, tensor in optimizer.state_tensors().items()}
    damaged = {key: tensor + 1 for key, tensor in before.items()}
    first, *_, last = damaged
    for state, step_count, word in (
        ({key: tensor for key, tensor in damaged.items() if key != last}, 1, last),
        (damaged | {"other.exp_avg": torch.zeros(1)}, 1, "other.exp_avg"),
        (damaged | {first: torch.zeros(1, 1)}, 1, first),
        (damaged, -1, "step count"),
    ):
        with pytest.raises(UserError, match=word):
            optimizer.load_state_tensors(state, step_count)
    assert optimizer.step_count == 0
    assert all(torch.equal(tensor, before[key]) for key, tensor in optimizer.state_tensors().items())


def test_a_parameter_without_gradient_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="lm_head"):
        optimizer_of(small_model()).step(1.0, 0.95, 0.0)


def test_any_number_of_shapes_compiles_once_each_and_equals_uncompiled() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def compiler(function: StepFunction) -> StepFunction:
        return torch.compile(function, backend=backend, fullgraph=True)

    num_shapes = 0
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for model_dim in (32, 48, 64):
            plain = small_model(num_layers=3, model_dim=model_dim, num_kv_heads=1)
            compiled = copy.deepcopy(plain)
            eager, fast = optimizer_of(plain), optimizer_of(compiled, compiler=compiler)
            shapes = {parameter.shape for name, parameter in plain.named_parameters() if ".h." in name}
            num_shapes += len(shapes)
            for step in range(3):
                step_on_random_gradients(plain, eager, step)
                step_on_random_gradients(compiled, fast, step)
                if step == 0:
                    num_graphs = len(graphs)
            assert len(graphs) == num_graphs, "a changed rate compiles nothing"
            assert_same_parameters(plain, compiled, FP32_TOLERANCE)
    assert num_shapes > torch._dynamo.config.recompile_limit
