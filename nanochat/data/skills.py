"""Small skills that can be taught and graded: spelling, counting letters, sums with the calculator, telling one's name.

Items are generated, always the same ones for the same arguments. An item belongs to train, val or test by what it is
about (:mod:`nanochat.data.held_out`): a word held out of spelling is held out of counting too, and a pair of numbers
in either order.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from nanochat.data import identity
from nanochat.data.held_out import Part, part_of

Skill = Literal["name", "spelling", "counting", "sums"]
SKILLS: tuple[Skill, ...] = get_args(Skill)

SEED = 1
WORD_LETTERS = range(3, 13)
#: A word that stands only once is more often a slip or a name than a word.
WORD_OCCURRENCES = 2
#: Share of counting questions about a letter of the word; the others ask for any letter.
SHARE_OF_LETTERS_IN_WORD = 0.85
LETTERS = "abcdefghijklmnopqrstuvwxyz"
#: Digits of the longest summand.
MOST_DIGITS = 3
#: Pairs of numbers that are looked at for each one asked for, before fewer are given.
MOST_DRAWS = 200

SPELLING_QUESTIONS = (
    *("Spell the word: {word}", "Spell the word {word}.", "Spell {word}.", "Please spell {word}."),
    *("How do you spell {word}?", "How is {word} spelled?", "Can you spell the word {word}?"),
)
COUNTING_QUESTIONS = (
    "How many {letter} are in {word}?",
    "How many {letter} are in the word {word}?",
    "How many {letter} does {word} have?",
    "How many times does {letter} occur in {word}?",
    "How often does the letter {letter} appear in {word}?",
    "Count the letter {letter} in {word}.",
    "Count the {letter} in the word {word}.",
    "Can you count how often {letter} is in {word}?",
    "In the word {word}, how many {letter} are there?",
    "What is the number of {letter} in {word}?",
    "¿Cuántas {letter} hay en {word}?",
    "Combien de {letter} y a-t-il dans {word} ?",
    "Wie viele {letter} sind in {word}?",
    "Quante {letter} ci sono in {word}?",
)
SUM_QUESTIONS = (
    *("What is {a}+{b}?", "What is {a} + {b}?", "{a}+{b}=?", "{a} + {b} = ?", "How much is {a} plus {b}?"),
    *("What is {a} plus {b}?", "Add {a} and {b}.", "Can you add {a} and {b}?", "Calculate {a}+{b}."),
    *("What do {a} and {b} make?", "What is the sum of {a} and {b}?", "Tell me what {a} + {b} is."),
)

_WORD = re.compile(r"(?<![\w'’])[^\W\d_]+(?![\w'’])")
_FINAL_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_INTEGER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Item:
    """One question of a skill.

    Attributes:
        answer: what the model should learn to say: a string, or parts where it uses the calculator.
        expected: what :func:`is_right` looks for.
    """

    skill: Skill
    question: str
    answer: str | tuple[Mapping[str, str], ...]
    expected: str

    def conversation(self) -> dict[str, Any]:
        """The item as a conversation to learn from."""
        answer = self.answer if isinstance(self.answer, str) else [dict(part) for part in self.answer]
        return {
            "messages": [{"role": "user", "content": self.question}, {"role": "assistant", "content": answer}],
        }


def items(
    skill: Skill, part: Part, count: int, *, words: Iterable[str] = (), model_name: str = "nanochat"
) -> list[Item]:
    """Items of one part of a skill.

    Args:
        count: how many. To learn from, words come again when there are fewer, asked for in other ways; of val and test
            there is at most one item for each word, pair of numbers or wording.
        words: to spell and to count in; their order and repetitions do not matter.
        model_name: what the name is.
    """
    chosen = random.Random(f"{SEED} {skill} {part}")
    if skill == "name":
        asked = identity.questions(part)
        return [Item("name", question, f"I am {model_name}.", model_name) for question in asked[:count]]
    if skill == "sums":
        return [_sum(a, b, chosen) for a, b in _pairs(part, count, chosen)]
    make = _spelling if skill == "spelling" else _counting
    return _of_words(make, part, count, words, chosen)


def words_of(conversations: Iterable[Mapping[str, Any]]) -> list[str]:
    """The words of conversations that are worth spelling, in lower case and alphabetical order, each once."""
    found: Counter[str] = Counter()
    for conversation in conversations:
        for message in conversation["messages"]:
            parts = message["content"]
            texts = [parts] if isinstance(parts, str) else [part["text"] for part in parts if part["type"] == "text"]
            for text in texts:
                found.update(word.lower() for word in _WORD.findall(text))
    return sorted(word for word, times in found.items() if times >= WORD_OCCURRENCES and len(word) in WORD_LETTERS)


def is_right(item: Item, said: str) -> bool:
    """Whether an answer, as text, is right: all of it for spelling, what it ends in for counting and sums."""
    if item.skill == "name":
        return item.expected in said
    if item.skill == "spelling":
        return said.strip() == item.expected
    if item.skill == "counting":
        final = _FINAL_ANSWER.search(said)
        return final is not None and final.group(1) == item.expected
    return _INTEGER.findall(said.replace(",", ""))[-1:] == [item.expected]


def _of_words(
    make: Callable[[str, random.Random], Item],
    part: Part,
    count: int,
    words: Iterable[str],
    chosen: random.Random,
) -> list[Item]:
    of_part = sorted({word for word in words if part_of("word", word) == part})
    made: list[Item] = []
    while of_part and len(made) < count:
        chosen.shuffle(of_part)
        made += [make(word, chosen) for word in of_part[: count - len(made)]]
        if part != "train":
            break
    return made


def _spelling(word: str, chosen: random.Random) -> Item:
    spelled = _spelled(word)
    return Item("spelling", chosen.choice(SPELLING_QUESTIONS).format(word=word), spelled, spelled)


def _counting(word: str, chosen: random.Random) -> Item:
    """Spell, count aloud, and check the count: three ways to the same number, each easy for a small model."""
    letter = chosen.choice(word if chosen.random() < SHARE_OF_LETTERS_IN_WORD else LETTERS)
    aloud, count = [], 0
    for each in word:
        count += each == letter
        aloud.append(f"{each}{count}" if each == letter else each)
    said = f"{_spelled(word)}\nCounting {letter}: {' '.join(aloud)}\nThat is {count}. Check: "
    answer = (
        {"type": "text", "text": said},
        {"type": "python", "text": f"'{word}'.count('{letter}')"},
        {"type": "python_output", "text": str(count)},
        {"type": "text", "text": f"\n#### {count}"},
    )
    question = chosen.choice(COUNTING_QUESTIONS).format(word=word, letter=letter)
    return Item("counting", question, answer, str(count))


def _sum(a: int, b: int, chosen: random.Random) -> Item:
    answer = (
        {"type": "python", "text": f"{a}+{b}"},
        {"type": "python_output", "text": str(a + b)},
        {"type": "text", "text": f" That makes {a + b}."},
    )
    return Item("sums", chosen.choice(SUM_QUESTIONS).format(a=a, b=b), answer, str(a + b))


def _pairs(part: Part, count: int, chosen: random.Random) -> Iterator[tuple[int, int]]:
    """Pairs of numbers, with one to three digits each; those of val and test differ, whatever their order."""
    seen: set[str] = set()
    found = 0
    for _ in range(MOST_DRAWS * count):
        if found == count:
            return
        first, second = (chosen.randrange(10 ** chosen.randint(1, MOST_DIGITS)) for _ in range(2))
        name = f"{min(first, second)}+{max(first, second)}"
        if part_of("sum", name) == part and (part == "train" or name not in seen):
            seen.add(name)
            found += 1
            yield first, second


def _spelled(word: str) -> str:
    return f"{word}:{','.join(word)}"
