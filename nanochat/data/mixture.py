"""What a chat model learns from: named and own conversations, with a part of each held out."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.data import chitchat, identity, json_lines, skills
from nanochat.data.conversation import check_conversation
from nanochat.data.held_out import Part
from nanochat.errors import UserError

Conversation = dict[str, Any]

#: One own conversation in this many is held out for validation.
HELD_OUT_EVERY = 20
#: The order of the mixture, the same for every run.
SHUFFLE_SEED = 42
#: Generated skills that can be named, and how many items each gives unless a number follows its name.
SKILL_ITEMS: dict[skills.Skill, int] = {"spelling": 6_000, "counting": 4_000, "sums": 2_000}


def load_mixture(names: Sequence[str], model_name: str) -> tuple[list[Conversation], list[Conversation]]:
    """Training and held-out conversations of several sources, the training ones shuffled together.

    Nothing of the skills is held out here: they are graded, by :func:`skill_items`, not measured in bits per byte.

    Args:
        names: ``chitchat``, ``identity``, a skill (``spelling``, ``counting``, ``sums``, or with a number of items, as
            ``sums:500``), or paths of JSON-lines files. Words for the skills are those of the other sources.
        model_name: who the model says it is, in the identity conversations.

    Raises:
        UserError: for an unknown name, a file that is absent, empty or malformed (file and line), or a skill that
            finds no words.
    """
    read = [(name, *_read(name, model_name)) for name in names if _skill(name) is None]
    training = [conversation for _, of_training, _ in read for conversation in of_training]
    held_out = [conversation for _, _, of_held_out in read for conversation in of_held_out]
    wanted = [found for name in names if (found := _skill(name)) is not None]
    words = skills.words_of(_with_words(read)) if wanted else []
    for skill, count in wanted:
        training += [item.conversation() for item in _items(skill, "train", count, words)]
    if not training:
        raise UserError("there is nothing to learn from: name at least one source with --conversations")
    random.Random(SHUFFLE_SEED).shuffle(training)
    return training, held_out


def skill_items(
    skill: skills.Skill, part: Part, count: int, names: Sequence[str], model_name: str = "nanochat"
) -> list[skills.Item]:
    """Items to grade a model on that was taught with the mixture of these names; none of val or test is in it.

    Raises:
        UserError: when a source cannot be read, or the sources hold no words for the skill.
    """
    if skill not in ("spelling", "counting"):
        return _items(skill, part, count, (), model_name)
    read = [(name, *_read(name, model_name)) for name in names if _skill(name) is None]
    return _items(skill, part, count, skills.words_of(_with_words(read)))


def _read(name: str, model_name: str) -> tuple[list[Conversation], list[Conversation]]:
    """Training and held-out conversations of a source that is not a skill."""
    if name == "chitchat":
        return chitchat.split_conversations()
    if name == "identity":
        return identity.conversations(model_name), []
    return _split(read_conversations(Path(name)))


def _with_words(read: Iterable[tuple[str, list[Conversation], list[Conversation]]]) -> Iterator[Conversation]:
    """What skills spell and count in: the words that people wrote, in the training conversations."""
    for name, training, _ in read:
        if name != "identity":
            yield from training


def _skill(name: str) -> tuple[skills.Skill, int] | None:
    asked, colon, amount = name.partition(":")
    skill = next((skill for skill in SKILL_ITEMS if skill == asked), None)
    if skill is None:
        return None
    if not colon:
        return skill, SKILL_ITEMS[skill]
    if not (amount.isascii() and amount.isdigit() and int(amount)):
        raise UserError(f"{name!r} asks for no number of items: write for instance {skill}:{SKILL_ITEMS[skill]}")
    return skill, int(amount)


def _items(
    skill: skills.Skill, part: Part, count: int, words: Sequence[str], model_name: str = "nanochat"
) -> list[skills.Item]:
    found = skills.items(skill, part, count, words=words, model_name=model_name)
    if not found:
        raise UserError(
            f"there are no words for {skill}: name conversations beside it whose words it can use, such as chitchat"
        )
    return found


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
        known = ", ".join(["chitchat", "identity", *SKILL_ITEMS])
        raise UserError(f"conversations {str(path)!r} are neither a known source ({known}) nor a file that exists")
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
