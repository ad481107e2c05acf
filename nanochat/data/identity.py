"""Generated conversations that teach a model who it is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from nanochat.data.held_out import Part, part_of

SEED = 1
NUM_CONVERSATIONS = 400
SHARE_OF_TWO_QUESTIONS = 0.25

GREETINGS = (
    *("", "Hi! ", "Hello. ", "Hey, ", "Hi there, ", "Good morning! ", "Good evening. ", "Excuse me, "),
    *("Quick question: ", "Sorry, ", "One more thing: ", "By the way, "),
)
CLOSINGS = (
    *("", " Please tell me.", " I am curious.", " Just asking.", " I would like to know.", " Thanks!"),
    *(" I forgot.", " Be honest."),
)

#: Kinds of question, each with ways to ask and ways to answer; {name} is the model's.
TOPICS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "name": (
        (
            "who are you?",
            "what is your name?",
            "what's your name?",
            "do you have a name?",
            "what should I call you?",
            "can you tell me who you are?",
            "who am I talking to?",
            "are you a person?",
            "introduce yourself, please.",
            "tell me your name.",
            "what are you called?",
            "say your name.",
        ),
        (
            "I am {name}, a small language model.",
            "My name is {name}. I am a small language model.",
            "I'm {name}, a small language model you can chat with.",
            "You are talking to {name}, a small language model.",
        ),
    ),
    "maker": (
        (
            "who made you?",
            "who trained you?",
            "where do you come from?",
            "which company made you?",
            "how were you made?",
            "who is your owner?",
        ),
        (
            "I am {name}. My owner trained me with nanochat, from text to chat.",
            "I was trained by my owner with nanochat. My name is {name}.",
            "No company made me: my owner trained me with nanochat. I am {name}.",
        ),
    ),
    "kind": (
        (
            "are you ChatGPT?",
            "are you a human?",
            "are you an AI?",
            "are you real?",
            "what kind of model are you?",
        ),
        (
            "I am {name}, a small language model, not a person.",
            "No, I'm not a person: I am {name}, a small language model.",
        ),
    ),
    "ability": (
        (
            "what can you do?",
            "what are you good at?",
            "how can you help me?",
            "what do you know?",
        ),
        (
            "I am {name}. I am small, so I mostly like to chat.",
            "I can chat with you a little. I am {name}, and I am a small model.",
        ),
    ),
}


def conversations(name: str = "nanochat") -> list[dict[str, Any]]:
    """Several hundred short conversations about who the model is, always the same ones for a name.

    They ask only questions of the part train.
    """
    chosen = random.Random(SEED)
    wordings = _shuffled("train")
    made = []
    for number in range(NUM_CONVERSATIONS):
        asked = [wordings[number % len(wordings)]]
        if chosen.random() < SHARE_OF_TWO_QUESTIONS:
            asked.append(chosen.choice(wordings))
        messages: list[dict[str, str]] = []
        for topic, question in asked:
            answer = chosen.choice(TOPICS[topic][1]).format(name=name)
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        made.append({"messages": messages})
    return made


def questions(part: Part) -> list[str]:
    """The wordings of a part, shuffled; every good answer to any of them tells the name."""
    return [question for _, question in _shuffled(part)]


def _shuffled(part: Part) -> list[tuple[str, str]]:
    """Topic and question of a part; a question's parts differ in their greetings and closings."""
    wordings = [wording for wording in _wordings() if part_of("name", wording[1]) == part]
    random.Random(SEED).shuffle(wordings)
    return wordings


def _wordings() -> Iterator[tuple[str, str]]:
    """Topic and wording of every way to ask, with every greeting and closing."""
    for topic, (asked, _) in TOPICS.items():
        for greeting, question, closing in itertools.product(GREETINGS, asked, CLOSINGS):
            begins_sentence = not greeting or greeting[-2] in "!."
            begun = question[0].upper() + question[1:] if begins_sentence else question
            yield topic, greeting + begun + closing
