"""What a model costs, from its config alone: parameters and FLOPs per token. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from nanochat.model.config import SMEAR_CHANNELS, ModelConfig


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters by kind. Tables are counted with their padding rows."""

    #: Token embedding.
    wte: int
    #: Value embeddings of all layers that have one.
    value_embeds: int
    #: Output projection.
    lm_head: int
    #: Every matrix inside the blocks, the gates of the value embeddings included.
    transformer_matrices: int
    #: Residual scalars per layer, smear gate, smear and backout factors.
    scalars: int

    @property
    def total(self) -> int:
        return self.wte + self.value_embeds + self.lm_head + self.transformer_matrices + self.scalars


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    """Parameters of a model of any era; what a model of its era lacks counts nothing."""
    constants = config.constants
    table = config.padded_vocab_size * config.model_dim
    attention = 2 * config.model_dim * config.model_dim + 2 * config.model_dim * config.kv_dim
    mlp = 2 * 4 * config.model_dim * config.model_dim
    gates = len(config.value_embed_layers) * config.num_kv_heads * constants.value_gate_channels
    return ParameterCounts(
        wte=table,
        value_embeds=len(config.value_embed_layers) * config.padded_vocab_size * config.kv_dim,
        lm_head=table,
        transformer_matrices=config.num_layers * (attention + mlp) + gates,
        scalars=(
            2 * config.num_layers * constants.residual_lambdas
            + (SMEAR_CHANNELS + 1) * constants.smear
            + constants.backout
        ),
    )


def scaling_parameters(config: ModelConfig) -> int:
    """N of the scaling laws: the matrices inside the blocks and the output projection."""
    counts = parameter_counts(config)
    return counts.transformer_matrices + counts.lm_head


def flops_per_token(config: ModelConfig) -> int:
    """FLOPs of forward and backward per token of a full row.

    Six per weight that is multiplied (Kaplan et al. 2020; look-ups and scalars count nothing), and
    12 · heads · head dim · min(window, T) per layer for the products of queries, keys and values.
    Attention is counted in full, not halved for causality (the convention of PaLM, appendix B), on
    which published utilisation figures are based.
    """
    attended = sum(min(window, config.sequence_len) for window in config.windows)
    return 6 * scaling_parameters(config) + 12 * config.num_heads * config.head_dim * attended
