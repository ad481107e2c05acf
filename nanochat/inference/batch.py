"""Answer several prompts at once: the likeliest text of each, the same as :mod:`nanochat.inference.generate` alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set

import torch

from nanochat.inference.cache import KVCache
from nanochat.inference.generate import check_room
from nanochat.inference.tools import PythonTool
from nanochat.model.gpt import GPT


@torch.inference_mode()
def generate_batch(
    model: GPT,
    prompts: Sequence[list[int]],
    *,
    max_tokens: int,
    stop_ids: Set[int] = frozenset(),
    tools: Sequence[PythonTool] | None = None,
) -> list[list[int]]:
    """Tokens that follow each of B prompts of one length, up to a stop id (left out) or ``max_tokens``.

    A row whose tool forces tokens takes them one a step, while the others go on; one that has ended waits for the rest.
    The sums of a batch are taken in another order than those of one row, so where two tokens are as good as equally
    likely the text may differ from the one computed alone.

    Args:
        prompts: of one length, of at least one id.
        max_tokens: of each row; what a tool forces counts among them.
        tools: a fresh one for each row.

    Raises:
        UserError: when prompt and answer exceed the model's limit.
    """
    length = len(prompts[0])
    assert all(len(prompt) == length for prompt in prompts), "the prompts of a batch have one length"
    check_room(model, length, max_tokens)
    cache = KVCache(model.config, len(prompts), length + max_tokens, model.compute_dtype, model.device)
    rows = [_Row(tools[number] if tools is not None else None) for number in range(len(prompts))]
    never_sampled = sorted(tools[0].never_sampled) if tools is not None else []
    new_ids = [list(prompt) for prompt in prompts]
    for _ in range(max_tokens):
        logits = model(torch.tensor(new_ids, device=model.device), cache, last_only=True)[:, -1]
        if never_sampled:
            logits[:, never_sampled] = -torch.inf
        new_ids = [[row.take(chosen, stop_ids)] for row, chosen in zip(rows, logits.argmax(-1).tolist(), strict=True)]
        if all(row.ended for row in rows):
            break
    return [row.answer for row in rows]


class _Row:
    """One answer as it grows."""

    def __init__(self, tool: PythonTool | None) -> None:
        self.answer: list[int] = []
        self.ended = False
        self._tool = tool
        self._forced: deque[int] = deque()

    def take(self, chosen: int, stop_ids: Set[int]) -> int:
        """Add the next token, a forced one before the one that the model chose; return what the model reads next."""
        if self._forced:
            token = self._forced.popleft()
        else:
            token = chosen
            if self._tool is not None:
                self._forced.extend(self._tool.follow(token))
        self.ended = self.ended or token in stop_ids
        if not self.ended:
            self.answer.append(token)
        return token
