"""Decoding with a cache equals the full forward, and the same seed gives the same text."""

from __future__ import annotations

import json
import math

import pytest
import torch
from golden_model import GOLDEN, MODEL_NAMES, deviation, load_golden, model_config

from nanochat.errors import UserError
from nanochat.inference.cache import KVCache
from nanochat.inference.generate import generate
from nanochat.inference.sampling import sample, uniform
from nanochat.model.config import Constants, ModelConfig
from nanochat.model.gpt import GPT
from nanochat.model.init import initialize

FP32_TOLERANCE = 1e-5
#: Relative to the largest logit, after a decode in another order of operations.
BF16_TOLERANCE = 0.05
FP16_TOLERANCE = 0.01

#: A short window of 8 under a length of 16, so that texts of 60 tokens run past both.
WINDOWED = ModelConfig(
    sequence_len=16,
    vocab_size=70,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    model_dim=64,
    window_pattern="SL",
    constants=Constants(short_window=8),
)
TEXT_LEN = 60


@pytest.fixture(scope="module")
def model() -> GPT:
    """A model in which nothing is zero, so that every part of the cache counts."""
    model = GPT(WINDOWED)
    initialize(model, 0)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.requires_grad_(False).named_parameters():
        if name.endswith(("c_proj.weight", "lm_head.weight")):
            parameter.normal_(0, 0.1, generator=generator)
        elif name == "smear_lambda":
            parameter.fill_(0.5)
    return model


@pytest.fixture(scope="module")
def run_model() -> GPT:
    """The small real model of the golden run."""
    folder = GOLDEN / "run" / "base_checkpoints" / "d2"
    model = GPT(model_config(json.loads((folder / "meta_000060.json").read_text())["model_config"]))
    model.load_state_dict(torch.load(folder / "model_000060.pt", weights_only=True))
    return model


@pytest.fixture(scope="module")
def expected_run() -> dict:
    return json.loads((GOLDEN / "run" / "expected_model.json").read_text())


def new_cache(model: GPT, batch_size: int = 1, capacity: int = TEXT_LEN) -> KVCache:
    return KVCache(model.config, batch_size, capacity, model.compute_dtype, model.device)


def random_ids(batch_size: int = 1, length: int = TEXT_LEN) -> torch.Tensor:
    return torch.randint(0, WINDOWED.vocab_size, (batch_size, length), generator=torch.Generator().manual_seed(2))


# Cache ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODEL_NAMES)
@torch.no_grad()
def test_cached_decode_equals_the_familys(name: str) -> None:
    model, golden = load_golden(f"model/{name}")
    prefill_len = json.loads((GOLDEN / f"model/{name}.json").read_text())["prefill_len"]
    ids, expected = golden["tokens"][:1], golden["cached_decode_logits"]
    cache = new_cache(model, capacity=prefill_len + expected.size(1) - 1)
    logits = [model(ids[:, :prefill_len], cache, last_only=True)]
    for position in range(prefill_len, cache.capacity):
        logits.append(model(ids[:, position : position + 1], cache))
    assert deviation(torch.cat(logits, dim=1), expected) <= FP32_TOLERANCE


@pytest.mark.parametrize("chunks", [[1] * TEXT_LEN, [40] + [1] * 20, [7, 1, 30, 2, 20], [TEXT_LEN]], ids=str)
def test_cached_decode_equals_full_forward_past_every_window(model: GPT, chunks: list[int]) -> None:
    ids = random_ids(batch_size=2)
    cache = new_cache(model, batch_size=2)
    decoded = torch.cat([model(chunk, cache) for chunk in ids.split(chunks, dim=1)], dim=1)
    assert cache.position == TEXT_LEN > WINDOWED.sequence_len
    assert deviation(decoded, model(ids)) <= FP32_TOLERANCE


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, BF16_TOLERANCE), (torch.float16, FP16_TOLERANCE)])
def test_cached_decode_stays_near_full_forward_in_narrow_dtypes(
    model: GPT, dtype: torch.dtype, tolerance: float
) -> None:
    narrow = GPT(WINDOWED)
    narrow.load_state_dict(model.state_dict())
    narrow.set_compute_dtype(dtype)
    ids, cache = random_ids(), new_cache(narrow)
    with torch.no_grad():
        decoded = torch.cat([narrow(chunk, cache) for chunk in ids.split([20] + [1] * 40, dim=1)], dim=1)
        assert deviation(decoded, narrow(ids)) <= tolerance


def test_expanded_samples_go_on_like_texts_of_their_own(model: GPT) -> None:
    prompts, answers = random_ids(batch_size=2, length=20), random_ids(batch_size=6, length=5)
    cache = new_cache(model, batch_size=2)
    model(prompts, cache)
    samples = cache.expand(3)
    decoded = torch.cat([model(token, samples) for token in answers.split(1, dim=1)], dim=1)
    whole = torch.cat((prompts.repeat_interleave(3, dim=0), answers), dim=1)
    assert samples.batch_size == 6
    assert deviation(decoded, model(whole)[:, -5:]) <= FP32_TOLERANCE


def test_a_clone_leaves_the_original_as_it_was(model: GPT) -> None:
    ids, cache = random_ids(), new_cache(model)
    model(ids[:, :20], cache)
    copy = cache.clone()
    model(ids[:, 30:40], copy)
    assert (cache.position, copy.position) == (20, 30)
    assert deviation(model(ids[:, 20:40], cache), model(ids[:, :40])[:, 20:]) <= FP32_TOLERANCE


