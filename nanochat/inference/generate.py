"""Continue one text: prefill the prompt once, then decode token by token."""

from __future__ import annotations

from collections.abc import Iterator, Set

import torch

from nanochat.errors import UserError
from nanochat.inference.cache import KVCache
from nanochat.inference.sampling import check_sampling, sample
from nanochat.model.gpt import GPT


def generate(
    model: GPT,
    prompt_ids: list[int],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    stop_ids: Set[int] = frozenset(),
) -> Iterator[int]:
    """Token ids that follow a prompt, one by one, up to a stop id (not yielded) or ``max_tokens``.

    Everything is checked at the call; computing starts with the first token asked for.

    Args:
        prompt_ids: at least one id.
        temperature, top_k, seed: see :func:`nanochat.inference.sampling.sample`.
        stop_ids: ids that end the text.

    Raises:
        UserError: when the prompt is empty, prompt and answer exceed the model's limit, or a setting
            makes no sense.
    """
    check_sampling(temperature, top_k)
    if not prompt_ids:
        raise UserError("the prompt is empty: give at least one token to continue, e.g. <|bos|>")
    if max_tokens < 1:
        raise UserError(f"max tokens is {max_tokens}: ask for at least 1")
    limit = model.config.max_text_len
    if len(prompt_ids) + max_tokens > limit:
        raise UserError(
            f"the prompt has {len(prompt_ids):,} tokens and {max_tokens:,} more were asked for, but a text of this"
            f" model holds {limit:,}: there is room for {max(0, limit - len(prompt_ids)):,}"
        )
    return _decode(model, prompt_ids, max_tokens, temperature, top_k, seed, stop_ids)


@torch.inference_mode()
def _decode(
    model: GPT,
    prompt_ids: list[int],
    max_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    stop_ids: Set[int],
) -> Iterator[int]:
    length = len(prompt_ids)
    cache = KVCache(model.config, 1, length + max_tokens, model.compute_dtype, model.device)
    new_ids = prompt_ids
    for position in range(length, length + max_tokens):
        logits = model(torch.tensor([new_ids], device=model.device), cache, last_only=True)[:, -1]
        chosen = int(sample(logits, temperature, top_k, seed, [0], position))
        if chosen in stop_ids:
            return
        yield chosen
        new_ids = [chosen]
