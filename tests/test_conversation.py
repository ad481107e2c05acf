"""A chat is written as the family writes it, and what is no chat is refused."""

from __future__ import annotations

import pytest
from golden_text import expected, golden_tokenizer

from nanochat.data import identity
from nanochat.data.conversation import check_conversation, render, render_for_completion, render_turns
from nanochat.errors import UserError

CASES = expected("run/expected_tokenizer")["conversations"]
USER = {"role": "user", "content": "2+2?"}
ASSISTANT = {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}


def parts(*kinds_and_texts: tuple[str, str]) -> dict:
    return {"role": "assistant", "content": [{"type": kind, "text": text} for kind, text in kinds_and_texts]}


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["max_tokens"]))
def test_ids_and_mask_equal_the_family_s(case: dict) -> None:
    ids, mask = render(case["conversation"], golden_tokenizer(), case["max_tokens"])
    assert ids == case["ids"]
    assert mask == case["mask"]


@pytest.mark.parametrize("case", [case for case in CASES if "for_completion" in case])
def test_prompt_for_a_completion_equals_the_family_s(case: dict) -> None:
    assert render_for_completion(case["conversation"], golden_tokenizer()) == case["for_completion"]


def test_turns_together_are_the_conversation() -> None:
    conversation = {"messages": [SYSTEM, USER, ASSISTANT, USER, parts(("python", "2+2"), ("python_output", "4"))]}
    turns = render_turns(conversation, golden_tokenizer())
    assert len(turns) == 4
    whole = [token for ids, _ in turns for token in ids], [bit for _, mask in turns for bit in mask]
    assert render(conversation, golden_tokenizer()) == whole


def test_only_what_the_assistant_says_is_learned() -> None:
    tokenizer = golden_tokenizer()
    said = parts(("text", "Hm. "), ("python", "2+2"), ("python_output", "4"), ("text", "Four."))
    ids, mask = render({"messages": [USER, said]}, tokenizer)
    learned = tokenizer.decode([token for token, bit in zip(ids, mask, strict=True) if bit])
    assert learned == "Hm. <|python_start|>2+2<|python_end|>Four.<|assistant_end|>"


@pytest.mark.parametrize("messages", [[USER, ASSISTANT], [SYSTEM, USER, ASSISTANT], [USER, ASSISTANT, USER]])
def test_conversations_are_accepted(messages: list) -> None:
    check_conversation(messages, "here")


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        (None, "not a list of messages"),
        ([], "not a list of messages"),
        ("hello", "not a list of messages"),
        (["hello"], "message 1 lacks 'role' or 'content'"),
        ([{"role": "user"}], "message 1 lacks"),
        ([USER], "no answer to learn"),
        ([SYSTEM], "system message alone"),
        ([SYSTEM, USER], "no answer to learn"),
        ([ASSISTANT, USER], "message 1 is by 'assistant' where 'user' must speak"),
        ([USER, USER], "message 2 is by 'user' where 'assistant' must speak"),
        ([USER, ASSISTANT, SYSTEM, USER], "message 3 is by 'system' where 'user' must speak"),
        ([USER, {"role": "bot", "content": "4"}], "message 2 is by 'bot'"),
        ([{"role": "user", "content": ["2+2?"]}, ASSISTANT], "message 1 has content that is not text"),
        ([USER, {"role": "assistant", "content": 4}], "message 2 has content that is not text"),
        ([USER, {"role": "assistant", "content": ["4"]}], "message 2 has a part without"),
        ([USER, parts(("image", "4"))], "part of type 'image': it must be one of text, python, python_output"),
        ([{"role": "user", "content": ""}, ASSISTANT], "message 1 is empty"),
        ([USER, {"role": "assistant", "content": []}], "message 2 is empty"),
        ([{"role": "system", "content": ""}, USER, ASSISTANT], "message 1 is empty"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_place(messages: object, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as refused:
        check_conversation(messages, "chats.jsonl, line 3")
    assert str(refused.value).startswith("chats.jsonl, line 3")


def test_a_completion_needs_a_place_for_the_answer() -> None:
    tokenizer = golden_tokenizer()
    with pytest.raises(UserError, match="ends with the user"):
        render_for_completion({"messages": [USER]}, tokenizer)
    with pytest.raises(UserError, match="not a list of messages"):
        render_for_completion({"messages": [ASSISTANT][:0]}, tokenizer)
    unsaid = {"role": "assistant", "content": ""}
    assert render_for_completion({"messages": [USER, unsaid]}, tokenizer) == render_for_completion(
        {"messages": [USER, ASSISTANT]}, tokenizer
    )


def test_identity_conversations_tell_the_name_and_are_always_the_same() -> None:
    made = identity.conversations("Ada {x}")
    assert made == identity.conversations("Ada {x}")
    assert len(made) == identity.NUM_CONVERSATIONS
    for number, conversation in enumerate(made):
        check_conversation(conversation["messages"], f"conversation {number}")
        assert all("Ada {x}" in message["content"] for message in conversation["messages"][1::2])
    said = {message["content"] for conversation in made for message in conversation["messages"]}
    assert any("trained me with nanochat" in text for text in said)
    assert any("small language model" in text for text in said)
