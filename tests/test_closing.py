"""What a recipe tells when it is through: times, what training brought, held-out skills, and the answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from nanochat.closing import Done, before_and_after, closing_text, closing_values
from nanochat.records import Records

PRETRAIN = Done(
    "pretrain",
    "base model demo: 300 steps; saved in /x",
    {"model_tag": "demo", "seconds": 500.0, "val_bpb_before": 3.17, "val_bpb_after": 1.58123},
    590.0,
    reused=False,
)
SFT = Done(
    "sft",
    "chat model demo: 300 steps; saved in /y",
    {"model_tag": "demo", "val_bpb_before": None, "val_bpb_after": 1.25},
    240.0,
    reused=False,
)
SKILLS = {
    "name": {"right": 200, "items": 200, "items_asked_for": 200, "accuracy": 1.0, "wrong": []},
    "counting": {"right": 95, "items": 101, "items_asked_for": 200, "accuracy": 95 / 101, "wrong": []},
}
EVALUATE = Done(
    "evaluate",
    "sft demo step 300: right answers to held-out questions (test)\nskill  right",
    {"model_tag": "demo", "part": "test", "skills": SKILLS},
    50.0,
    reused=False,
)
ANSWERS = [{"prompt": "Who are you?", "text": "I am nanochat."}, {"prompt": "60+33=?", "text": "[60+33 = 93]"}]
CHAT = Done("chat", "(not used)", {"answers": ANSWERS}, 2.0, reused=False)
LINE = [PRETRAIN, SFT, EVALUATE, CHAT]


def told(stages: list[Done] = LINE, seconds: float = 882.0, *, colours: bool = False) -> str:
    return closing_text("demo: a small model", stages, seconds, ["nanochat chat -g demo"], colours=colours)


def test_the_end_tells_times_figures_answers_and_next_commands_in_this_order() -> None:
    assert told().splitlines() == [
        "demo: a small model",
        "",
        "stage            time  what it made",
        "pretrain   9 min 50 s  base model demo: 300 steps; saved in /x",
        "sft             4 min  chat model demo: 300 steps; saved in /y",
        "evaluate         50 s  sft demo step 300: right answers to held-out questions (test)",
        "chat            2.0 s  2 answers, below",
        "together  14 min 42 s",
        "",
        "bits per byte  of                            before   after",
        "pretrain       validation text               3.1700  1.5812",
        "sft            held-out answers  n/a (not measured)  1.2500",
        "",
        "held-out skill  right  items  accuracy",
        "name              200    200    100.0%",
        "counting           95    101     94.1%",
        "",
        "> Who are you?",
        "I am nanochat.",
        "",
        "> 60+33=?",
        "[60+33 = 93]",
        "",
        "Next:",
        "  nanochat chat -g demo",
    ]


def test_a_reused_stage_shows_what_it_took_then_and_the_total_what_was_spent_now() -> None:
    earlier = [Done(each.name, each.text, each.values, each.seconds, reused=True) for each in LINE[:2]]
    lines = told([*earlier, *LINE[2:]], 52.0).splitlines()
    assert lines[3].split()[:5] == ["pretrain", "reused", "(9", "min", "50"]
    assert lines[7].split() == ["together", "52", "s", "and", "13", "min", "50", "s", "earlier"]
    unknown = Done("sft", "text", {}, None, reused=True)
    assert told([unknown]).splitlines()[3].split() == ["sft", "reused", "text"]


def test_a_line_without_training_or_grading_has_no_empty_tables() -> None:
    text = told([Done("tokenizer", "tokenizer of 300 tokens", {}, 3.0, reused=False)], 3.0)
    assert "bits per byte" not in text
    assert "skill" not in text


def test_the_figures_are_there_for_programs_with_the_time_of_the_whole_stage() -> None:
    values = closing_values(LINE)
    assert [(each["stage"], each["seconds"]) for each in values["stages"]] == [
        ("pretrain", 590.0),
        ("sft", 240.0),
        ("evaluate", 50.0),
        ("chat", 2.0),
    ]
    assert values["bits_per_byte"][0] == {"stage": "pretrain", "model_tag": "demo", "before": 3.17, "after": 1.58123}
    assert values["bits_per_byte"][1]["before"] is None
    assert values["skills"][1] == {
        "model_tag": "demo",
        "part": "test",
        "skill": "counting",
        "right": 95,
        "items": 101,
        "accuracy": 95 / 101,
    }


def test_a_terminal_gets_colours_and_the_same_words() -> None:
    coloured = told(colours=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured).split() == told().split()


def run_with(folder: Path, records: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    written = Records(folder)
    for kind, fields in records:
        written.write(kind, **fields)
    return before_and_after("pretrain", {"folder": str(folder), "step": 4})


def start(step: int = 0) -> tuple[str, dict[str, Any]]:
    return "start", {"step": step, "resumed": step > 0}


def measured(step: int, value: float | None, text: str = "one") -> tuple[str, dict[str, Any]]:
    return "validation", {"step": step, "val_bpb": value, "data": text}


@pytest.mark.parametrize(
    ("records", "before", "after"),
    [
        ([start(), measured(0, 3.0), measured(2, 2.0), measured(4, 1.5)], 3.0, 1.5),
        ([start(), measured(0, 3.0), measured(2, 2.0), start(2), measured(4, 1.5)], 3.0, 1.5),
        ([start(), measured(0, 9.0), measured(4, 8.0), start(), measured(0, 3.0), measured(4, 1.5)], 3.0, 1.5),
        ([start(), measured(0, 3.0), measured(4, 1.5, "other")], None, 1.5),
        ([start(), measured(2, 2.0), measured(4, 1.5)], None, 1.5),
        ([start(), measured(0, 3.0), measured(2, 2.0)], None, None),
        ([start(), measured(0, None), measured(4, None)], None, None),
        ([start()], None, None),
        ([], None, None),
    ],
)
def test_before_and_after_are_of_the_first_and_the_last_step_of_one_run_on_one_text(
    tmp_path: Path, records: list[tuple[str, dict[str, Any]]], before: float | None, after: float | None
) -> None:
    assert run_with(tmp_path, records) == {"val_bpb_before": before, "val_bpb_after": after}


def test_stages_that_do_not_train_have_no_before_and_after(tmp_path: Path) -> None:
    assert before_and_after("tokenizer", {"folder": str(tmp_path)}) == {}
