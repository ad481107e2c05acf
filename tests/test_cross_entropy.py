"""The chunked cross-entropy computes what the plain one does, and never holds all logits."""

from __future__ import annotations

import pytest
import torch
from golden_model import deviation
from hypothesis import given, settings
from hypothesis import strategies as st
from largest_tensor import largest_tensor
from torch import Tensor

from nanochat.ops import cross_entropy as chunked
from nanochat.ops import reference
from nanochat.ops.cross_entropy import cross_entropy

#: Relative to the largest value. Only the plain twin rounds the sum over tokens to the narrow dtype.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCES)
DIM, VOCAB_SIZE, ROWS, SOFTCAP = 16, 70, 128, 15.0


def example(
    shape: tuple[int, ...] = (3, 11), dtype: torch.dtype = torch.float32, scale: float = 4.0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a matrix in fp32 (or float64) with padding rows, and targets of which some are none."""
    generator = torch.Generator().manual_seed(seed)
    hidden = (scale * torch.randn(*shape, DIM, generator=generator)).to(dtype).requires_grad_()
    storage = torch.promote_types(dtype, torch.float32)
    weight = torch.randn(ROWS, DIM, generator=generator).to(storage).requires_grad_()
    targets = torch.randint(-1, VOCAB_SIZE, shape, generator=generator)
    targets.view(-1)[:2] = -1
    return hidden, weight, targets


def gradients(
    function: object, hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    losses = function(hidden, weight, targets, VOCAB_SIZE, SOFTCAP)
    return losses.detach(), *torch.autograd.grad(losses, (hidden, weight), upstream)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", 4 * VOCAB_SIZE)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("weighting", ["equal", "different", "zero", "targets only"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_losses_and_gradients_equal_the_plain_ones(dtype: torch.dtype, weighting: str) -> None:
    hidden, weight, targets = example(dtype=dtype)
    upstream = torch.randn(targets.shape, generator=torch.Generator().manual_seed(1))
    if weighting != "different":
        upstream = torch.full(targets.shape, 0.0 if weighting == "zero" else 0.03)
    if weighting == "targets only":
        upstream[targets < 0] = 7.0  # leads nowhere
    upstream = upstream.to(torch.promote_types(dtype, torch.float32))
    expected = gradients(reference.cross_entropy, hidden, weight, targets, upstream)
    actual = gradients(cross_entropy, hidden, weight, targets, upstream)
    for name, ours, plain in zip(("losses", "hidden", "weight"), actual, expected, strict=True):
        assert ours.dtype == plain.dtype, name
        scale = plain.abs().max().clamp(min=1e-30).item()
        torch.testing.assert_close(ours, plain, rtol=0, atol=TOLERANCES[dtype] * scale, msg=name)
    assert torch.equal(actual[0] == 0, targets == -1)
    assert not actual[2][VOCAB_SIZE:].any()


@settings(max_examples=40, deadline=None)
@given(num_tokens=st.integers(0, 20), chunk_rows=st.integers(0, 7), scale=st.floats(0, 30), seed=st.integers(0, 9))
def test_any_chunking_gives_the_same(num_tokens: int, chunk_rows: int, scale: float, seed: int) -> None:
    hidden, weight, targets = example((1, num_tokens), torch.float64, scale, seed=seed) if num_tokens else empty()
    upstream = torch.randn(targets.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected = gradients(reference.cross_entropy, hidden, weight, targets, upstream)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "CHUNK_LOGITS", chunk_rows * VOCAB_SIZE)
        actual = gradients(cross_entropy, hidden, weight, targets, upstream)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCES[torch.float64], atol=TOLERANCES[torch.float64])


def test_tiny_unequal_weights_do_not_vanish_in_float16() -> None:
    hidden, weight, targets = example(dtype=torch.float16)
    upstream = torch.rand(targets.shape, generator=torch.Generator().manual_seed(1))
    _, _, expected = gradients(cross_entropy, hidden, weight, targets, upstream)
    _, _, tiny = gradients(cross_entropy, hidden, weight, targets, upstream * 1e-9)
    assert deviation(tiny * 1e9, expected) <= TOLERANCES[torch.float16]


def empty() -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.zeros(1, 0, DIM, dtype=torch.float64, requires_grad=True)
    weight = torch.zeros(ROWS, DIM, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.zeros(1, 0, dtype=torch.long)


@pytest.mark.usefixtures("small_chunks")
def test_derivatives_equal_differences() -> None:
    hidden, weight, targets = example((7,), torch.float64)
    assert torch.autograd.gradcheck(
        lambda hidden, weight: cross_entropy(hidden, weight, targets, VOCAB_SIZE, SOFTCAP), (hidden, weight)
    )


@pytest.mark.usefixtures("small_chunks")
def test_the_operators_keep_torchs_rules() -> None:
    hidden, weight, targets = example((9,))
    torch.library.opcheck(chunked._forward, (hidden, weight, targets, VOCAB_SIZE, SOFTCAP, True))
    constants = hidden.detach(), weight.detach()
    torch.library.opcheck(chunked._forward, (*constants, targets, VOCAB_SIZE, SOFTCAP, False))
    factors, unit = torch.rand(9), torch.rand(ROWS, DIM)
    torch.library.opcheck(
        chunked._weighted_gradient,
        (factors, unit, *constants, targets, VOCAB_SIZE, SOFTCAP),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.usefixtures("small_chunks")
def test_without_gradients_the_losses_are_the_same() -> None:
    hidden, weight, targets = example()
    expected = cross_entropy(hidden, weight, targets, VOCAB_SIZE, SOFTCAP).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            losses = cross_entropy(hidden, weight, targets, VOCAB_SIZE, SOFTCAP)
        assert deviation(losses, expected) <= TOLERANCES[torch.float32]


def test_only_the_wanted_gradient_is_given() -> None:
    hidden, weight, targets = example()
    for wanted, frozen in ((hidden, weight), (weight, hidden)):
        frozen.requires_grad_(False)
        cross_entropy(hidden, weight, targets, VOCAB_SIZE, SOFTCAP).sum().backward()
        assert wanted.grad is not None
        assert frozen.grad is None
        frozen.requires_grad_()
        wanted.grad = None


def test_a_loss_far_beyond_what_probabilities_can_tell_stays_finite() -> None:
    cap = 200.0
    hidden = torch.tensor([[1000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    targets = torch.tensor([1])
    losses = cross_entropy(hidden, weight, targets, 2, cap)
    torch.testing.assert_close(losses, reference.cross_entropy(hidden, weight, targets, 2, cap))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("equal", [True, False])
def test_nothing_grows_with_tokens_times_vocabulary(equal: bool) -> None:
    hidden, weight, targets = example((4, 300))
    upstream = torch.ones(4, 300) if equal else torch.rand(4, 300)
    assert largest_tensor(lambda: gradients(cross_entropy, hidden, weight, targets, upstream)) <= hidden.numel()
    plain = largest_tensor(lambda: gradients(reference.cross_entropy, hidden, weight, targets, upstream))
    assert plain >= targets.numel() * VOCAB_SIZE


def test_a_model_computes_the_same_losses_in_chunks_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanochat.model import gpt, init

    model = gpt.GPT(gpt.ModelConfig(16, 50, 2, 2, 1, 32))
    init.initialize(model, 1)
    ids = torch.randint(50, (2, 17), generator=torch.Generator().manual_seed(1))

    def losses_and_gradient(most: int) -> tuple[torch.Tensor, torch.Tensor]:
        monkeypatch.setattr(gpt, "MOST_LOGITS_AT_ONCE", most)
        losses = model.losses(ids[:, :-1], ids[:, 1:])
        (gradient,) = torch.autograd.grad(losses.sum(), model.lm_head.weight)
        return losses, gradient

    for at_once, in_chunks in zip(losses_and_gradient(2**24), losses_and_gradient(0), strict=True):
        torch.testing.assert_close(in_chunks, at_once)
