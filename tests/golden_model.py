"""Models whose values the family's programs computed, for the tests that compare with them."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from nanochat.model.config import Constants, ModelConfig
from nanochat.model.gpt import GPT

GOLDEN = Path(__file__).parent / "golden"

MODEL_NAMES = ("plain_gqa_window", "plain_mha_full_odd", "default_gqa_window", "default_mha_full_odd")


def model_config(family: dict, constants: Constants | None = None) -> ModelConfig:
    """A config from the family's names."""
    return ModelConfig(
        sequence_len=family["sequence_len"],
        vocab_size=family["vocab_size"],
        num_layers=family["n_layer"],
        num_heads=family["n_head"],
        num_kv_heads=family["n_kv_head"],
        model_dim=family["n_embd"],
        window_pattern=family.get("window_pattern", "L"),
        constants=constants or Constants(),
    )


def load_golden(path: str, constants: Constants | None = None) -> tuple[GPT, dict[str, Tensor]]:
    """The model of ``golden/<path>.json`` and all tensors of its safetensors file."""
    about = json.loads((GOLDEN / f"{path}.json").read_text())
    tensors = load_file(GOLDEN / f"{path}.safetensors")
    model = GPT(model_config(about.get("config") or about["model_config"], constants))
    model.load_state_dict({name[6:]: value for name, value in tensors.items() if name.startswith("param.")})
    return model, tensors


def deviation(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()
