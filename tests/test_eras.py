"""Models of every era of the family are computed as they were trained."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from golden_model import deviation, load_golden

from nanochat.inference.cache import KVCache
from nanochat.model.config import Constants

FP32_TOLERANCE = 1e-5

OCTOBER = Constants(
    rotary_base=10_000,
    qk_scale=1.0,
    value_embed_scale=0.0,
    vocab_multiple=1,
    residual_lambdas=False,
    smear=False,
    backout=False,
)
JANUARY = Constants(
    rotary_base=10_000,
    qk_scale=1.0,
    value_embed_scale=2.0,
    value_gate_channels=32,
    short_window=512,
    smear=False,
    backout=False,
)
ERAS = {
    "oct2025": OCTOBER,
    "jan16": JANUARY,
    "mar02": dataclasses.replace(JANUARY, logit_softcap=20.0),
    "mar09": Constants(qk_scale=1.15, short_window=384, smear=False, backout=False),
}


@pytest.mark.parametrize("era", ERAS)
def test_an_era_is_computed_as_it_was_trained(era: str) -> None:
    model, golden = load_golden(f"eras/{era}", ERAS[era])
    with torch.no_grad():
        logits = model(golden["tokens"])[:, -golden["logits"].size(1) :]
        losses = model.losses(golden["tokens"], golden["targets"])
    mean = losses.sum() / (golden["targets"] != -1).sum()
    assert deviation(logits, golden["logits"]) <= FP32_TOLERANCE
    assert deviation(losses.flatten(), golden["loss_none"]) <= FP32_TOLERANCE
    assert deviation(mean[None], golden["loss_mean"]) <= FP32_TOLERANCE


@pytest.mark.parametrize("era", ERAS)
def test_an_era_decodes_with_a_cache_as_without(era: str) -> None:
    model, golden = load_golden(f"eras/{era}", ERAS[era])
    ids, num_last = golden["tokens"], golden["logits"].size(1)
    cache = KVCache(model.config, 1, ids.size(1), torch.float32, model.device)
    with torch.no_grad():
        model(ids[:, :-num_last], cache, last_only=True)
        decoded = [model(token, cache) for token in ids[:, -num_last:].split(1, dim=1)]
    assert deviation(torch.cat(decoded, dim=1), golden["logits"]) <= FP32_TOLERANCE
