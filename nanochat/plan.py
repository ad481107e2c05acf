"""From one dial, the depth, to every number of a pretraining run, each with its reason. No torch here."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from nanochat.errors import UserError
from nanochat.model.config import SMEAR_CHANNELS, ModelConfig
from nanochat.model.cost import ParameterCounts, flops_per_token, parameter_counts, scaling_parameters
from nanochat.optim.schedule import REFERENCE_MODEL_DIM, width_lr_scale

#: Batch and weight decay were tuned on a model of this depth ...
REFERENCE_DEPTH = 12
#: ... at this total batch.
REFERENCE_BATCH_TOKENS = 2**19
#: Growth of the best batch with the token horizon (Power Lines, Bergsma et al. 2025).
BATCH_EXPONENT = 0.383

#: Beyond these no machine can follow, and arithmetic ends: a depth, aspect ratio or head dim; the rows of
#: a table; a ratio, a number of FLOPs.
LARGEST_SHAPE = 10_000
LARGEST_TABLE = 2**27
LARGEST_FIGURE = 1e40


@dataclass(frozen=True)
class PlanInputs:
    """What may be chosen. ``total_batch_size``, ``num_iterations``, ``target_flops`` <= 0 mean "planned"."""

    depth: int = 20
    #: Training tokens per scaling parameter (20 is Chinchilla's).
    target_param_data_ratio: float = 12.0
    aspect_ratio: int = 64
    head_dim: int = 128
    max_seq_len: int = 2048
    vocab_size: int = 32_768
    window_pattern: str = "SSSL"
    #: Tokens per optimizer step.
    total_batch_size: int = -1
    #: Decay of the matrices at the reference model and batch.
    weight_decay: float = 0.28
    num_iterations: int = -1
    target_flops: float = -1.0
    #: As many as query heads when None.
    num_kv_heads: int | None = None


@dataclass(frozen=True)
class Plan:
    """Every number of a run; ``reasons`` has a sentence for each, by its name in :meth:`to_dict`."""

    model: ModelConfig
    params: ParameterCounts
    #: N: matrices inside the blocks and output projection.
    scaling_params: int
    flops_per_token: int
    #: Horizon the batch and the weight decay are planned for.
    target_tokens: int
    #: Tokens per optimizer step.
    total_batch_size: int
    #: Factor on all learning rates but that of smear and backout, from the batch.
    lr_scale: float
    #: Decay of the matrices at the start of the schedule.
    weight_decay: float
    #: Optimizer steps.
    num_iterations: int
    #: Tokens really trained on: steps times batch.
    total_tokens: int
    total_flops: int
    #: Further factor on the rates of embeddings, value embeddings and output projection.
    dmodel_lr_scale: float
    reasons: dict[str, str]

    @property
    def tokens_per_scaling_param(self) -> float:
        """Trained tokens ÷ N, the ratio this project plans by."""
        return self.total_tokens / self.scaling_params

    @property
    def tokens_per_param(self) -> float:
        """Trained tokens ÷ all parameters, the ratio others quote."""
        return self.total_tokens / self.params.total

    def to_dict(self) -> dict[str, Any]:
        """The plan under the family's names, without the reasons."""
        return {
            "model": {
                "n_layer": self.model.num_layers,
                "n_head": self.model.num_heads,
                "n_kv_head": self.model.num_kv_heads,
                "n_embd": self.model.model_dim,
                "window_sizes": list(self.model.windows),
            },
            "params": asdict(self.params) | {"total": self.params.total},
            "scaling_params": self.scaling_params,
            "flops_per_token": self.flops_per_token,
            "target_tokens": self.target_tokens,
            "total_batch_size": self.total_batch_size,
            "lr_scale": self.lr_scale,
            "weight_decay": self.weight_decay,
            "num_iterations": self.num_iterations,
            "total_tokens": self.total_tokens,
            "total_flops": self.total_flops,
            "dmodel_lr_scale": self.dmodel_lr_scale,
        }


