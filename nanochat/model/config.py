"""What a model is, as numbers. No torch here, so plans and imports can ask without loading it.

The family changed constants under unchanged names; each of them is a field of
:class:`Constants`, so a model of any era is computed as it was trained.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from nanochat.errors import UserError


@dataclass(frozen=True)
class Constants:
    """What differs between the eras of the family. The defaults are today's (14 March 2026 on)."""

    rotary_base: float = 100_000.0
    #: q and k are each multiplied by this after their norm.
    qk_scale: float = 1.2
    #: Factor of the sigmoid gate on value embeddings; 0 means the model has none.
    value_embed_scale: float = 3.0
    #: How many of the block's input channels feed the value-embedding gate.
    value_gate_channels: int = 12
    logit_softcap: float = 15.0
    #: Window of an ``S`` layer; ``None`` follows today's rule, see :func:`short_window`.
    short_window: int | None = None
    #: Tables of embeddings have a multiple of this many rows.
    vocab_multiple: int = 64
    residual_lambdas: bool = True
    smear: bool = True
    backout: bool = True


#: How many channels feed the smear gate.
SMEAR_CHANNELS = 24


def short_window(sequence_len: int) -> int:
    """Today's window of an ``S`` layer: a quarter of the length, in steps of 128, never under 128."""
    return max(1, math.ceil(sequence_len / 4 / 128)) * 128


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of one model."""

    sequence_len: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    model_dim: int
    #: ``S`` (short) and ``L`` (long) in either case, tiled over the layers; the last is always L.
    window_pattern: str = "L"
    constants: Constants = field(default_factory=Constants)

    def __post_init__(self) -> None:
        for name in ("sequence_len", "vocab_size", "num_layers", "num_heads", "num_kv_heads", "model_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"{name} of the model is {value!r}: it must be a whole number of at least 1")
        if self.model_dim % self.num_heads:
            raise UserError(f"model dim {self.model_dim} is not a multiple of {self.num_heads} heads: choose another")
        if self.head_dim % 2:
            raise UserError(f"head dim {self.head_dim} is odd: rotary positions need an even one")
        gate_channels = max(
            SMEAR_CHANNELS if self.constants.smear else 1,
            self.constants.value_gate_channels if self.value_embed_layers else 1,
        )
        if self.model_dim < gate_channels:
            raise UserError(f"model dim {self.model_dim} is too small: the gates read {gate_channels} channels")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"{self.num_kv_heads} key-value heads do not divide {self.num_heads} query heads:"
                f" choose a divisor of {self.num_heads} for --num-kv-heads"
            )
        if not self.window_pattern or set(self.window_pattern.upper()) - {"S", "L"}:
            raise UserError(f"window pattern {self.window_pattern!r} holds other letters than S and L: use e.g. SSSL")

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.num_heads

    @property
    def kv_dim(self) -> int:
        """Width of the keys (and of the values) of all key-value heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding, output and value-embedding tables."""
        multiple = self.constants.vocab_multiple
        return -(-self.vocab_size // multiple) * multiple

    @property
    def max_text_len(self) -> int:
        """The most tokens one text may hold: the family's rotary tables end at ten lengths."""
        return 10 * self.sequence_len

    @property
    def windows(self) -> tuple[int, ...]:
        """Per layer, how many tokens before itself a query sees (so window + 1 keys)."""
        chosen = self.constants.short_window
        short = short_window(self.sequence_len) if chosen is None else chosen
        pattern = self.window_pattern.upper()
        letters = [pattern[i % len(pattern)] for i in range(self.num_layers - 1)] + ["L"]
        return tuple(self.sequence_len if letter == "L" else short for letter in letters)

    @property
    def value_embed_layers(self) -> tuple[int, ...]:
        """Layers with value embeddings: every second one, the last included."""
        if not self.constants.value_embed_scale:
            return ()
        return tuple(i for i in range(self.num_layers) if i % 2 == (self.num_layers - 1) % 2)

    @property
    def backout_layer(self) -> int:
        """The layer after which the residual stream is remembered for backout."""
        return self.num_layers // 2

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """The inverse of :meth:`to_dict`; raises :class:`UserError` on unknown or missing names."""
        values = dict(data)
        constants = dict(values.pop("constants", {}))
        unknown = (set(values) - {f.name for f in dataclasses.fields(cls)}) | (
            set(constants) - {f.name for f in dataclasses.fields(Constants)}
        )
        if unknown:
            raise UserError(f"model config has unknown names {sorted(unknown)}: was it written by a newer version?")
        try:
            return cls(**values, constants=Constants(**constants))
        except TypeError as error:
            raise UserError(f"model config is incomplete: {error}") from None
