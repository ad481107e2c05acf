"""Continue one text: prefill the prompt once, then decode token by token."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import NamedTuple

import torch

from nanochat.errors import UserError
from nanochat.inference.cache import KVCache
from nanochat.inference.sampling import check_sampling, sample
from nanochat.inference.tools import PythonTool
from nanochat.model.gpt import GPT


class Token(NamedTuple):
    """One token of an answer, and whether a tool forced it or the model chose it."""

    id: int
    forced: bool


def generate(
    model: GPT,
    prompt_ids: list[int],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    stop_ids: Set[int] = frozenset(),
    tool: PythonTool | None = None,
) -> Iterator[int]:
    """The ids of :func:`generate_tokens`."""
    tokens = generate_tokens(
        model,
        prompt_ids,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        stop_ids=stop_ids,
        tool=tool,
    )
    return (token.id for token in tokens)


def generate_tokens(
    model: GPT,
    prompt_ids: list[int],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    stop_ids: Set[int] = frozenset(),
    tool: PythonTool | None = None,
) -> Iterator[Token]:
    """Tokens that follow a prompt, one by one, up to a stop id (not yielded) or ``max_tokens``.

    Everything is checked at the call; computing starts with the first token asked for.

    Args:
        prompt_ids: at least one id.
        max_tokens: what a tool forces counts among them, and is cut where they end.
        temperature, top_k, seed: see :func:`nanochat.inference.sampling.sample`.
        stop_ids: ids that end the text.
        tool: a fresh one, which may force tokens after some that were sampled.

    Raises:
        UserError: when the prompt is empty, prompt and answer exceed the model's limit, or a setting
            makes no sense.
    """
    check_sampling(temperature, top_k)
    if not prompt_ids:
        raise UserError("the prompt is empty: give at least one token to continue, e.g. <|bos|>")
    check_room(model, len(prompt_ids), max_tokens)
    return _decode(model, prompt_ids, max_tokens, temperature, top_k, seed, stop_ids, tool)


def check_room(model: GPT, prompt_len: int, max_tokens: int) -> None:
    """Raise :class:`UserError` when a prompt and so many tokens more do not fit a text of the model."""
    if max_tokens < 1:
        raise UserError(f"max tokens is {max_tokens}: ask for at least 1")
    limit = model.config.max_text_len
    if prompt_len + max_tokens > limit:
        raise UserError(
            f"the prompt has {prompt_len:,} tokens and {max_tokens:,} more were asked for, but a text of this"
            f" model holds {limit:,}: there is room for {max(0, limit - prompt_len):,}"
        )


@torch.inference_mode()
def _decode(
    model: GPT,
    prompt_ids: list[int],
    max_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    stop_ids: Set[int],
    tool: PythonTool | None,
) -> Iterator[Token]:
    position, end = len(prompt_ids), len(prompt_ids) + max_tokens
    cache = KVCache(model.config, 1, end, model.compute_dtype, model.device)
    never_sampled = sorted(tool.never_sampled) if tool is not None else []
    new_ids = prompt_ids
    while position < end:
        logits = model(torch.tensor([new_ids], device=model.device), cache, last_only=True)[:, -1]
        if never_sampled:
            logits[:, never_sampled] = -torch.inf
        chosen = int(sample(logits, temperature, top_k, seed, [0], position))
        forced = tool.follow(chosen) if tool is not None else []
        # Forced tokens need no logits of their own: they are read in one go with the token before them.
        new_ids = [chosen, *forced][: end - position]
        for number, token in enumerate(new_ids):
            if token in stop_ids:
                return
            yield Token(token, forced=number > 0)
        position += len(new_ids)
