"""The model: token ids in, logits or losses out. Nothing else is known here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nanochat.model.config import SMEAR_CHANNELS, ModelConfig
from nanochat.model.layers import Block, Cache, Embedding, Linear, Rotary, norm, rotary_tables
from nanochat.ops import cross_entropy as chunked
from nanochat.ops import reference
from nanochat.ops.attention import Attention, sdpa

#: Above this many logits in a batch the loss is computed in chunks: 64 MiB of fp32, several times over.
MOST_LOGITS_AT_ONCE = 2**24


class Transformer(nn.Module):
    """The token embedding and the blocks, under the family's public names."""

    def __init__(self, config: ModelConfig, attention: Attention) -> None:
        super().__init__()
        self.wte = Embedding(config.padded_vocab_size, config.model_dim)
        self.h = nn.ModuleList(Block(config, layer, attention) for layer in range(config.num_layers))


class GPT(nn.Module):
    """A decoder-only transformer; the keys of its state dict are the family's public format.

    Parameters are uninitialised (load them, or see :func:`nanochat.model.init.initialize`), and may
    be on the meta device until then. A row of ids is one causal sequence: attention, rotary
    positions and smear cross the borders of documents.

    Args:
        config: shape and constants; a model of an earlier era lacks the parameters it did not have.
        attention: how attention is computed, the same arithmetic whichever is given.
    """

    def __init__(self, config: ModelConfig, attention: Attention = sdpa) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32
        dim, rows, constants = config.model_dim, config.padded_vocab_size, config.constants
        self.transformer = Transformer(config, attention)
        self.lm_head = Linear(dim, rows)
        tables = {str(layer): Embedding(rows, config.kv_dim) for layer in config.value_embed_layers}
        self.value_embeds = nn.ModuleDict(tables)
        if constants.residual_lambdas:
            self.resid_lambdas = nn.Parameter(torch.empty(config.num_layers))
            self.x0_lambdas = nn.Parameter(torch.empty(config.num_layers))
        if constants.smear:
            self.smear_gate = Linear(SMEAR_CHANNELS, 1)
            self.smear_lambda = nn.Parameter(torch.empty(1))
        if constants.backout:
            self.backout_lambda = nn.Parameter(torch.empty(1))
        self._rotary = self._rotary_tables(torch.device("cpu"))

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return self.lm_head.weight.device

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        """Choose the dtype of the activations, and store the parameters accordingly.

        Embeddings and value embeddings are stored in that dtype (in fp32 when it is float16, whose
        range is too narrow for their updates); everything else stays fp32 and is cast when used.
        float64 stores everything in float64, for comparisons.
        """
        wide = torch.promote_types(dtype, torch.float32)
        for module in self.modules():
            storage = dtype if isinstance(module, Embedding) and dtype != torch.float16 else wide
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(storage)
        self.compute_dtype = dtype

    def forward(self, ids: Tensor, cache: Cache | None = None, last_only: bool = False) -> Tensor:
        """Logits of every next token.

        Args:
            ids: (B, T) int64; with a cache, the tokens that follow those it holds.
            cache: read and extended by the new tokens.
            last_only: logits of the last position alone, T = 1 in the result.

        Returns:
            (B, T, V) in fp32, soft-capped.
        """
        hidden = self.hidden(ids, cache)
        return self.logits(hidden[:, -1:] if last_only else hidden)

    def losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy (B, T) of the targets (B, T) in nats, fp32; 0 where a target is -1."""
        return self.head_losses(self.hidden(ids), targets)

    def head_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """:meth:`losses` from the last hidden states (B, T, C)."""
        vocab_size, cap = self.config.vocab_size, self.config.constants.logit_softcap
        # Few logits fit beside everything else, and a compiler fuses the plain way with what is around it.
        many = targets.numel() * vocab_size > MOST_LOGITS_AT_ONCE
        compute = chunked.cross_entropy if many else reference.cross_entropy
        return compute(hidden, self.lm_head.weight, targets, vocab_size, cap)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, T, C) → (B, T, V) in fp32: the padding is cropped, then the soft cap holds |logit| below it."""
        cap = self.config.constants.logit_softcap
        logits: Tensor = self.lm_head(hidden)[..., : self.config.vocab_size]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return cap * torch.tanh(logits / cap)

    def hidden(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """Normed hidden states (B, T, C) that the output projection reads."""
        constants, start = self.config.constants, cache.position if cache is not None else 0
        end = start + ids.size(1)
        assert end <= self.config.max_text_len, f"{end} tokens are more than the limit {self.config.max_text_len}"
        x = norm(self.transformer.wte(ids).to(self.compute_dtype))
        if constants.smear:
            x = self._smear(x, cache)
        cos, sin = (table[start:end].to(x.dtype) for table in self._rotary)
        x0 = mid = x
        for layer, block in enumerate(self.transformer.h):
            if constants.residual_lambdas:
                x = self.resid_lambdas[layer] * x + self.x0_lambdas[layer] * x0
            x = block(x, (cos, sin), self._value_embed(layer, ids), cache)
            if layer == self.config.backout_layer:
                mid = x
        if constants.backout:
            x = x - self.backout_lambda.to(x.dtype) * mid
        if cache is not None:
            cache.advance(ids.size(1))
        return norm(x)

    def _smear(self, x: Tensor, cache: Cache | None) -> Tensor:
        """Add to every token a gated share of the one before it, as that was before smearing."""
        before = torch.zeros_like(x[:, :1]) if cache is None else cache.previous_embedding
        previous = torch.cat((before, x[:, :-1]), dim=1)
        if cache is not None:
            cache.previous_embedding.copy_(x[:, -1:])
        gate: Tensor = self.smear_gate(x[..., :SMEAR_CHANNELS]).sigmoid()
        return x + self.smear_lambda.to(x.dtype) * gate * previous

    def _value_embed(self, layer: int, ids: Tensor) -> Tensor | None:
        """(B, T, K · d) on the layers that have value embeddings."""
        if str(layer) not in self.value_embeds:
            return None
        value_embed: Tensor = self.value_embeds[str(layer)](ids).to(self.compute_dtype)
        return value_embed

    def _rotary_tables(self, device: torch.device) -> Rotary:
        return rotary_tables(self.config.max_text_len, self.config.head_dim, self.config.constants.rotary_base, device)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> GPT:
        """Whatever moves the parameters moves the rotary tables, but never casts or empties them."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.device.type != "meta" and self._rotary[0].device != self.device:
            self._rotary = self._rotary_tables(self.device)
        return self
