"""What a chat model learns from: named and own conversations, with a part of each held out."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanochat.data import chitchat, identity
from nanochat.data.conversation import check_conversation
from nanochat.errors import UserError

Conversation = dict[str, Any]

#: One own conversation in this many is held out for validation.
HELD_OUT_EVERY = 20
#: The order of the mixture, the same for every run.
SHUFFLE_SEED = 42


def load_mixture(names: Sequence[str], model_name: str) -> tuple[list[Conversation], list[Conversation]]:
    """Training and held-out conversations of several sources, the training ones shuffled together.

    Args:
        names: ``chitchat``, ``identity``, or paths of JSON-lines files.
        model_name: who the model says it is, in the identity conversations.

    Raises:
        UserError: for an unknown name, or a file that is absent, empty or malformed (file and line).
    """
    training: list[Conversation] = []
    held_out: list[Conversation] = []
    for name in names:
        if name == "chitchat":
            of_training, of_held_out = chitchat.split_conversations()
        elif name == "identity":
            of_training, of_held_out = identity.conversations(model_name), []
        else:
            of_training, of_held_out = _split(read_conversations(Path(name)))
        training += of_training
        held_out += of_held_out
    if not training:
        raise UserError("there is nothing to learn from: name at least one source with --conversations")
    random.Random(SHUFFLE_SEED).shuffle(training)
    return training, held_out


def read_conversations(path: Path) -> list[Conversation]:
    """Conversations of a JSON-lines file: a list of messages a line, or an object with ``messages``.

    Raises:
        UserError: naming file and line of what is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(
            f"conversations {str(path)!r} are neither a known source (chitchat, identity) nor a file that exists"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"conversations cannot be read from {path}: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where} is not JSON ({error}): write one list of messages a line") from None
        messages = value.get("messages") if isinstance(value, dict) else value
        check_conversation(messages, where)
        found.append({"messages": messages})
    if not found:
        raise UserError(f"{path} holds no conversations: write one list of messages a line")
    return found


def _split(conversations: list[Conversation]) -> tuple[list[Conversation], list[Conversation]]:
    """Every twentieth conversation is held out; fewer than twenty hold out none."""
    held_out = conversations[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    training = [c for i, c in enumerate(conversations) if (i + 1) % HELD_OUT_EVERY]
    return training, held_out
