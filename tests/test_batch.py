"""Several prompts answered at once say what each says alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from golden_text import golden_tokenizer

from nanochat.checkpoint import Checkpoint
from nanochat.errors import UserError
from nanochat.hardware import detect
from nanochat.inference.batch import generate_batch
from nanochat.inference.generate import generate
from nanochat.inference.session import Session
from nanochat.inference.tools import PythonTool
from nanochat.model.config import Constants, ModelConfig
from nanochat.model.gpt import GPT
from nanochat.model.init import initialize

TOKENIZER = golden_tokenizer()
#: A window of 8 under texts of 40 tokens.
CONFIG = ModelConfig(
    sequence_len=64,
    vocab_size=TOKENIZER.vocab_size,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    model_dim=32,
    window_pattern="SL",
    constants=Constants(short_window=8),
)
PROMPTS = [[row + 3, 7 * row, 40, 2 * row + 1] for row in range(6)]
LENGTH = 30


class EveryFew(PythonTool):
    """Forces three tokens after every few that were chosen."""

    def __init__(self, few: int) -> None:
        super().__init__(TOKENIZER)
        self.few, self.chosen = few, 0

    def follow(self, token: int) -> list[int]:
        self.chosen += 1
        return [5, 6, 7] if self.chosen % self.few == 0 else []


@pytest.fixture(scope="module")
def model() -> GPT:
    """A model in which nothing is zero, so that it says various things."""
    model = GPT(CONFIG)
    initialize(model, 0)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.requires_grad_(False).named_parameters():
        if name.endswith(("c_proj.weight", "lm_head.weight")):
            parameter.normal_(0, 0.2, generator=generator)
    return model


def alone(model: GPT, stop_ids: frozenset[int] = frozenset(), max_tokens: int = LENGTH) -> list[list[int]]:
    return [
        list(generate(model, prompt, max_tokens=max_tokens, stop_ids=stop_ids, tool=EveryFew(row + 2)))
        for row, prompt in enumerate(PROMPTS)
    ]


def together(model: GPT, stop_ids: frozenset[int] = frozenset(), max_tokens: int = LENGTH) -> list[list[int]]:
    tools = [EveryFew(row + 2) for row in range(len(PROMPTS))]
    return generate_batch(model, PROMPTS, max_tokens=max_tokens, stop_ids=stop_ids, tools=tools)


def test_rows_whose_tools_force_tokens_at_other_times_say_what_each_says_alone(model: GPT) -> None:
    expected = alone(model)
    assert len(set(map(tuple, expected))) == len(PROMPTS)
    assert together(model) == expected


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_no_row_exceeds_the_maximum_also_among_forced_tokens(model: GPT, max_tokens: int) -> None:
    assert together(model, max_tokens=max_tokens) == alone(model, max_tokens=max_tokens)


def test_rows_end_at_their_own_stop_and_the_others_go_on(model: GPT) -> None:
    for stop in (alone(model)[0][9], 6):
        expected = alone(model, frozenset({stop}))
        assert len({len(row) for row in expected}) > 1
        assert together(model, frozenset({stop})) == expected


def test_without_tools_the_marks_of_a_result_may_be_said(model: GPT) -> None:
    expected = [list(generate(model, prompt, max_tokens=LENGTH)) for prompt in PROMPTS]
    assert generate_batch(model, PROMPTS, max_tokens=LENGTH) == expected


def test_more_than_the_model_holds_is_refused(model: GPT) -> None:
    limit = CONFIG.max_text_len
    with pytest.raises(UserError, match=f"there is room for {limit - 4:,}"):
        generate_batch(model, PROMPTS, max_tokens=limit)


@pytest.mark.parametrize("source", ["sft", "base"])
def test_prompts_of_all_lengths_are_answered_with_their_numbers(model: GPT, source: str) -> None:
    saved = Checkpoint(stage=source, step=0, model_config=CONFIG, parameters={})
    session = Session(model, TOKENIZER, detect("cpu"), source, saved, Path())
    prompts = ["Hi", "What is 60+33?", "Yo", "Ha", "How is a long word spelled?", "No"]
    found = dict(session.generate_many(prompts, max_tokens=12, batch_size=2))
    assert found == {number: session.generate(prompt, max_tokens=12) for number, prompt in enumerate(prompts)}
