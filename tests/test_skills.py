"""Skills are taught in a form that can be graded, and nothing that is graded is taught."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from golden_text import golden_tokenizer

from nanochat.data import identity, skills
from nanochat.data.conversation import check_conversation, render
from nanochat.data.held_out import part_of
from nanochat.data.mixture import SKILL_ITEMS, load_mixture, skill_items
from nanochat.data.skills import SKILLS, Item, Skill, is_right, items, words_of
from nanochat.errors import UserError
from nanochat.evaluation.skills import Answerer, grade, held_out_items, skill_table, wrong_answers
from nanochat.inference.calculator import calculate
from nanochat.inference.tools import Piece, shown
from nanochat.terminal import Terminal

#: 3,600 words that could be.
WORDS = ["".join(part) for part in itertools.product(["ba", "le", "stri", "po", "quu", "än"], repeat=4)]
WORDS += [f"{word}s" for word in WORDS]
PARTS = ("train", "val", "test")


def said(item: Item) -> str:
    """The right answer as a chat shows it."""
    if isinstance(item.answer, str):
        return item.answer
    return "".join(shown(Piece(part["type"], part["text"]) for part in item.answer))


def asked_about(item: Item) -> str:
    """The word, the pair of numbers in any order, or the wording that an item is about."""
    if item.skill in ("spelling", "counting"):
        return said(item).split(":")[0]
    if item.skill == "sums":
        return "+".join(sorted(re.findall(r"\d+", item.question)))
    return item.question


def test_spelling_names_the_word_and_its_letters() -> None:
    item = skills._spelling("apple", random.Random(0))
    assert item.answer == item.expected == "apple:a,p,p,l,e"
    assert "Spell the word: {word}" in skills.SPELLING_QUESTIONS
    assert {"apple" in question.format(word="apple") for question in skills.SPELLING_QUESTIONS} == {True}


def test_counting_spells_counts_aloud_checks_and_ends_with_the_number() -> None:
    for seed in range(50):
        item = skills._counting("strawberry", random.Random(seed))
        if "'r'" in said(item):
            break
    assert said(item) == (
        "strawberry:s,t,r,a,w,b,e,r,r,y\nCounting r: s t r1 a w b e r2 r3 y\nThat is 3. Check: "
        "['strawberry'.count('r') = 3]\n#### 3"
    )


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("skill", SKILLS)
def test_every_item_is_a_conversation_whose_answer_is_right(skill: Skill, part: str) -> None:
    made = items(skill, part, 300, words=WORDS, model_name="Ada")
    assert len(made) > 50
    for item in made:
        check_conversation(item.conversation()["messages"], item.question)
        assert is_right(item, said(item))
        assert not is_right(item, said(item) + " 1000001" if skill == "sums" else "")


@pytest.mark.parametrize("skill", ["counting", "sums"])
def test_every_result_in_the_lessons_is_the_calculators(skill: Skill) -> None:
    for item in items(skill, "train", 500, words=WORDS):
        parts = list(item.answer)
        (place,) = (number for number, part in enumerate(parts) if part["type"] == "python")
        assert parts[place + 1] == {"type": "python_output", "text": calculate(parts[place]["text"])}
        assert parts[place + 1]["text"] == item.expected


def test_grading_tells_wrong_answers() -> None:
    item = Item("spelling", "", "", "apple:a,p,p,l,e")
    assert is_right(item, " apple:a,p,p,l,e\n")
    assert not is_right(item, "apple:a,p,l,e")
    item = Item("counting", "", "", "3")
    assert is_right(item, "[… = 2]\n#### 3")
    assert not any(is_right(item, wrong) for wrong in ("3", "#### 2\n#### 3", "#### 33", "####3"))
    item = Item("sums", "", "", "1203")
    assert is_right(item, "[1200+3 = 1203] That makes 1,203.")
    assert not any(is_right(item, wrong) for wrong in ("[1200+3 = 1203] That makes 1204.", "1203 5", "", "-1203"))


@pytest.mark.parametrize("skill", SKILLS)
def test_no_held_out_item_is_learned_from(skill: Skill) -> None:
    train, val, test = ({asked_about(item) for item in items(skill, part, 5000, words=WORDS)} for part in PARTS)
    assert not train & (val | test)
    assert not val & test
    assert min(len(train), len(val), len(test)) > 50


def test_words_are_held_out_of_both_word_skills() -> None:
    learned = {
        asked_about(item) for skill in ("spelling", "counting") for item in items(skill, "train", 9000, words=WORDS)
    }
    graded = {
        asked_about(item) for skill in ("spelling", "counting") for item in items(skill, "test", 9000, words=WORDS)
    }
    assert learned | graded <= set(WORDS)
    assert not learned & graded
    assert len(graded) > 100
    for word in WORDS:
        assert part_of("word", word) == part_of("word", word.upper())


def test_held_out_items_are_asked_for_once_each() -> None:
    for skill in SKILLS:
        made = [asked_about(item) for item in items(skill, "test", 5000, words=WORDS)]
        assert len(made) == len(set(made))


def test_items_depend_on_nothing_but_the_set_of_words() -> None:
    for skill in SKILLS:
        made = items(skill, "train", 200, words=WORDS)
        assert made == items(skill, "train", 200, words=reversed(WORDS + WORDS))
        assert made[:50] == items(skill, "train", 50, words=WORDS)
        assert len({item.question for item in made}) > 150


def test_few_words_are_asked_about_again_in_other_ways() -> None:
    few = [word for word in WORDS if part_of("word", word) == "train"][:5]
    made = items("spelling", "train", 40, words=few)
    assert len(made) == 40
    assert {asked_about(item) for item in made} == set(few)
    assert len({item.question for item in made}) > 15
    assert items("spelling", "train", 40) == items("spelling", "test", 40, words=few) == []


def test_words_are_those_that_stand_more_than_once() -> None:
    parts = [{"type": "text", "text": "Garden garden."}, {"type": "python", "text": "'python'.count('python')"}]
    messages = [
        {"role": "user", "content": "Über the snow, over the SNOW: don't don't x2 x2 ab ab once über"},
        {"role": "assistant", "content": parts},
    ]
    assert words_of([{"messages": messages}]) == ["garden", "snow", "the", "über"]


def test_identity_asks_only_what_is_not_held_out() -> None:
    asked = {message["content"] for made in identity.conversations() for message in made["messages"][::2]}
    parts = [set(identity.questions(part)) for part in PARTS]
    assert asked <= parts[0]
    assert len(parts[2]) >= 200
    assert sum(map(len, parts)) == len(set.union(*parts))


def conversations_file(folder: Path) -> str:
    text = " ".join(WORDS)
    lines = [[{"role": "user", "content": text}, {"role": "assistant", "content": f"Indeed: {text}."}]] * 2
    path = folder / "talk.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_a_mixture_teaches_named_skills_and_none_of_the_graded_items(tmp_path: Path) -> None:
    names = ["identity", "spelling:300", "counting", "sums:20", conversations_file(tmp_path)]
    training, held_out = load_mixture(names, "Ada")
    assert held_out == []
    assert len(training) == identity.NUM_CONVERSATIONS + 300 + SKILL_ITEMS["counting"] + 20 + 2
    taught = {message["content"] for made in training for message in made["messages"][::2]}
    for skill in SKILLS:
        graded = skill_items(skill, "test", 200, names, "Ada")
        assert len(graded) > 100
        assert not taught & {item.question for item in graded}
    assert load_mixture(names, "Ada") == (training, held_out)
    for made in training[:500]:
        assert any(render(made, golden_tokenizer())[1])


def test_a_skill_without_words_or_with_a_strange_number_is_refused() -> None:
    with pytest.raises(UserError, match="no words for spelling"):
        load_mixture(["identity", "spelling"], "Ada")
    with pytest.raises(UserError, match="no words for counting"):
        skill_items("counting", "test", 5, ["identity", "counting"])
    assert len(load_mixture(["sums:7"], "Ada")[0]) == 7
    for name in ("sums:", "sums:0", "sums:-3", "sums:many"):
        with pytest.raises(UserError, match="number of items"):
            load_mixture([name], "Ada")
    with pytest.raises(UserError, match="identity, spelling, counting, sums"):
        load_mixture(["spellings"], "Ada")


# Grading -------------------------------------------------------------------------------------------


def asked_in_reverse(answer: Callable[[str], str]) -> Answerer:
    """Answers one question after the other, the last one first."""

    def answers(questions: Sequence[str]) -> Iterator[tuple[int, str]]:
        for number in reversed(range(len(questions))):
            yield number, answer(questions[number])

    return answers


def questions_of(folder: Path, count: int = 50) -> dict[Skill, list[Item]]:
    names = ["identity", *SKILL_ITEMS, conversations_file(folder)]
    questions, notices = held_out_items(SKILLS, "test", count, names, "Ada")
    assert not notices
    return questions


def test_grading_counts_right_and_wrong_answers_by_skill(tmp_path: Path) -> None:
    questions = questions_of(tmp_path)
    right = {item.question: said(item) for items in questions.values() for item in items}
    spoilt = {item.question for items in questions.values() for item in items[:5]}
    found = grade(
        questions, asked_in_reverse(lambda asked: "no" if asked in spoilt else right[asked]), 50, Terminal(0.0)
    )
    assert [(each.skill, each.right, each.items, each.accuracy) for each in found] == [
        (skill, 45, 50, 0.9) for skill in SKILLS
    ]
    table = skill_table(found, colours=False).splitlines()
    assert table[0].split() == ["skill", "right", "items", "accuracy"]
    assert [line.split() for line in table[1:]] == [[skill, "45", "50", "90.0%"] for skill in SKILLS]
    assert {wrong.question for each in found for wrong in each.wrong} == spoilt
    values = found[1].values(num_wrong=2)
    assert (values["right"], values["items"], values["items_asked_for"], len(values["wrong"])) == (45, 50, 50, 2)
    listed = wrong_answers(found, 1)
    assert listed.count("expected") == len(SKILLS)
    assert f"{found[2].wrong[0].question}\n  expected {found[2].wrong[0].expected!r}\n  said     'no'" in listed


def test_nobody_is_asked_what_was_taught(tmp_path: Path) -> None:
    names = ["identity", *SKILL_ITEMS, conversations_file(tmp_path)]
    taught = {message["content"] for made in load_mixture(names, "Ada")[0] for message in made["messages"][::2]}
    asked: list[str] = []
    grade(questions_of(tmp_path, 200), asked_in_reverse(lambda question: asked.append(question) or ""), 200, Terminal())
    assert len(asked) > 600
    assert not taught & set(asked)


def test_fewer_items_than_asked_for_are_told_with_the_reason(tmp_path: Path) -> None:
    questions = questions_of(tmp_path, 10_000)
    found = grade(questions, asked_in_reverse(lambda _: ""), 10_000, Terminal())
    shown_lines = skill_table(found, colours=False).splitlines()[5:]
    name, spelling, counting = len(questions["name"]), len(questions["spelling"]), len(questions["counting"])
    assert shown_lines == [
        f"name: {name} items instead of 10,000, because there are no more held-out ways to ask for the name",
        f"spelling: {spelling} items instead of 10,000, because there are no more held-out words in the conversations",
        f"counting: {counting} items instead of 10,000, because there are no more held-out words in the conversations",
    ]
    assert name >= 200


def test_ctrl_c_keeps_what_was_answered_until_then(tmp_path: Path) -> None:
    questions = questions_of(tmp_path)
    right = {item.question: said(item) for items in questions.values() for item in items}
    left = iter(range(70))

    def answer(question: str) -> str:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return right[question]

    found = grade(questions, asked_in_reverse(answer), 50, Terminal())
    assert [(each.skill, each.right, each.items, each.finished) for each in found] == [
        ("name", 50, 50, True),
        ("spelling", 20, 20, False),
    ]
    assert "spelling: stopped after 20 of 50 items" in skill_table(found, colours=False)


def test_a_skill_interrupted_before_its_first_answer_has_no_figure(tmp_path: Path) -> None:
    def answer(question: str) -> str:
        raise KeyboardInterrupt

    (figure,) = grade(questions_of(tmp_path), asked_in_reverse(answer), 50, Terminal())
    assert figure.accuracy is None
    assert "n/a (none answered)" in skill_table([figure], colours=False)


def test_a_skill_without_words_is_left_out_and_told_unless_it_is_all_there_is() -> None:
    questions, notices = held_out_items(SKILLS, "val", 20, ["identity"], "Ada")
    assert list(questions) == ["name", "sums"]
    assert ["left out" in notice for notice in notices] == [True, True]
    with pytest.raises(UserError, match="no words for spelling"):
        held_out_items(["spelling"], "val", 20, ["identity"], "Ada")


def test_progress_tells_how_many_and_how_fast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grade(questions_of(tmp_path, 3), asked_in_reverse(lambda _: ""), 3, Terminal(0.0))
    lines = capsys.readouterr().err.splitlines()
    assert re.search(r"grading 4/12 \(33\.3%\)  spelling  [\d.,]+ items/s$", lines[3])
