"""AdamW on one tensor (Loshchilov & Hutter 2019), as pure arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor


def adamw_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: float | Tensor,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update a parameter and its two moments in place.

    The decay is decoupled and comes first; ``eps`` is added after the bias correction. Arithmetic is
    in fp32 for tensors stored in less.

    Args:
        step: number of this update, from 1; a number, or a 0-dim tensor on the parameter's device.
        lr: learning rate; likewise.
    """
    wide = torch.promote_types(param.dtype, torch.float32)
    # Tensors that are stored so wide are changed themselves, and the copies at the end do nothing.
    value, gradient, mean, mean_sq = (tensor.to(wide) for tensor in (param, grad, exp_avg, exp_avg_sq))
    value.mul_(1 - lr * weight_decay)
    mean.lerp_(gradient, 1 - beta1)
    mean_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    deviation = (mean_sq / (1 - beta2**step)).sqrt_().add_(eps)
    update = mean / deviation
    value.sub_(update.mul_(lr / (1 - beta1**step)))
    param.copy_(value)
    exp_avg.copy_(mean)
    exp_avg_sq.copy_(mean_sq)
