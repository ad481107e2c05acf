"""Cross-entropy behind a soft-capped output projection, without ever holding the logits of all tokens.

The logits of N tokens are by far the largest tensor of a small model: N · V numbers, several times over. Here a chunk
of tokens goes all the way at once, from hidden states to losses and to the gradient of each loss, and only results of
the size of the hidden states and of the matrix are kept. The plain twin is
:func:`nanochat.ops.reference.cross_entropy`.

Backward then has next to nothing to do where every target's loss is weighted alike, as in training: the kept gradients
are multiplied by that weight. The gradient of the hidden states can be so for any weights; that of the matrix is a sum
over tokens, so unequal weights compute it once more, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Logits in a chunk: 32 MiB of fp32, yet enough rows for full speed at any vocabulary of today.
CHUNK_LOGITS = 2**23


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float) -> Tensor:
    """Losses −log softmax(cap · tanh(hidden · weightᵀ / cap))[target], in nats.

    The product is computed in the dtype of the hidden states, everything after it at least in fp32, and so is the sum
    over tokens in the gradient of the matrix. Tokens without a target cost nothing.

    Args:
        hidden: (…, C).
        weight: (rows, C) in any dtype; rows from ``vocab_size`` on are padding, and their gradient is zero.
        targets: (…) int64 below ``vocab_size``, −1 for none.
        softcap: no logit's magnitude exceeds it.

    Returns:
        (…) in fp32 (float64 when the hidden states are), 0 where there is no target.
    """
    differentiable = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    rows, flat_targets = hidden.flatten(0, -2), targets.flatten()
    losses: Tensor = _forward(rows, weight, flat_targets, vocab_size, softcap, differentiable)[0]
    return losses.view_as(targets)


@torch.library.custom_op("nanochat::cross_entropy", mutates_args=())
def _forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float, differentiable: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (N,), and their gradients: each for its own hidden state (N, C), and their sum for the matrix."""
    losses, hidden_gradient, weight_gradient = _results(hidden, weight, targets, differentiable)
    for chunk in _chunks(hidden, weight[:vocab_size], targets, softcap):
        losses[chunk.rows] = chunk.losses()
        if differentiable:
            slopes = chunk.slopes()
            hidden_gradient[chunk.rows] = slopes @ chunk.matrix
            _add_product(weight_gradient[:vocab_size], slopes.T, chunk.inputs)
    return losses, hidden_gradient, weight_gradient


@_forward.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float, differentiable: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _results(hidden, weight, targets, differentiable)


