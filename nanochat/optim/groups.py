"""Which rule and which settings every parameter is trained with, by its name.

The order of the groups, and of the names in them, is also the numbering of the family's optimizer
files: the importer relies on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from nanochat.optim.schedule import width_lr_scale

#: Matrices of a block in model order.
BLOCK_MATRICES = (
    "attn.c_q.weight",
    "attn.c_k.weight",
    "attn.c_v.weight",
    "attn.c_proj.weight",
    "attn.ve_gate.weight",
    "mlp.c_fc.weight",
    "mlp.c_proj.weight",
)
_BLOCK_MATRIX = re.compile(r"transformer\.h\.(\d+)\.(.+)")
_VALUE_EMBEDDING = re.compile(r"value_embeds\.(\d+)\.weight")


@dataclass(frozen=True)
class Rates:
    """Learning rates; the defaults are those of pretraining, before the factor of the batch."""

    embedding: float = 0.3
    unembedding: float = 0.008
    matrix: float = 0.02
    scalar: float = 0.5
    #: Smear gate, smear and backout factors.
    smear: float = 0.2

    def scaled(self, factor: float, *, smear: bool) -> Rates:
        """All rates times a factor; that of smear and backout only when asked."""
        return Rates(
            self.embedding * factor,
            self.unembedding * factor,
            self.matrix * factor,
            self.scalar * factor,
            self.smear * factor if smear else self.smear,
        )


@dataclass(frozen=True)
class AdamGroup:
    """Parameters trained one by one with AdamW under the same settings."""

    names: tuple[str, ...]
    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    eps: float = 1e-10


@dataclass(frozen=True)
class MuonGroup:
    """Matrices of one shape (m, n), trained as one stack with Muon; their decay comes with each step."""

    names: tuple[str, ...]
    shape: tuple[int, int]
    lr: float
    beta2: float = 0.9


Group = AdamGroup | MuonGroup


def parameter_groups(named_parameters: Mapping[str, Tensor], rates: Rates, model_dim: int) -> list[Group]:
    """Groups of a model of any era, whatever the order of the mapping.

    Args:
        named_parameters: every parameter by its public name; only names and shapes are looked at.
        rates: learning rates; those of embeddings, value embeddings and output projection are
            further multiplied by (``model_dim`` / 768)^-0.5.

    Returns:
        Output projection, embedding, value embeddings, residual scalars, then smear and backout, as
        far as the model has them; then the matrices of the blocks by ascending shape, each stack in
        model order.
    """
    width_scale = width_lr_scale(model_dim)
    embedding, unembedding = rates.embedding * width_scale, rates.unembedding * width_scale
    value_embeddings = tuple(sorted(filter(_VALUE_EMBEDDING.fullmatch, named_parameters), key=_index))
    adam_groups = (
        AdamGroup(("lm_head.weight",), unembedding, 0.8, 0.96, 0.01),
        AdamGroup(("transformer.wte.weight",), embedding, 0.8, 0.995, 0.001),
        AdamGroup(value_embeddings, embedding * 0.5, 0.8, 0.995, 0.01),
        AdamGroup(("resid_lambdas",), rates.scalar * 0.01, 0.8, 0.95, 0.05),
        AdamGroup(("x0_lambdas",), rates.scalar, 0.96, 0.95, 0.0),
        AdamGroup(("smear_gate.weight", "smear_lambda", "backout_lambda"), rates.smear, 0.8, 0.95, 0.0),
    )
    groups: list[Group] = []
    for group in adam_groups:
        present = tuple(name for name in group.names if name in named_parameters)
        if present:
            groups.append(replace(group, names=present))
    groups += _muon_groups(named_parameters, rates.matrix)

    grouped = [name for group in groups for name in group.names]
    assert sorted(grouped) == sorted(named_parameters), set(grouped) ^ set(named_parameters)
    return groups


def _muon_groups(named_parameters: Mapping[str, Tensor], lr: float) -> list[MuonGroup]:
    matrices: list[tuple[int, int, str]] = []
    for name in named_parameters:
        match = _BLOCK_MATRIX.fullmatch(name)
        if match and match[2] in BLOCK_MATRICES:
            matrices.append((int(match[1]), BLOCK_MATRICES.index(match[2]), name))
    stacks: dict[tuple[int, int], list[str]] = {}
    for _, _, name in sorted(matrices):
        rows, columns = named_parameters[name].shape
        stacks.setdefault((rows, columns), []).append(name)
    return [MuonGroup(tuple(names), shape, lr) for shape, names in sorted(stacks.items())]


def _index(name: str) -> int:
    match = _VALUE_EMBEDDING.fullmatch(name)
    assert match, name
    return int(match[1])
