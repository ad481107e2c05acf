"""Tells from a checkpoint's shapes which constants it was trained with.

The family changed constants under unchanged names. Its shapes give the era away, except for one soft cap.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanochat.errors import UserError
from nanochat.model.config import Constants, ModelConfig
from nanochat.model.gpt import GPT

WTE = "transformer.wte.weight"

#: Longest text and pattern of windows that metadata are believed to tell of.
MAX_SEQUENCE_LEN = 1 << 20
MAX_PATTERN_LETTERS = 1 << 10

#: Settings of a ``model_config`` in the family's metadata, and our names for them.
_CONFIG_NAMES = {
    "sequence_len": "sequence_len",
    "vocab_size": "vocab_size",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_kv_head": "num_kv_heads",
    "n_embd": "model_dim",
}


@dataclass(frozen=True)
class Era:
    """A time in which the family's constants stayed the same."""

    name: str
    constants: Constants
    #: Whether the soft cap may have been 15 or 20, which no shape tells.
    softcap_unsure: bool = False

    def describe(self, config: ModelConfig) -> str:
        """The era and its constants in one line."""
        constants = config.constants
        value_embeds = f"{constants.value_embed_scale:g}σ" if constants.value_embed_scale else "none"
        short = min(config.windows) if min(config.windows) < config.sequence_len else "none"
        return (
            f"era {self.name} (rotary base {constants.rotary_base:,.0f}, q and k × {constants.qk_scale:g},"
            f" value embeddings {value_embeds}, soft cap {constants.logit_softcap:g}, short window {short})"
        )


def tell(shapes: Mapping[str, tuple[int, ...]], sequence_len: int) -> Era:
    """The era of a model from its parameters' shapes; ``sequence_len`` sets the short windows of that time."""
    before_march = Constants(
        rotary_base=10_000.0,
        qk_scale=1.0,
        value_embed_scale=0.0,
        short_window=sequence_len // 2,
        smear=False,
        backout=False,
    )
    gates = {shape[-1] for name, shape in shapes.items() if name.endswith(".attn.ve_gate.weight") and shape}
    if "resid_lambdas" not in shapes:
        return Era(
            "October 2025 – 10 January 2026",
            dataclasses.replace(before_march, short_window=None, residual_lambdas=False),
        )
    if not gates:
        return Era("11 – 15 January 2026", before_march)
    if gates == {32}:
        constants = dataclasses.replace(before_march, value_embed_scale=2.0, value_gate_channels=32)
        return Era("16 January – 8 March 2026", constants, softcap_unsure=True)
    if "smear_gate.weight" not in shapes:
        short_window = -(-sequence_len // (3 * 128)) * 128  # a third, in steps of 128
        return Era("9 – 13 March 2026", Constants(qk_scale=1.15, short_window=short_window, smear=False, backout=False))
    return Era("from 14 March 2026", Constants())


def model_config(
    parameters: Mapping[str, Tensor], meta_config: Any, where: str, logit_softcap: float | None = None
) -> tuple[ModelConfig, Era]:
    """The config that computes what was trained, with every parameter's name and shape checked against it.

    Args:
        parameters: of the checkpoint, by public name.
        meta_config: ``model_config`` of its metadata.
        where: the checkpoint, for messages.
        logit_softcap: the soft cap where the era leaves it open (15 when None); ignored elsewhere.

    Raises:
        UserError: when the settings are incomplete or do not belong to the parameters.
    """
    if not isinstance(meta_config, dict) or (lacking := sorted(set(_CONFIG_NAMES) - set(meta_config))):
        missing = ", ".join(lacking) if isinstance(meta_config, dict) else "model_config"
        raise UserError(f"the metadata of {where} lacks {missing}: is it the file saved with this model?")
    if logit_softcap is not None and not 0 < logit_softcap < math.inf:
        raise UserError(f"the soft cap {logit_softcap} is not a positive number: use 15 or 20")
    settings = {ours: meta_config[theirs] for theirs, ours in _CONFIG_NAMES.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    # Checked before anything is built, so that nonsense in the metadata cannot ask for a vast model.
    layers = len({name.split(".")[2] for name in shapes if name.startswith("transformer.h.")})
    rows, dim = (*shapes.get(WTE, ()), 0, 0)[:2]
    if (settings["num_layers"], settings["model_dim"]) != (layers, dim):
        raise UserError(
            f"the metadata of {where} tell of {settings['num_layers']} layers of dim {settings['model_dim']}, but it"
            f" holds {layers} of dim {dim}: is it the file saved with this model?"
        )
    _check_limits(settings, rows, where)
    pattern = _window_pattern(meta_config, where)
    try:
        plain = ModelConfig(**settings, window_pattern=pattern)
        era = tell(shapes, plain.sequence_len)
        changes: dict[str, Any] = {"vocab_multiple": 1 if rows == plain.vocab_size else 64}
        if era.softcap_unsure and logit_softcap is not None:
            changes["logit_softcap"] = logit_softcap
        config = dataclasses.replace(plain, constants=dataclasses.replace(era.constants, **changes))
    except (UserError, TypeError, AttributeError) as error:
        raise UserError(f"the metadata of {where} describe no model: {error}") from None
    _check_shapes(config, shapes, where)
    return config, era


def _check_limits(settings: Mapping[str, Any], rows: int, where: str) -> None:
    """Refuse sizes that no shape of a tensor bounds, or that would be costly to compare with one."""
    limits = {
        "sequence_len": (MAX_SEQUENCE_LEN, "which is the longest known here"),
        "vocab_size": (rows, "the rows of its embedding table"),
        "num_heads": (settings["model_dim"], "its dim"),
        "num_kv_heads": (settings["num_heads"], "its query heads"),
    }
    for name, (limit, why) in limits.items():
        # What is no number at all is told by ModelConfig.
        if isinstance(settings[name], int) and isinstance(limit, int) and settings[name] > limit:
            raise UserError(
                f"the metadata of {where} tell of a {name} of more than {limit}, {why}: is it the file saved with this"
                " model?"
            )


def _window_pattern(meta_config: Mapping[str, Any], where: str) -> str:
    """The pattern of the layers' windows; models of before there were any see everything."""
    pattern = meta_config.get("window_pattern")
    if pattern is None:
        return "L"
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_LETTERS:
        raise UserError(
            f"the window_pattern in the metadata of {where} is no text of up to {MAX_PATTERN_LETTERS:,} letters:"
            " is it the file saved with this model?"
        )
    return pattern


def _check_shapes(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    with torch.device("meta"):  # of length 1: tables of positions are no parameters
        model = GPT(dataclasses.replace(config, sequence_len=1))
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    wrong = [
        f"{name} is {shapes.get(name, 'missing')} instead of {expected.get(name, 'absent')}"
        for name in sorted(set(expected) | set(shapes))
        if shapes.get(name) != expected.get(name)
    ]
    if wrong:
        more = f" (and {len(wrong) - 2} more)" if len(wrong) > 2 else ""
        raise UserError(f"{where} is no model of the family known here: {'; '.join(wrong[:2])}{more}")
