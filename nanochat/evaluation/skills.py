"""How many held-out questions of each skill a model answers right."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanochat.data.held_out import Part
from nanochat.data.mixture import skill_items
from nanochat.data.skills import Item, Skill, is_right
from nanochat.errors import UserError
from nanochat.terminal import Terminal
from nanochat.watching.render import render_table

#: Answers questions: the number of each and what is said to it, in any order.
Answerer = Callable[[Sequence[str]], Iterator[tuple[int, str]]]

COLUMNS = ("skill", "right", "items", "accuracy")
NUMBERS = frozenset({"right", "items", "accuracy"})
#: What there are no more of, when a skill has fewer items than were asked for.
_SCARCE: dict[Skill, str] = {
    "name": "ways to ask for the name",
    "spelling": "words in the conversations",
    "counting": "words in the conversations",
    "sums": "pairs of numbers",
}


@dataclass(frozen=True)
class Wrong:
    """A question that was not answered right."""

    question: str
    expected: str
    said: str


@dataclass(frozen=True)
class Graded:
    """A skill's figure.

    Attributes:
        items: questions that were answered.
        present: questions there were to ask.
        asked_for: how many were wanted; more than ``present`` where there are no more.
    """

    skill: Skill
    right: int
    items: int
    present: int
    asked_for: int
    wrong: tuple[Wrong, ...]

    @property
    def accuracy(self) -> float | None:
        """Share of right answers; None when no question was answered."""
        return self.right / self.items if self.items else None

    @property
    def finished(self) -> bool:
        return self.items == self.present

    def values(self, num_wrong: int) -> dict[str, Any]:
        """The figure for programs, with so many of the wrong answers."""
        return {
            "right": self.right,
            "items": self.items,
            "items_asked_for": self.asked_for,
            "accuracy": self.accuracy,
            "wrong": [vars(each) for each in self.wrong[:num_wrong]],
        }


def held_out_items(
    skills: Sequence[Skill], part: Part, count: int, conversations: Sequence[str], model_name: str
) -> tuple[dict[Skill, list[Item]], tuple[str, ...]]:
    """The questions of each skill, and a sentence on each skill that has none.

    Args:
        conversations: names of the sources that the model was taught with; see
            :func:`nanochat.data.mixture.skill_items`.

    Raises:
        UserError: when there are none at all.
    """
    found: dict[Skill, list[Item]] = {}
    refusals: list[str] = []
    for skill in dict.fromkeys(skills):
        try:
            found[skill] = skill_items(skill, part, count, conversations, model_name)
        except UserError as error:
            refusals.append(str(error))
    if not found:
        raise UserError(refusals[0])
    return found, tuple(f"left out: {refusal}" for refusal in refusals)


def grade(
    questions: Mapping[Skill, Sequence[Item]], answer: Answerer, asked_for: int, terminal: Terminal
) -> list[Graded]:
    """Ask every question and judge every answer; Ctrl-C ends it with what was answered until then."""
    total = sum(map(len, questions.values()))
    done, began = 0, time.perf_counter()
    found: list[Graded] = []
    with terminal.progress("grading", total) as progress:
        for skill, items in questions.items():
            right, wrong = 0, []
            try:
                for number, said in answer([item.question for item in items]):
                    item = items[number]
                    if is_right(item, said):
                        right += 1
                    else:
                        wrong.append(Wrong(item.question, item.expected, said))
                    done += 1
                    progress.update(done, f"{skill}  {done / (time.perf_counter() - began):.1f} items/s")
            except KeyboardInterrupt:
                found.append(Graded(skill, right, right + len(wrong), len(items), asked_for, tuple(wrong)))
                break
            found.append(Graded(skill, right, right + len(wrong), len(items), asked_for, tuple(wrong)))
    return found


def skill_table(graded: Sequence[Graded], *, colours: bool) -> str:
    """The figures as a table, and why there are fewer items than were asked for."""
    rows = [[each.skill, f"{each.right:,}", f"{each.items:,}", _share(each.accuracy)] for each in graded]
    lines = [render_table(COLUMNS, rows, colours=colours, right=NUMBERS)]
    for each in graded:
        if each.finished and each.present < each.asked_for:
            scarce = f"there are no more held-out {_SCARCE[each.skill]}"
            lines.append(f"{each.skill}: {each.present:,} items instead of {each.asked_for:,}, because {scarce}")
        elif not each.finished:
            lines.append(f"{each.skill}: stopped after {each.items:,} of {each.present:,} items")
    return "\n".join(lines)


def wrong_answers(graded: Sequence[Graded], num_wrong: int) -> str:
    """So many wrong answers of each skill, with what was expected."""
    return "\n".join(
        f"{each.skill}: {wrong.question}\n  expected {wrong.expected!r}\n  said     {wrong.said!r}"
        for each in graded
        for wrong in each.wrong[:num_wrong]
    )


def _share(accuracy: float | None) -> str:
    return "n/a (none answered)" if accuracy is None else f"{accuracy:.1%}"
