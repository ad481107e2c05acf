"""The packaged corpus: 4,017 short conversations between two people (PyPI chitchat-dataset, MIT).

The demo's base model reads them as text, its chat model as user and assistant.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from importlib import resources
from typing import Any, TypeVar

from nanochat.errors import UserError

PACKAGE = "chitchat-dataset==0.9.0"
MODULE = "chitchat_dataset"
NUM_VALIDATION = 300
SHUFFLE_SEED = 0

Item = TypeVar("Item")


def turns() -> list[list[str]]:
    """The turns of every conversation that has at least two which are not empty; empty ones are dropped.

    Raises:
        UserError: when the package is not installed.
    """
    try:
        # Read by us: the package opens its file in the machine's own encoding.
        data = json.loads(resources.files(MODULE).joinpath("dataset.json").read_text(encoding="utf-8"))
    except ModuleNotFoundError:
        raise UserError(f"the chitchat conversations are not installed: pip install '{PACKAGE}'") from None
    found = []
    for conversation in data.values():
        texts = (" ".join(part["text"] for part in turn).strip() for turn in conversation["messages"])
        kept = [text for text in texts if text]
        if len(kept) >= 2:
            found.append(kept)
    return found


def split() -> tuple[list[str], list[str]]:
    """Training and validation documents: one a conversation, its turns as lines ``A: …`` and ``B: …``."""
    return _split(["\n".join(f"{'AB'[i % 2]}: {text}" for i, text in enumerate(each)) for each in turns()])


def split_conversations() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The same split as conversations: A is the user, B the assistant, a last word of A left out."""
    roles = ("user", "assistant")
    conversations = [
        {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(each[: len(each) // 2 * 2])]}
        for each in turns()
    ]
    return _split(conversations)


def _split(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Shuffled alike whatever the items are; the last ones are the validation set."""
    shuffled = list(items)
    random.Random(SHUFFLE_SEED).shuffle(shuffled)
    return shuffled[:-NUM_VALIDATION], shuffled[-NUM_VALIDATION:]