def model_config(
    depth: int,
    aspect_ratio: int = 64,
    head_dim: int = 128,
    num_kv_heads: int | None = None,
    max_seq_len: int = 2048,
    vocab_size: int = 32_768,
    window_pattern: str = "SSSL",
) -> ModelConfig:
    """Shape of the model of a depth: model dim = depth · aspect ratio, rounded up to whole heads.

    Raises:
        UserError: for a depth, aspect ratio or head dim no model can have, or key-value heads that do
            not divide the query heads.
    """
    for flag, value in (("depth", depth), ("aspect-ratio", aspect_ratio), ("head-dim", head_dim)):
        if not 1 <= value <= LARGEST_SHAPE:
            raise UserError(f"--{flag} is {value}: it must be between 1 and {LARGEST_SHAPE:,}")
    num_heads = -(-depth * aspect_ratio // head_dim)
    model_dim = num_heads * head_dim
    if model_dim < SMEAR_CHANNELS:
        raise UserError(
            f"depth {depth} with aspect ratio {aspect_ratio} gives a model dim of {model_dim}:"
            f" it must be at least {SMEAR_CHANNELS}, so raise --depth, --aspect-ratio or --head-dim"
        )
    return ModelConfig(
        sequence_len=max_seq_len,
        vocab_size=vocab_size,
        num_layers=depth,
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        model_dim=model_dim,
        window_pattern=window_pattern,
    )


def plan(inputs: PlanInputs) -> Plan:
    """Plan a pretraining run.

    Raises:
        UserError: for a shape no model can have, or a horizon, batch or decay that cannot be trained.
    """
    model = _model(inputs)
    _check(inputs)
    params, scaling_params, token_flops = parameter_counts(model), scaling_parameters(model), flops_per_token(model)
    horizon = _relative_horizon(inputs, scaling_params)

    batch_tokens = inputs.total_batch_size
    if batch_tokens <= 0:
        batch_tokens = 2 ** round(math.log2(REFERENCE_BATCH_TOKENS * horizon**BATCH_EXPONENT))
    num_iterations = _num_iterations(inputs, scaling_params, token_flops, batch_tokens)
    lr_scale = math.sqrt(batch_tokens / REFERENCE_BATCH_TOKENS)
    return Plan(
        model=model,
        params=params,
        scaling_params=scaling_params,
        flops_per_token=token_flops,
        target_tokens=_ratio_tokens(inputs, scaling_params) or num_iterations * batch_tokens,
        total_batch_size=batch_tokens,
        lr_scale=lr_scale,
        weight_decay=inputs.weight_decay * lr_scale / horizon,
        num_iterations=num_iterations,
        total_tokens=num_iterations * batch_tokens,
        total_flops=num_iterations * batch_tokens * token_flops,
        dmodel_lr_scale=width_lr_scale(model.model_dim),
        reasons=_reasons(inputs),
    )


def gradient_accumulation(total_batch_size: int, device_batch_size: int, sequence_len: int, world_size: int) -> int:
    """Micro-batches per optimizer step: total batch ÷ (device batch · T · processes).

    Raises:
        UserError: when that is not a whole number, naming the nearest choices that work.
    """
    for name, value in (("total batch", total_batch_size), ("device batch", device_batch_size)):
        if value < 1:
            raise UserError(f"the {name} size is {value}: it must be at least 1")
    assert min(sequence_len, world_size) > 0, (sequence_len, world_size)
    step_rows = sequence_len * world_size
    pass_tokens = device_batch_size * step_rows
    if total_batch_size % pass_tokens == 0:
        return total_batch_size // pass_tokens
    nearest = max(1, round(total_batch_size / pass_tokens)) * pass_tokens
    choice = f"--total-batch-size {nearest}"
    if total_batch_size % step_rows == 0:
        rows = total_batch_size // step_rows
        fitting = next(size for size in range(min(device_batch_size, rows), 0, -1) if rows % size == 0)
        choice += f" or --device-batch-size {fitting}"
    raise UserError(
        f"a total batch of {total_batch_size} tokens is not a multiple of {pass_tokens} (device batch"
        f" {device_batch_size} x sequence length {sequence_len} x {world_size} processes): use {choice}"
    )


def _model(inputs: PlanInputs) -> ModelConfig:
    return model_config(
        inputs.depth,
        inputs.aspect_ratio,
        inputs.head_dim,
        inputs.num_kv_heads,
        inputs.max_seq_len,
        inputs.vocab_size,
        inputs.window_pattern,
    )


def _check(inputs: PlanInputs) -> None:
    for flag, value in (
        ("target-param-data-ratio", inputs.target_param_data_ratio),
        ("target-flops", inputs.target_flops),
        ("weight-decay", inputs.weight_decay),
    ):
        if not abs(value) <= LARGEST_FIGURE:
            raise UserError(f"--{flag} is {value}: it must be a number of at most {LARGEST_FIGURE:g}")
    for flag, size in (("vocab-size", inputs.vocab_size), ("max-seq-len", inputs.max_seq_len)):
        if size > LARGEST_TABLE:
            raise UserError(f"--{flag} is {size}: it must be at most {LARGEST_TABLE:,}")
    if inputs.weight_decay < 0:
        raise UserError(f"--weight-decay is {inputs.weight_decay}: it must be 0 or more")
    if inputs.target_param_data_ratio <= 0 and inputs.num_iterations <= 0 and inputs.target_flops <= 0:
        raise UserError(
            f"--target-param-data-ratio is {inputs.target_param_data_ratio:g} and neither steps nor FLOPs are given:"
            " set it above 0, or give --num-iterations or --target-flops"
        )
    if 0 < inputs.total_batch_size < inputs.max_seq_len:
        raise UserError(
            f"a total batch of {inputs.total_batch_size} tokens is less than one row of {inputs.max_seq_len}:"
            " raise --total-batch-size to a multiple of --max-seq-len, or leave it out to have it planned"
        )


def _ratio_tokens(inputs: PlanInputs, scaling_params: int) -> int | None:
    """Token horizon by the ratio, or None when there is no ratio."""
    if inputs.target_param_data_ratio <= 0:
        return None
    tokens = int(inputs.target_param_data_ratio * scaling_params)
    if tokens < 1:
        raise UserError(f"--target-param-data-ratio {inputs.target_param_data_ratio:g} gives no token: raise it")
    return tokens


def _relative_horizon(inputs: PlanInputs, scaling_params: int) -> float:
    """Token horizon as a multiple of the reference model's at the same ratio (which need not be known)."""
    reference = scaling_parameters(_model(replace(inputs, depth=REFERENCE_DEPTH, num_kv_heads=None)))
    tokens = _ratio_tokens(inputs, scaling_params)
    if tokens is None:
        return scaling_params / reference
    return tokens / (inputs.target_param_data_ratio * reference)


def _num_iterations(inputs: PlanInputs, scaling_params: int, token_flops: int, batch_tokens: int) -> int:
    if inputs.num_iterations > 0:
        return inputs.num_iterations
    if inputs.target_flops > 0:
        num_iterations = round(inputs.target_flops / (token_flops * batch_tokens))
        horizon = f"--target-flops {inputs.target_flops:g}"
    else:
        tokens = _ratio_tokens(inputs, scaling_params)
        assert tokens is not None, "inputs were checked"
        num_iterations = tokens // batch_tokens
        horizon = f"the horizon of {tokens} tokens"
    if num_iterations < 1:
        raise UserError(
            f"{horizon} is less than one step of {batch_tokens} tokens:"
            " lower --total-batch-size, raise the horizon or give --num-iterations"
        )
    return num_iterations


def _reasons(inputs: PlanInputs) -> dict[str, str]:
    ratio = inputs.target_param_data_ratio
    if inputs.num_iterations > 0:
        steps = "given"
    elif inputs.target_flops > 0:
        steps = f"target FLOPs {inputs.target_flops:g} ÷ (FLOPs per token · total batch), rounded"
    else:
        steps = "target tokens ÷ total batch, rounded down"
    planned_batch = (
        f"2^round(log2(2^19 · (horizon ÷ that of depth {REFERENCE_DEPTH})^{BATCH_EXPONENT})),"
        " the Power Lines law: longer runs want larger batches"
    )
    return {
        "model": f"model dim = {inputs.depth} layers · {inputs.aspect_ratio}, rounded up to heads of {inputs.head_dim}",
        "params": "all tables with their padding rows, matrices of the blocks, scalars",
        "scaling_params": "N = matrices of the blocks + output projection",
        "flops_per_token": "6 · N + 12 · heads · head dim · min(window, T) in each layer",
        "target_tokens": f"ratio {ratio:g} · N" if ratio > 0 else "steps · total batch, since no ratio is set",
        "total_batch_size": "given" if inputs.total_batch_size > 0 else planned_batch,
        "lr_scale": "sqrt(total batch ÷ 2^19), on every rate but that of smear and backout",
        "weight_decay": (
            f"{inputs.weight_decay:g} · sqrt(total batch ÷ 2^19) ÷ (horizon ÷ that of depth {REFERENCE_DEPTH}),"
            " so that batch ÷ (rate · decay · tokens) stays constant"
        ),
        "num_iterations": steps,
        "total_tokens": "steps · total batch",
        "total_flops": "FLOPs per token · total tokens",
        "dmodel_lr_scale": f"(model dim ÷ {REFERENCE_MODEL_DIM})^-0.5, on embeddings and output projection",
    }