def _results(hidden: Tensor, weight: Tensor, targets: Tensor, differentiable: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors that the forward fills, empty in the places of gradients that nobody wants."""
    losses = torch.zeros_like(targets, dtype=_precise(hidden))
    if not differentiable:
        return losses, hidden.new_empty(0), weight.new_empty(0)
    hidden_gradient = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
    return losses, hidden_gradient, _zero_sum(hidden, weight)


@torch.library.custom_op("nanochat::cross_entropy_weight_gradient", mutates_args=())
def _weighted_gradient(
    factors: Tensor, gradient: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float
) -> Tensor:
    """Gradient of Σ factor · loss for the matrix, from that of Σ loss where all factors (N,) of targets are one."""
    given = factors[targets >= 0]
    if bool((given == given[:1]).all()):
        return gradient * given[0] if len(given) else gradient.clone()
    total = _zero_sum(hidden, weight)
    largest = given.abs().max()  # what is left after dividing by it does not vanish in a narrow dtype
    shares = (factors / largest).to(hidden.dtype)
    for chunk in _chunks(hidden, weight[:vocab_size], targets, softcap):
        chunk.losses()
        slopes = chunk.slopes()
        _add_product(total[:vocab_size], slopes.T, chunk.inputs * shares[chunk.rows, None])
    return total.mul_(largest)


@_weighted_gradient.register_fake
def _(
    factors: Tensor, gradient: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float
) -> Tensor:
    return torch.empty_like(gradient)


def _chunks(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float) -> Iterator[_Chunk]:
    """The tokens that have a target, as many at a time as may have logits at once, all in the same memory."""
    with_target = (targets >= 0).nonzero()[:, 0]
    size = min(max(1, CHUNK_LOGITS // len(weight)), max(1, len(with_target)))
    matrix = weight.to(hidden.dtype)
    wide = hidden.new_empty(2, size, len(weight), dtype=_precise(hidden))
    narrow = None if wide.dtype == hidden.dtype else hidden.new_empty(size, len(weight))
    for rows in torch.split(with_target, size):
        capped, probabilities = wide[:, : len(rows)]
        product = None if narrow is None else narrow[: len(rows)]
        yield _Chunk(rows, hidden[rows], matrix, targets[rows, None], softcap, capped, probabilities, product)


@dataclass(frozen=True)
class _Chunk:
    """Some tokens with a target, and memory for their logits (n, V): memory asked for anew would cost more than exp."""

    #: (n,) which tokens they are.
    rows: Tensor
    #: (n, C)
    inputs: Tensor
    #: (V, C) in the dtype of the inputs.
    matrix: Tensor
    #: (n, 1) int64
    targets: Tensor
    softcap: float
    #: Two times (n, V), at least in fp32.
    capped: Tensor
    probabilities: Tensor
    #: (n, V) in the dtype of the inputs, where that is another one.
    product: Tensor | None

    def losses(self) -> Tensor:
        """Losses (n,); leaves the logits divided by the cap, and the probabilities."""
        product = self.capped if self.product is None else self.product
        torch.mm(self.inputs, self.matrix.T, out=product)
        capped = self.capped.copy_(product).div_(self.softcap).tanh_()
        largest = capped.amax(dim=-1, keepdim=True)
        exponentials = torch.sub(capped, largest, out=self.probabilities).mul_(self.softcap).exp_()
        sums = exponentials.sum(dim=-1, keepdim=True)
        exponentials.div_(sums)
        return (sums.log() + self.softcap * (largest - capped.gather(1, self.targets)))[:, 0]

    def slopes(self) -> Tensor:
        """Derivatives (n, V) by the logits before the cap, of the losses that have just been computed."""
        slopes = self.probabilities
        slopes.scatter_add_(1, self.targets, -torch.ones_like(self.targets, dtype=slopes.dtype))
        torch.ops.aten.tanh_backward.grad_input(slopes, self.capped, grad_input=slopes)
        return slopes if self.product is None else self.product.copy_(slopes)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left · right, where the total may be kept in a wider dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _zero_sum(hidden: Tensor, weight: Tensor) -> Tensor:
    """A total like the matrix, at least in fp32."""
    return torch.zeros(weight.shape, dtype=_precise(hidden), device=weight.device)


def _precise(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, targets, ctx.vocab_size, ctx.softcap, _ = inputs
    ctx.set_materialize_grads(False)  # else the two gradients among the outputs would get zeros of their sizes
    _, hidden_gradient, weight_gradient = output
    ctx.save_for_backward(hidden, weight, targets, hidden_gradient, weight_gradient)


def _backward(ctx: Any, factors: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if factors is None:  # nothing was asked of the losses
        return (None,) * 6
    hidden, weight, targets, hidden_gradient, weight_gradient = ctx.saved_tensors
    for_hidden = (hidden_gradient * factors[:, None]).to(hidden.dtype) if ctx.needs_input_grad[0] else None
    for_weight = None
    if ctx.needs_input_grad[1]:
        weighted = _weighted_gradient(factors, weight_gradient, hidden, weight, targets, ctx.vocab_size, ctx.softcap)
        for_weight = weighted.to(weight.dtype)
    return for_hidden, for_weight, None, None, None, None


_forward.register_autograd(_backward, setup_context=_remember)
