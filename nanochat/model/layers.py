"""The parts of the model. Activations are (B, T, C); see :mod:`nanochat.model.gpt` for the whole."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanochat.model.config import ModelConfig
from nanochat.ops.attention import Attention

#: Under the root of the norm, the same in every dtype.
NORM_EPSILON = 2.0**-23

#: cos and sin of the rotary angles, each (T, 1, d/2), in the activations' dtype.
Rotary = tuple[Tensor, Tensor]


class Cache(Protocol):
    """What the model asks of a cache: the state of B texts that have all reached one position."""

    #: (B, 1, C): the normed embedding of the last token, before smearing; zeros at position 0.
    previous_embedding: Tensor

    @property
    def position(self) -> int:
        """How many tokens each text holds."""
        ...

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, K, T, d) of the new tokens; return those of all (B, K, position + T, d)."""
        ...

    def advance(self, num_tokens: int) -> None:
        """Count the new tokens, after every layer has stored them."""
        ...


def norm(x: Tensor) -> Tensor:
    """RMS norm over the last axis without a weight (Zhang and Sennrich 2019)."""
    return F.rms_norm(x, (x.size(-1),), eps=NORM_EPSILON)


class Linear(nn.Module):
    """A matrix (out, in) without bias, uninitialised, cast to its input's dtype when used."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Embedding(nn.Module):
    """A table (rows, dim), uninitialised; ids (B, T) → (B, T, dim) in the table's dtype."""

    def __init__(self, num_rows: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, dim))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


def rotary_tables(num_positions: int, head_dim: int, base: float, device: torch.device) -> Rotary:
    """cos and sin, each (num_positions, 1, d/2), computed and kept in fp32 (RoFormer, Su et al. 2021)."""
    channels = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = torch.outer(positions, 1.0 / (base ** (channels / head_dim)))[:, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn the two halves of every head of x (B, T, heads, d) by the angles of its positions."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


class CausalSelfAttention(nn.Module):
    """Grouped-query attention with rotary positions, normed q and k, and value embeddings.

    The value embedding, gated per key-value head, follows ResFormer (Zhou et al. 2024).
    """

    def __init__(self, config: ModelConfig, layer: int, attention: Attention) -> None:
        super().__init__()
        self.layer, self.window, self.attention = layer, config.windows[layer], attention
        self.head_dim, self.constants = config.head_dim, config.constants
        self.c_q = Linear(config.model_dim, config.model_dim)
        self.c_k = Linear(config.model_dim, config.kv_dim)
        self.c_v = Linear(config.model_dim, config.kv_dim)
        self.c_proj = Linear(config.model_dim, config.model_dim)
        if layer in config.value_embed_layers:
            self.ve_gate = Linear(config.constants.value_gate_channels, config.num_kv_heads)

    def forward(self, x: Tensor, rotary: Rotary, value_embed: Tensor | None, cache: Cache | None) -> Tensor:
        q, k, v = (self._split_heads(project(x)) for project in (self.c_q, self.c_k, self.c_v))
        if value_embed is not None:
            gate = self.ve_gate(x[..., : self.constants.value_gate_channels]).sigmoid()
            v = v + self.constants.value_embed_scale * gate.unsqueeze(-1) * self._split_heads(value_embed)
        q, k = (norm(rotate(heads, rotary)) * self.constants.qk_scale for heads in (q, k))
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        query_offset = 0
        if cache is not None:
            query_offset = cache.position
            k, v = cache.extend(self.layer, k, v)
        mixed = self.attention(q, k, v, self.window, query_offset)
        out: Tensor = self.c_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _split_heads(self, x: Tensor) -> Tensor:
        """(B, T, heads · d) → (B, T, heads, d)."""
        return x.view(*x.shape[:-1], -1, self.head_dim)


class Mlp(nn.Module):
    """Two matrices with relu² between them (Primer, So et al. 2021)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = Linear(config.model_dim, 4 * config.model_dim)
        self.c_proj = Linear(4 * config.model_dim, config.model_dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(self.c_fc(x).relu().square())
        return out


class Block(nn.Module):
    """Attention and MLP, each on the normed residual stream and added to it."""

    def __init__(self, config: ModelConfig, layer: int, attention: Attention) -> None:
        super().__init__()
        self.attn = CausalSelfAttention(config, layer, attention)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, rotary: Rotary, value_embed: Tensor | None, cache: Cache | None) -> Tensor:
        x = x + self.attn(norm(x), rotary, value_embed, cache)
        x = x + self.mlp(norm(x))
        return x
