"""The model computes what the family's does: logits, losses, gradients, initial values."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from golden_model import MODEL_NAMES, deviation, load_golden
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.errors import UserError
from nanochat.model.config import Constants, ModelConfig
from nanochat.model.gpt import GPT
from nanochat.model.init import initialize
from nanochat.ops import reference
from nanochat.ops.attention import sdpa

FP32_TOLERANCE = 1e-5
#: backout_lambda's gradient is a near-cancelling sum.
BACKOUT_RELATIVE, BACKOUT_ABSOLUTE = 1e-4, 1e-6
#: bf16 keeps 8 bits; the losses of a tiny model move by about this much.
BF16_LOSS_TOLERANCE = 0.05
FP16_LOSS_TOLERANCE = 0.01
ATTENTION_TOLERANCE = 1e-5

TINY = ModelConfig(
    sequence_len=32, vocab_size=70, num_layers=3, num_heads=4, num_kv_heads=2, model_dim=64, window_pattern="SL"
)


def tiny_model(config: ModelConfig = TINY, seed: int = 0) -> GPT:
    """A model in which nothing is zero, so that every path counts."""
    model = GPT(config)
    initialize(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("c_proj.weight", "lm_head.weight")):
                parameter.normal_(0, 0.1, generator=generator)
            elif name == "smear_lambda":
                parameter.fill_(0.5)
    return model


def tiny_batch(length: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, TINY.vocab_size, (2, length + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[0, :5] = -1
    return ids[:, :-1], targets


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_logits_equal_the_familys(name: str) -> None:
    model, golden = load_golden(f"model/{name}")
    logits = model(golden["tokens"])
    assert logits.dtype == torch.float32
    assert deviation(logits, golden["logits"]) <= FP32_TOLERANCE


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_losses_and_gradients_equal_the_familys(name: str) -> None:
    model, golden = load_golden(f"model/{name}")
    losses = model.losses(golden["tokens"], golden["targets"])
    mean = losses.sum() / (golden["targets"] != -1).sum()
    mean.backward()
    assert deviation(losses.flatten(), golden["loss_none"]) <= FP32_TOLERANCE
    assert deviation(mean[None], golden["loss_mean"]) <= FP32_TOLERANCE
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert {f"grad.{name}" for name in gradients} == {name for name in golden if name.startswith("grad.")}
    for parameter_name, gradient in gradients.items():
        assert gradient is not None
        expected = golden[f"grad.{parameter_name}"]
        if parameter_name == "backout_lambda":
            torch.testing.assert_close(gradient, expected, rtol=BACKOUT_RELATIVE, atol=BACKOUT_ABSOLUTE)
        else:
            assert deviation(gradient, expected) <= FP32_TOLERANCE, parameter_name


def test_losses_are_zero_where_there_is_no_target() -> None:
    ids, targets = tiny_batch()
    losses = tiny_model().losses(ids, targets)
    assert losses.shape == targets.shape
    assert torch.equal(losses == 0, targets == -1)


def test_last_only_equals_the_last_of_all_logits() -> None:
    model, (ids, _) = tiny_model(), tiny_batch()
    torch.testing.assert_close(model(ids, last_only=True), model(ids)[:, -1:], rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE)


def test_logits_are_cropped_to_the_vocabulary_and_capped() -> None:
    model, (ids, _) = tiny_model(), tiny_batch()
    with torch.no_grad():
        model.lm_head.weight.mul_(100)
    logits = model(ids)
    assert TINY.padded_vocab_size > logits.size(-1) == TINY.vocab_size
    assert 14 < logits.abs().max() <= TINY.constants.logit_softcap


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, BF16_LOSS_TOLERANCE), (torch.float16, FP16_LOSS_TOLERANCE)]
)
def test_narrow_dtypes_stay_near_fp32_and_store_only_embeddings_narrow(dtype: torch.dtype, tolerance: float) -> None:
    model, (ids, targets) = tiny_model(), tiny_batch()
    expected = model.losses(ids, targets)
    model.set_compute_dtype(dtype)
    losses = model.losses(ids, targets)
    losses.sum().backward()
    embedding_dtype = torch.float32 if dtype == torch.float16 else dtype
    for name, parameter in model.named_parameters():
        is_embedding = name.startswith(("transformer.wte", "value_embeds"))
        assert parameter.dtype == (embedding_dtype if is_embedding else torch.float32), name
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert losses.dtype == torch.float32
    assert model.hidden(ids).dtype == dtype
    torch.testing.assert_close(losses, expected, rtol=0, atol=tolerance)


def test_float64_is_computed_whole_in_float64() -> None:
    model, (ids, targets) = tiny_model(), tiny_batch()
    expected = model.losses(ids, targets)
    model.set_compute_dtype(torch.float64)
    losses = model.losses(ids, targets)
    assert losses.dtype == torch.float64
    assert deviation(losses, expected.double()) <= FP32_TOLERANCE


def test_a_model_built_on_meta_computes_after_loading() -> None:
    model, (ids, _) = tiny_model(), tiny_batch()
    with torch.device("meta"):
        loaded, emptied = GPT(TINY), GPT(TINY)
    loaded.load_state_dict(model.state_dict(), assign=True)
    emptied.to_empty(device="cpu").load_state_dict(model.state_dict())
    expected = model(ids)
    assert torch.equal(loaded(ids), expected)
    assert torch.equal(emptied(ids), expected)


def test_casting_the_parameters_leaves_rotary_positions_exact() -> None:
    model, (ids, _) = tiny_model(), tiny_batch()
    expected = model(ids)
    assert deviation(model.bfloat16().float()(ids), expected) > FP32_TOLERANCE  # the parameters were rounded
    model.load_state_dict(tiny_model().state_dict())
    assert torch.equal(model(ids), expected)


def test_a_window_hides_what_lies_before_it() -> None:
    model = tiny_model(dataclasses.replace(TINY, num_layers=1, constants=Constants(smear=False)), seed=3)
    ids = torch.arange(60)[None]
    changed = ids.clone()
    changed[0, 0] = 61
    window = model.config.windows[0]
    differs = (model(ids) != model(changed)).any(dim=-1)[0]
    assert differs[: window + 1].all()  # position `window` still sees token 0
    assert not differs[window + 1 :].any()


def test_text_longer_than_the_limit_is_our_mistake() -> None:
    ids = torch.zeros((1, TINY.max_text_len + 1), dtype=torch.long)
    with pytest.raises(AssertionError, match="limit"):
        tiny_model()(ids)


def test_a_model_narrower_than_its_gates_is_refused() -> None:
    with pytest.raises(UserError, match="model dim 16 is too small: the gates read 24"):
        GPT(dataclasses.replace(TINY, model_dim=16))


def test_initial_values_have_the_published_statistics() -> None:
    config = dataclasses.replace(TINY, model_dim=128, vocab_size=1000)
    model = GPT(config)
    initialize(model, 0)
    bound = math.sqrt(3 / config.model_dim)
    for name, value in model.state_dict().items():
        if name.endswith("c_proj.weight") or name == "smear_lambda":
            assert not value.any(), name
        elif name.endswith(("wte.weight", "lm_head.weight")):
            assert value.std().item() == pytest.approx(0.8 if "wte" in name else 0.001, rel=0.02), name
            assert value.abs().max() > 3 * value.std(), name  # normal, not uniform
        elif name.endswith("gate.weight"):
            assert 0 <= value.min() < 0.005, name
            assert 0.015 < value.max() <= 0.02, name
        elif name.endswith(".weight"):
            expected = 0.4 * bound if "c_fc" in name else bound
            assert value.abs().max().item() == pytest.approx(expected, rel=0.01), name
            assert value.std().item() == pytest.approx(expected / math.sqrt(3), rel=0.02), name
    torch.testing.assert_close(model.resid_lambdas.detach(), torch.tensor([1.15, 1.10, 1.05]))
    torch.testing.assert_close(model.x0_lambdas.detach(), torch.tensor([0.20, 0.125, 0.05]))
    assert model.backout_lambda.item() == pytest.approx(0.2)


def test_a_single_layer_starts_at_the_first_lambdas() -> None:
    model = GPT(dataclasses.replace(TINY, num_layers=1))
    initialize(model, 0)
    assert model.resid_lambdas.item() == pytest.approx(1.15)
    assert model.x0_lambdas.item() == pytest.approx(0.20)


def test_a_seed_gives_the_same_model_whatever_its_storage() -> None:
    first, second, narrow = GPT(TINY), GPT(TINY), GPT(TINY)
    narrow.set_compute_dtype(torch.bfloat16)
    initialize(first, 7)
    torch.rand(3)  # the global generator plays no part
    initialize(second, 7)
    initialize(narrow, 7)
    other = GPT(TINY)
    initialize(other, 8)
    for (name, value), same, rounded in zip(
        first.state_dict().items(), second.parameters(), narrow.parameters(), strict=True
    ):
        assert torch.equal(value, same), name
        assert torch.equal(value.to(rounded.dtype), rounded), name
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


@settings(max_examples=60, deadline=None)
@given(
    num_queries=st.integers(1, 9),
    query_offset=st.integers(0, 9),
    window=st.integers(1, 20),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1), (1, 1)]),
)
def test_sdpa_equals_the_reference(num_queries: int, query_offset: int, window: int, heads: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    num_keys = query_offset + num_queries
    q = torch.randn((2, heads[0], num_queries, 8), generator=generator)
    k, v = torch.randn((2, 2, heads[1], num_keys, 8), generator=generator)
    expected = reference.attention(q, k, v, window, query_offset)
    torch.testing.assert_close(
        sdpa(q, k, v, window, query_offset), expected, rtol=ATTENTION_TOLERANCE, atol=ATTENTION_TOLERANCE
    )


def test_sdpa_builds_no_mask_where_the_window_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_mask(*_: object, **__: object) -> None:
        raise AssertionError("a mask was built")

    q = torch.randn(1, 2, 6, 8)
    monkeypatch.setattr(torch, "arange", no_mask)
    sdpa(q, q, q, window=5)
    sdpa(q[:, :, -1:], q, q, window=2, query_offset=5)
    with pytest.raises(AssertionError, match="mask"):
        sdpa(q, q, q, window=4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_compile_into_one_graph_that_computes_the_same(dtype: torch.dtype) -> None:
    model, (ids, targets) = tiny_model(), tiny_batch()
    model.set_compute_dtype(dtype)
    expected = model.losses(ids, targets)
    expected.sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    losses = torch.compile(model.losses, fullgraph=True, dynamic=False, backend="aot_eager")(ids, targets)
    losses.sum().backward()
    torch.testing.assert_close(losses, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], msg=name)
