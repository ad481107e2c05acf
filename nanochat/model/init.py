"""Initial values of a fresh model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanochat.model.config import ModelConfig
from nanochat.model.gpt import GPT

GATE_MAX = 0.02
#: Share of the uniform bound that the first matrix of the MLP gets.
MLP_SHARE = 0.4


@torch.no_grad()
def initialize(model: GPT, seed: int) -> None:
    """Set every parameter of a model, on whatever device and in whatever dtype it is stored.

    All values are drawn in fp32 on the CPU from one generator, in the order of the parameters, so a
    seed gives the same model everywhere (up to the rounding of its storage).
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    for name, parameter in model.named_parameters():
        assert not parameter.is_meta, f"{name} has no storage yet"
        parameter.copy_(initial_value(name, parameter.shape, model.config, generator))


def initial_value(name: str, shape: torch.Size, config: ModelConfig, generator: torch.Generator) -> Tensor:
    """The first value of one parameter by its public name, in fp32 on the CPU.

    Both projections back into the residual stream start at zero, so that every block starts as the
    identity; the uniform bound sqrt(3/C) has the standard deviation 1/sqrt(C).
    """
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    bound = math.sqrt(3 / config.model_dim)
    kind = name.removesuffix(".weight").split(".")[-1]
    if name.startswith("value_embeds."):
        kind = "value_embeds"
    match kind:
        case "wte":
            return values.normal_(0.0, 0.8, generator=generator)
        case "lm_head":
            return values.normal_(0.0, 0.001, generator=generator)
        case "c_q" | "c_k" | "c_v" | "value_embeds":
            return values.uniform_(-bound, bound, generator=generator)
        case "c_fc":
            return values.uniform_(-MLP_SHARE * bound, MLP_SHARE * bound, generator=generator)
        case "ve_gate" | "smear_gate":
            return values.uniform_(0.0, GATE_MAX, generator=generator)
        case "resid_lambdas":
            return 1.15 - 0.10 * depth_share(config)
        case "x0_lambdas":
            return 0.20 - 0.15 * depth_share(config)
        case "backout_lambda":
            return values.fill_(0.2)
        case "c_proj" | "smear_lambda":
            return values.zero_()
    raise AssertionError(f"parameter {name} has no initial value")


def depth_share(config: ModelConfig) -> Tensor:
    """(L,): how deep each layer lies, from 0 for the first to 1 for the last."""
    return torch.arange(config.num_layers, dtype=torch.float32) / max(config.num_layers - 1, 1)
