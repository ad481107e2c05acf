"""Conversations as token ids: the one place that knows how a chat is written.

bos, then for each turn user_start text user_end, or assistant_start … assistant_end. The mask is 1 on
what the assistant must learn to say: its text, its python parts with their wrappers, and
assistant_end; it is 0 on everything it is given, the calculator's output included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanochat.errors import UserError
from nanochat.tokenizer.bpe import Tokenizer
from nanochat.tokenizer.special import (
    ASSISTANT_END,
    ASSISTANT_START,
    OUTPUT_END,
    OUTPUT_START,
    PYTHON_END,
    PYTHON_START,
    USER_END,
    USER_START,
)

#: ids and mask of one turn.
Turn = tuple[list[int], list[int]]

#: Most tokens of a conversation that is learned from.
MAX_TOKENS = 2048
#: Kinds of part an assistant's message may have: their wrappers, and whether they are learned.
_PARTS = {
    "text": ("", "", 1),
    "python": (PYTHON_START, PYTHON_END, 1),
    "python_output": (OUTPUT_START, OUTPUT_END, 0),
}


def check_conversation(messages: Any, where: str) -> None:
    """Check a conversation to learn from: an optional system message, then user and assistant in turn, none empty.

    Raises:
        UserError: naming ``where`` and what is wrong.
    """
    _check_messages(messages, where)
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{where} has no answer to learn: it needs a user's message and an assistant's")
    for number, message in enumerate(messages, 1):
        content = message["content"]
        if not (content if isinstance(content, str) else any(part["text"] for part in content)):
            raise UserError(f"{where}, message {number} is empty: give it text, or leave the conversation out")


def _check_messages(messages: Any, where: str) -> None:
    """Check what rendering relies on: who speaks when, and what messages are made of."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise UserError(f"{where} is not a list of messages: write [{{'role': …, 'content': …}}, …]")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise UserError(f"{where}, message {number} lacks 'role' or 'content': give both")
    first = 1 if messages[0]["role"] == "system" else 0
    if first == len(messages):
        raise UserError(f"{where} holds a system message alone: a user's message must follow")
    for number, message in enumerate(messages, 1):
        role, place = message["role"], f"{where}, message {number}"
        expected = "system" if number <= first else ("user", "assistant")[(number - 1 - first) % 2]
        if role != expected:
            raise UserError(f"{place} is by {role!r} where {expected!r} must speak: user and assistant take turns")
        _check_content(message["content"], role, place)


def _check_content(content: Any, role: str, place: str) -> None:
    if isinstance(content, str):
        return
    if role != "assistant" or not isinstance(content, Sequence):
        raise UserError(f"{place} has content that is not text: only an assistant's may be a list of parts")
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise UserError(f"{place} has a part without 'type' and 'text': {part!r:.80}")
        if part.get("type") not in _PARTS:
            raise UserError(f"{place} has a part of type {part.get('type')!r}: it must be one of {', '.join(_PARTS)}")


def render_turns(conversation: Mapping[str, Any], tokenizer: Tokenizer) -> list[Turn]:
    """Ids and mask of each turn; bos belongs to the first, a system message to the user's it precedes.

    Raises:
        UserError: when the messages are not a conversation.
    """
    _check_messages(conversation.get("messages"), "the conversation")
    turns = [_render_turn(message, tokenizer) for message in _merge_system(conversation["messages"])]
    ids, mask = turns[0]
    return [([tokenizer.bos_id, *ids], [0, *mask]), *turns[1:]]


def render(
    conversation: Mapping[str, Any], tokenizer: Tokenizer, max_tokens: int = MAX_TOKENS
) -> tuple[list[int], list[int]]:
    """Ids and mask of a whole conversation, cut at ``max_tokens`` wherever that falls.

    Raises:
        UserError: when the messages are not a conversation.
    """
    turns = render_turns(conversation, tokenizer)
    ids = [token for turn_ids, _ in turns for token in turn_ids]
    mask = [bit for _, turn_mask in turns for bit in turn_mask]
    return ids[:max_tokens], mask[:max_tokens]


def render_for_completion(conversation: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Ids up to where the last assistant message would begin; that message itself is left out.

    Raises:
        UserError: when the messages are not a conversation that ends with the assistant.
    """
    messages = conversation.get("messages")
    _check_messages(messages, "the conversation")
    assert messages is not None
    if messages[-1]["role"] != "assistant":
        raise UserError("the conversation ends with the user: a message of the assistant must stand where it answers")
    turns = render_turns({"messages": messages[:-1]}, tokenizer)
    return [token for ids, _ in turns for token in ids] + [tokenizer.special_id(ASSISTANT_START)]


def _merge_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A leading system message goes in front of the first user's, with a blank line between."""
    if messages[0]["role"] != "system":
        return list(messages)
    system, first, *rest = messages
    return [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *rest]


def _render_turn(message: Mapping[str, Any], tokenizer: Tokenizer) -> Turn:
    special = tokenizer.special_id
    content = message["content"]
    if message["role"] == "user":
        ids = [special(USER_START), *tokenizer.encode(content), special(USER_END)]
        return ids, [0] * len(ids)
    ids, mask = [special(ASSISTANT_START)], [0]
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        start, end, learned = _PARTS[part["type"]]
        part_ids = tokenizer.encode(part["text"])
        if start:
            part_ids = [special(start), *part_ids, special(end)]
        ids += part_ids
        mask += [learned] * len(part_ids)
    return [*ids, special(ASSISTANT_END)], [*mask, 1]
