"""What decoding remembers, so that a token is computed once: keys, values, and the last embedding."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from nanochat.model.config import ModelConfig


class KVCache:
    """The state of B texts of one length, in buffers of fixed size.

    Args:
        config: of the model that will read it.
        batch_size: number of texts, B.
        capacity: the most tokens a text may come to hold.
        dtype: the model's compute dtype.
        device: where the model computes.
    """

    def __init__(
        self, config: ModelConfig, batch_size: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.num_layers, batch_size, config.num_kv_heads, capacity, config.head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        #: (B, 1, C): normed embedding of the last token before smearing, zeros before the first.
        self.previous_embedding = torch.zeros((batch_size, 1, config.model_dim), dtype=dtype, device=device)
        self._position = 0

    @property
    def position(self) -> int:
        """How many tokens each text holds."""
        return self._position

    @property
    def batch_size(self) -> int:
        return self._keys.size(1)

    @property
    def capacity(self) -> int:
        return self._keys.size(3)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, K, T, d) of the new tokens; return views of all (B, K, position + T, d)."""
        end = self._position + k.size(2)
        assert end <= self.capacity, f"{end} tokens do not fit a cache of {self.capacity}"
        self._keys[layer, :, :, self._position : end] = k
        self._values[layer, :, :, self._position : end] = v
        return self._keys[layer, :, :, :end], self._values[layer, :, :, :end]

    def advance(self, num_tokens: int) -> None:
        """Count the new tokens, after every layer has stored them."""
        self._position += num_tokens

    def clone(self) -> KVCache:
        """A copy that goes its own way."""
        return self.expand(1)

    def expand(self, num_samples: int) -> KVCache:
        """A copy in which each text stands ``num_samples`` times in a row: prefill once, sample often."""
        wider = copy.copy(self)
        wider._keys = self._keys.repeat_interleave(num_samples, dim=1)
        wider._values = self._values.repeat_interleave(num_samples, dim=1)
        wider.previous_embedding = self.previous_embedding.repeat_interleave(num_samples, dim=0)
        return wider
