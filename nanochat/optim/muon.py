"""Muon on a stack of equally shaped matrices, as pure arithmetic.

Momentum, then the nearest semi-orthogonal matrix, then a step of even size in every row or column:
Muon (Jordan et al. 2024) orthogonalised by Polar Express (Amsel et al. 2025), with the variance
reduction of NorMuon (Li et al. 2025) and cautious weight decay (Chen et al. 2025).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Coefficients (a, b, c) of the five odd polynomials of Polar Express.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def muon_step(
    stacked_params: Tensor,
    stacked_grads: Tensor,
    momentum_buffer: Tensor,
    second_momentum_buffer: Tensor,
    lr: float | Tensor,
    momentum: float | Tensor,
    beta2: float,
    weight_decay: float | Tensor,
    *,
    row_equilibration: bool = True,
    renormalize: bool = True,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Update k matrices of shape (m, n) and their two buffers in place; the gradients stay as they are.

    Args:
        stacked_params: (k, m, n), like the gradients and the momentum buffer.
        second_momentum_buffer: (k, m, 1) where m >= n, else (k, 1, n).
        lr: learning rate; a number, or a 0-dim tensor on the parameters' device, like momentum and decay.
        row_equilibration: give all rows the same norm before orthogonalising.
        renormalize: give the result the norm of a semi-orthogonal matrix.
        compute_dtype: orthogonalise in bf16 when this is bf16, else in the parameters' dtype.

    Matrices whose gradient has always been zero are only decayed.
    """
    rows, columns = stacked_params.shape[-2:]
    blend = torch.as_tensor(momentum, dtype=stacked_params.dtype, device=stacked_params.device)
    momentum_buffer.lerp_(stacked_grads, 1 - blend)
    nesterov = stacked_grads.lerp(momentum_buffer, blend)
    update = nesterov.bfloat16() if compute_dtype == torch.bfloat16 else nesterov
    if row_equilibration:
        update = equilibrate_rows(update)
    update = orthogonalize(update).to(stacked_params.dtype)
    if renormalize:
        update = update * (math.sqrt(min(rows, columns)) / frobenius_norm(update).clamp_min(1e-6))
    update = reduce_variance(update, second_momentum_buffer, beta2)
    agrees = update * stacked_params >= 0
    decay = torch.where(agrees, stacked_params, 0) * weight_decay
    stacked_params.sub_((update + decay) * (lr * math.sqrt(max(1.0, rows / columns))))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Nearly the nearest semi-orthogonal matrix of each (…, m, n): singular values near 1, zero for a zero matrix.

    Computed in the dtype of the input.
    """
    x = matrices / (1.01 * frobenius_norm(matrices) + 1e-6).to(matrices.dtype)
    tall = x.size(-2) > x.size(-1)
    for a, b, c in POLAR_EXPRESS:
        gram = x.mT @ x if tall else x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, polynomial, beta=a) if tall else torch.baddbmm(x, polynomial, x, beta=a)
    return x


def equilibrate_rows(matrices: Tensor) -> Tensor:
    """Scale every row of each (…, m, n) to the rows' root mean square norm."""
    row_norms: Tensor = torch.linalg.vector_norm(matrices, dim=-1, keepdim=True, dtype=wide(matrices.dtype))
    matrix_norms: Tensor = torch.linalg.vector_norm(row_norms, dim=-2, keepdim=True)
    scale = matrix_norms / math.sqrt(matrices.size(-2)) / row_norms.clamp_min(1e-6)
    return (matrices * scale).to(matrices.dtype)


def reduce_variance(update: Tensor, second_momentum_buffer: Tensor, beta2: float) -> Tensor:
    """Divide by the running root mean square along the longer axis, keeping the norm of each matrix (NorMuon)."""
    axis = -1 if update.size(-2) >= update.size(-1) else -2
    mean_sq = update.to(wide(update.dtype)).square().mean(dim=axis, keepdim=True)
    second_momentum_buffer.lerp_(mean_sq.to(second_momentum_buffer.dtype), 1 - beta2)
    step = second_momentum_buffer.to(mean_sq.dtype).clamp_min(1e-10).rsqrt()
    norm_sq = mean_sq * update.size(axis)
    norm_before = norm_sq.sum(dim=(-2, -1), keepdim=True).sqrt()
    norm_after = (norm_sq * step.square()).sum(dim=(-2, -1), keepdim=True).sqrt()
    return update * (step * (norm_before / norm_after.clamp_min(1e-10))).to(update.dtype)


def frobenius_norm(matrices: Tensor) -> Tensor:
    """Norm of each (…, m, n) in fp32 or wider, shape (…, 1, 1)."""
    norms: Tensor = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=wide(matrices.dtype))
    return norms


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that norms and variances of such matrices are computed in: fp32 or wider."""
    return torch.promote_types(dtype, torch.float32)
