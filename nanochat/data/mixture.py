"""What a chat model learns from: named and own conversations, with a part of each held out."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.data import chitchat, identity, json_lines
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


def fingerprint(conversations: Sequence[Conversation]) -> str:
    """SHA-256 of conversations and their order."""
    digest = hashlib.sha256()
    for conversation in conversations:
        digest.update(json.dumps(conversation, sort_keys=True, ensure_ascii=False).encode("utf-8"))
    return digest.hexdigest()


def read_conversations(path: Path) -> list[Conversation]:
    """Conversations of a JSON-lines file: a list of messages a line, or an object with ``messages``.

    Raises:
        UserError: naming file and line of what is wrong.
    """
    if not path.exists():
        raise UserError(
            f"conversations {str(path)!r} are neither a known source (chitchat, identity) nor a file that exists"
        )
    found = [_conversation(line) for line in json_lines.read_lines(path)]
    if not found:
        raise UserError(f"{path} holds no conversations: write one list of messages a line")
    return found


@dataclass(frozen=True)
class CheckedFile:
    """What a file of conversations holds."""

    conversations: int
    messages: int
    #: Lines that are wrong, and what the first of them suffer from.
    faulty: int
    faults: tuple[str, ...]


def check_file(path: Path, report_at_most: int = 20) -> CheckedFile:
    """Check every line of a JSON-lines file of conversations.

    Raises:
        UserError: when the file cannot be read.
    """
    conversations = messages = faulty = 0
    faults: list[str] = []
    for line in json_lines.read_lines(path):
        try:
            messages += len(_conversation(line)["messages"])
            conversations += 1
        except UserError as error:
            faulty += 1
            if faulty <= report_at_most:
                faults.append(str(error))
    return CheckedFile(conversations, messages, faulty, tuple(faults))


def _conversation(line: json_lines.Line) -> Conversation:
    value = json_lines.parse(line)
    messages = value.get("messages") if isinstance(value, dict) else value
    check_conversation(messages, line.where)
    return {"messages": messages}


def _split(conversations: list[Conversation]) -> tuple[list[Conversation], list[Conversation]]:
    """Every twentieth conversation is held out; fewer than twenty hold out none."""
    held_out = conversations[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    training = [c for i, c in enumerate(conversations) if (i + 1) % HELD_OUT_EVERY]
    return training, held_out


def is_conversations(path: Path) -> bool:
    """Whether a JSON-lines file seems to hold conversations rather than text: by its first line."""
    if path.suffix.lower() != ".jsonl":
        return False
    line = next(json_lines.read_lines(path), None)
    if line is None:
        return True
    value = json_lines.parse(line)
    return isinstance(value, list) or (isinstance(value, dict) and "messages" in value)
