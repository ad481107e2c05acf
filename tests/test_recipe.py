"""Recipes: lines of stages as data; what is done is not done again, and mistakes in the file are named."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from nanochat.cli import main
from nanochat.errors import UserError
from nanochat.inference.session import Generation, Session
from nanochat.recipe import find_recipe, read_recipe
from nanochat.records import read
from nanochat.train.interrupt import Interruption

#: Whole commands, many of them: left out of the quick check.
pytestmark = pytest.mark.slow

GOLDEN_RUN = Path(__file__).parent / "golden" / "run"
RUNS = Path(__file__).resolve().parent.parent / "runs"

LINE = f"""
description = "a line for tests"
next_commands = ["nanochat chat"]

[[stages]]
stage = "import"
folder = "{GOLDEN_RUN.as_posix()}"

[[stages]]
stage = "tokenizer"
vocab_size = 300
name = "small"

[[stages]]
stage = "pretrain"
tokenizer = "small"
depth = 1
aspect_ratio = 32
head_dim = 32
max_seq_len = 32
device_batch_size = 2
total_batch_size = 64
num_iterations = 2
eval_every = 0
sample_every = 0
compile = "off"

[[stages]]
stage = "generate"
prompt = "The"
model_tag = "d1"
max_tokens = 4
"""


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    path = tmp_path / "line.toml"
    path.write_text(LINE)
    return path


def headings(said: str) -> list[str]:
    return [entry.split("] ", 1)[1] for entry in said.splitlines() if "/4] " in entry]


def run(line: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[list[str], str]:
    capsys.readouterr()
    code = main(["run", str(line), *flags])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return headings(printed.err), printed.out


def test_a_line_runs_through_and_a_second_time_reuses_what_is_done(
    line: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, out = run(line, capsys)
    assert first == ["import", "tokenizer", "pretrain", "generate"]
    assert "nanochat chat" in out
    again, out = run(line, capsys)
    assert [heading.split(":")[0] for heading in again] == first
    assert ["already done" in heading for heading in again] == [True, True, True, False]
    assert out.count("reused") == 3


def test_a_changed_stage_is_done_again_with_all_that_follow(line: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(line, capsys)
    line.write_text(LINE.replace("vocab_size = 300", "vocab_size = 310"))
    again, _ = run(line, capsys)
    assert ["already done" in heading for heading in again] == [True, False, False, False]


def test_a_stage_whose_work_is_gone_is_done_again(line: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(line, capsys)
    (line.parent / "base" / "tokenizers" / "small" / "tokenizer.json").unlink()
    again, _ = run(line, capsys)
    assert ["already done" in heading for heading in again] == [True, False, True, False]


def test_again_does_everything_again(line: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(line, capsys)
    again, _ = run(line, capsys, "--again")
    assert not any("already done" in heading for heading in again)


def test_a_stage_that_fails_is_not_taken_for_done(line: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line.write_text(LINE.replace("total_batch_size = 64", "total_batch_size = 63"))
    assert main(["run", str(line)]) == 2
    line.write_text(LINE)
    again, _ = run(line, capsys)
    assert ["already done" in heading for heading in again] == [True, True, False, False]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("stages = 3", "stages"),
        ("[[stages]]\nstage = 'fly'", "fly"),
        ("[[stages]]\nstage = 'pretrain'\ndeepness = 3", "deepness"),
        ("[[stages]]\nstage = 'pretrain'\ndepth = 'deep'", "deep"),
        ("this is no toml", "cannot be read"),
        ("colour = 'red'\n[[stages]]\nstage = 'tokenizer'", "colour"),
    ],
)
def test_a_mistake_in_a_recipe_is_named_before_anything_runs(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=named):
        read_recipe(path)


@pytest.mark.parametrize("path", sorted(RUNS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_of_the_project_can_be_read(path: Path) -> None:
    assert read_recipe(path).stages
    assert find_recipe(path.stem) == Path("runs") / path.name or find_recipe(path.stem) == path


def test_a_line_that_was_stopped_in_training_goes_on_where_it_was_saved(
    line: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Interruption.requested
    asked = iter([False, True])
    monkeypatch.setattr(Interruption, "requested", property(lambda _: next(asked, True)))
    monkeypatch.setattr(Interruption, "check", lambda _: None)
    first, out = run(line, capsys)
    assert first == ["import", "tokenizer", "pretrain"]
    assert "go on with: nanochat run" in out
    monkeypatch.setattr(Interruption, "requested", real)
    again, _ = run(line, capsys)
    assert ["already done" in heading for heading in again] == [True, True, False, False]
    folder = line.parent / "base" / "base_checkpoints" / "d1"
    assert [(start["resumed"], start["step"]) for start in read(folder, "start")] == [(False, 0), (True, 1)]


#: The same line with validations, then a chat model that is graded and asked.
TAUGHT = (
    LINE.replace("eval_every = 0", "eval_every = 1\neval_tokens = 64")
    + """
[[stages]]
stage = "sft"
model_tag = "d1"
conversations = ["sums:40", "identity"]
max_seq_len = 160
device_batch_size = 1
total_batch_size = 160
num_iterations = 1
eval_every = 0
compile = "off"

[[stages]]
stage = "evaluate"
skills = ["name", "sums"]
model_tag = "d1"
num_items = 3
max_tokens = 2

[[stages]]
stage = "chat"
model_tag = "d1"
prompt = ["Who are you?", "What is 2+2?"]
max_tokens = 2
"""
)


def figures(line: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(run(line, capsys, "--json")[1])


def test_the_end_has_the_figures_of_the_records_also_when_the_stages_were_reused(
    line: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line.write_text(TAUGHT)
    first = figures(line, capsys)
    measured = [each["val_bpb"] for each in read(line.parent / "base" / "base_checkpoints" / "d1", "validation")]
    assert len(measured) == 3
    assert first["bits_per_byte"] == [
        {"stage": "pretrain", "model_tag": "d1", "before": measured[0], "after": measured[-1]},
        {"stage": "sft", "model_tag": "d1", "before": None, "after": None},
    ]
    assert [(each["skill"], each["items"]) for each in first["skills"]] == [("name", 3), ("sums", 3)]
    assert not any(stage["reused"] for stage in first["stages"])
    # The figures were noted when the stage was done: what its records become afterwards is another matter.
    (line.parent / "base" / "base_checkpoints" / "d1" / "records.jsonl").unlink()
    again = figures(line, capsys)
    assert [stage["reused"] for stage in again["stages"]] == [True, True, True, False, True, False, False]
    assert [stage["seconds"] for stage in again["stages"][:3]] == [stage["seconds"] for stage in first["stages"][:3]]
    assert again["seconds"] < first["seconds"]
    assert (again["bits_per_byte"], again["skills"]) == (first["bits_per_byte"], first["skills"])
    _, out = run(line, capsys)
    assert f"{measured[0]:.4f}" in out
    assert out.index("bits per byte") < out.index("held-out skill") < out.index("> What is 2+2?") < out.index("Next:")


def test_a_line_stopped_while_it_grades_prints_what_was_measured(
    line: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(session: Session, prompts: Sequence[str], *, max_tokens: int) -> Iterator[tuple[int, Generation]]:
        yield 0, Generation([], "nanochat", "nanochat")
        raise KeyboardInterrupt

    line.write_text(TAUGHT)
    monkeypatch.setattr(Session, "generate_many", stopped)
    _, out = run(line, capsys)
    assert ["name", "1", "1", "100.0%"] in [entry.split() for entry in out.splitlines()]
    assert "stopped in evaluate; go on with: nanochat run" in out
    assert "What is 2+2?" not in out