def test_more_tokens_than_the_cache_holds_are_our_mistake(model: GPT) -> None:
    with pytest.raises(AssertionError, match="do not fit a cache of 10"):
        model(random_ids(length=11), new_cache(model, capacity=10))


# Sampling ------------------------------------------------------------------------------------------


def test_temperature_zero_and_nearly_zero_take_the_likeliest() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    for temperature in (0.0, 1e-300, 1e-5):
        assert torch.equal(sample(logits, temperature, 0, 0, range(5), 0), logits.argmax(-1))


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    together = sample(logits, 1.0, 10, 7, range(8), 3)
    alone = [sample(logits[i : i + 1], 1.0, 10, 7, [i], 3) for i in range(8)]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together.flip(0), sample(logits.flip(0), 1.0, 10, 7, range(7, -1, -1), 3))


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.7, 0), (2.0, 3), (1.0, 100)])
def test_draws_follow_the_softmax_of_the_kept_tokens(temperature: float, top_k: int) -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, 0.5])
    kept = logits >= logits.topk(min(top_k or 5, 5)).values[-1]
    expected = (logits / temperature).masked_fill(~kept, -math.inf).softmax(-1)
    num_draws = 20_000
    ids = sample(logits.expand(num_draws, -1), temperature, top_k, 1, range(num_draws), 0)
    share = torch.bincount(ids, minlength=5) / num_draws
    assert (share[~kept] == 0).all()
    torch.testing.assert_close(share, expected, rtol=0, atol=4 * 0.5 / math.sqrt(num_draws))  # four deviations


def test_seed_sample_and_position_each_change_the_draw() -> None:
    draws = [
        uniform(*arguments) for arguments in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 0, 0), (2**64, 9, 0)]
    ]
    assert len(set(draws)) == len(draws)
    assert all(0 <= draw < 1 for draw in draws)
    assert uniform(3, 4, 5) == uniform(3, 4, 5)


def test_uniform_numbers_are_even_along_each_argument() -> None:
    for axis in range(3):
        draws = torch.tensor([uniform(*(i if a == axis else 5 for a in range(3))) for i in range(5000)])
        counts = torch.histc(draws, bins=10, min=0, max=1)
        assert ((counts - 500).square() / 500).sum() < 27.9  # chi-square, 9 degrees of freedom, 0.1 %


@pytest.mark.parametrize("temperature", [-0.1, math.nan, math.inf])
def test_a_senseless_temperature_is_refused(temperature: float) -> None:
    with pytest.raises(UserError, match="temperature"):
        sample(torch.zeros(1, 5), temperature, 0, 0, [0], 0)


def test_a_negative_top_k_is_refused() -> None:
    with pytest.raises(UserError, match="top-k"):
        sample(torch.zeros(1, 5), 1.0, -1, 0, [0], 0)


# Generate ------------------------------------------------------------------------------------------


def test_greedy_text_equals_the_familys(run_model: GPT, expected_run: dict) -> None:
    for case in expected_run["greedy"]:
        prompt, result = case["prompt_ids"], case["result"]
        assert prompt + list(generate(run_model, prompt, max_tokens=len(result) - len(prompt))) == result


@torch.no_grad()
def test_logits_of_the_run_equal_the_familys(run_model: GPT, expected_run: dict) -> None:
    expected = torch.tensor(expected_run["logits_last"]["logits"])
    logits = run_model(torch.tensor([expected_run["logits_last"]["ids"]]), last_only=True)[0, 0]
    assert deviation(logits, expected) <= FP32_TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_generate_the_same_greedy_text(dtype: torch.dtype, run_model: GPT, expected_run: dict) -> None:
    narrow = GPT(run_model.config)
    narrow.load_state_dict(run_model.state_dict())
    narrow.set_compute_dtype(dtype)
    case = expected_run["greedy"][0]
    answer = list(generate(narrow, case["prompt_ids"], max_tokens=len(case["result"]) - len(case["prompt_ids"])))
    assert case["prompt_ids"] + answer == case["result"]


def test_generation_ends_before_a_stop_id(run_model: GPT, expected_run: dict) -> None:
    case = expected_run["greedy"][0]
    answer = case["result"][len(case["prompt_ids"]) :]
    stop = answer[5]
    first = answer.index(stop)
    assert list(generate(run_model, case["prompt_ids"], max_tokens=20, stop_ids={stop})) == answer[:first]


def test_a_seed_gives_the_same_text_again_and_another_seed_another(model: GPT) -> None:
    def text(seed: int) -> list[int]:
        return list(generate(model, [1, 2], max_tokens=30, temperature=1.0, top_k=50, seed=seed))

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert len(text(1)) == 30


def test_generation_fills_the_limit_and_no_more(model: GPT) -> None:
    limit = WINDOWED.max_text_len
    prompt = [1] * (limit - 2)
    assert len(list(generate(model, prompt, max_tokens=2))) == 2
    with pytest.raises(UserError, match="there is room for 2"):
        generate(model, prompt, max_tokens=3)
    with pytest.raises(UserError, match="there is room for 0"):
        generate(model, [1] * (limit + 5), max_tokens=1)


def test_what_cannot_be_generated_is_refused_at_the_call(model: GPT) -> None:
    with pytest.raises(UserError, match="prompt is empty"):
        generate(model, [], max_tokens=1)
    with pytest.raises(UserError, match="max tokens is 0"):
        generate(model, [1], max_tokens=0)
    with pytest.raises(UserError, match="temperature"):
        generate(model, [1], max_tokens=1, temperature=-1)
