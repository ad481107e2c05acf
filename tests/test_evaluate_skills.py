"""``nanochat evaluate --skills`` as a user types it, with a model that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from test_skills import conversations_file, said

from nanochat import config as configs
from nanochat.cli import main
from nanochat.data.mixture import skill_items
from nanochat.data.skills import SKILLS
from nanochat.inference.session import Generation, Session
from nanochat.inference.tools import Piece
from nanochat.stages.configs import EvaluateConfig

#: Whole commands, many of them: left out of the quick check.
pytestmark = pytest.mark.slow

RUN = Path(__file__).parent / "golden" / "run"

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Types a command beside a chat model taught spelling and sums; returns exit code, stdout and stderr."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    monkeypatch.setenv("NANOCHAT_DTYPE", "float32")

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(words))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    assert run("import", str(RUN))[0] == 0
    taught = ["--conversations", conversations_file(tmp_path), "spelling:30", "sums:30", "--name", "Ada"]
    code, _, told = run(
        "sft", "--model-tag", "d2", *taught, "--num-iterations", "1", "--compile", "off", "--eval-every", "0"
    )
    assert code == 0, told
    return run


def answers_of(folder: Path, name: str, wrong: Sequence[str] = ()) -> Callable[..., Iterator[tuple[int, Generation]]]:
    """Stands in for the model: right about everything but the skills that are named."""
    right = {
        item.question: said(item)
        for skill in SKILLS
        if skill not in wrong
        for item in skill_items(skill, "test", 200, [conversations_file(folder)], name)
    }

    def generate_many(session: Session, prompts: Sequence[str], *, max_tokens: int) -> Iterator[tuple[int, Generation]]:
        for number, prompt in enumerate(prompts):
            text = right.get(prompt, "I do not know.")
            yield number, Generation([], text, text)

    return generate_many


def test_skills_are_graded_on_what_the_run_was_taught_with(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "generate_many", answers_of(tmp_path, "Ada", wrong=["counting"]))
    code, out, told = command("evaluate", "--skills", "--num-items", "20", "--json", "--show-wrong", "1")
    assert code == 0, told
    printed = json.loads(out)
    assert {skill: (each["right"], each["items"]) for skill, each in printed["skills"].items()} == {
        "name": (20, 20),
        "spelling": (20, 20),
        "counting": (0, 20),
        "sums": (20, 20),
    }
    assert [printed[name] for name in ("source", "model_tag", "part", "finished")] == ["sft", "d2", "test", True]
    (wrong,) = printed["skills"]["counting"]["wrong"]
    assert wrong["said"] == "I do not know."
    assert printed["notices"] == ["d2 was never taught name, counting: expect few right answers"]
    assert "grading 80/80" in told
    code, out, _ = command("evaluate", "--skills", "sums", "counting", "--num-items", "7", "--show-wrong", "2")
    assert ["sums", "7", "7", "100.0%"] in [line.split() for line in out.splitlines()]
    assert ["counting", "0", "7", "0.0%"] in [line.split() for line in out.splitlines()]
    assert out.count("said     'I do not know.'") == 2


def test_another_name_and_other_words_can_be_asked_for(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "generate_many", answers_of(tmp_path, "Bob"))
    words = ["evaluate", "--skills", "name", "--num-items", "5", "--json"]
    assert json.loads(command(*words)[1])["skills"]["name"]["right"] == 0
    assert json.loads(command(*words, "--name", "Bob")[1])["skills"]["name"]["right"] == 5
    code, _, told = command("evaluate", "--skills", "spelling", "--conversations", "identity")
    assert (code, "no words for spelling" in told) == (2, True)


def test_bits_per_byte_and_skills_are_measured_in_one_go(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "generate_many", answers_of(tmp_path, "Ada"))
    measure = ["--eval-tokens", "1024", "--device-batch-size", "2"]
    alone = json.loads(command("evaluate", "--bpb", "--source", "sft", *measure, "--json")[1])
    both = json.loads(command("evaluate", "--bpb", "--skills", "name", "--num-items", "3", *measure, "--json")[1])
    assert both["val_bpb"] == alone["val_bpb"]
    assert both["skills"]["name"]["accuracy"] == 1.0
    _, out, _ = command("evaluate", "--bpb", "--skills", "name", "--num-items", "3", *measure)
    assert "bits per byte on" in out
    assert out.index("bits per byte on") < out.index("accuracy")


def test_a_chat_model_is_measured_on_the_text_of_its_base_run(command: Command, tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("\n\n".join(f"Anna found red kite number {number}." for number in range(400)), encoding="utf-8")
    shape = ["--depth", "1", "--aspect-ratio", "32", "--head-dim", "32", "--max-seq-len", "64"]
    quick = ["--device-batch-size", "1", "--num-iterations", "1", "--eval-every", "0", "--compile", "off"]
    for words in (
        ("dataset", "import", str(text), "--name", "mine", "--split-on", "blank-line"),
        ("pretrain", "--data", "mine", *shape, *quick, "--total-batch-size", "64", "--sample-every", "0"),
        ("sft", "--model-tag", "d1", "--conversations", "sums:40", *quick, "--total-batch-size", "64"),
    ):
        code, _, told = command(*words)
        assert code == 0, told
    measure = ["--eval-tokens", "64", "--device-batch-size", "1", "--json"]
    code, out, told = command("evaluate", "--bpb", "-g", "d1", "--source", "sft", *measure)
    assert code == 0, told
    assert json.loads(out)["data"] == "mine"


def test_a_base_model_is_asked_too_and_what_to_expect_is_said(command: Command, tmp_path: Path) -> None:
    words = ["--source", "base", "--conversations", conversations_file(tmp_path), "--num-items", "3"]
    code, out, told = command("evaluate", "--skills", "name", "sums", *words, "--max-tokens", "4")
    assert code == 0, told
    assert "never taught to answer" in told
    assert "never taught to answer" in out
    assert "sums" in out


def test_ctrl_c_prints_what_was_measured_so_far(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped_at_the_second(
        session: Session, prompts: Sequence[str], *, max_tokens: int
    ) -> Iterator[tuple[int, Generation]]:
        yield 0, Generation([], "Ada", "Ada")
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "generate_many", stopped_at_the_second)
    code, out, _ = command("evaluate", "--skills", "name", "sums", "--num-items", "9", "--json")
    printed = json.loads(out)
    assert code == 0
    assert printed["finished"] is False
    assert {skill: (each["right"], each["items"]) for skill, each in printed["skills"].items()} == {"name": (1, 1)}


def test_what_cannot_be_measured_is_refused(command: Command) -> None:
    for words, named in (
        ((), "--bpb"),
        (("--skills", "--step", "all"), "--step"),
        (("--skills", "flying"), "flying"),
        (("--skills", "--part", "train"), "train"),
        (("--skills", "--num-items", "0"), "--num-items"),
        (("--skills", "-g", "d3"), "d3"),
    ):
        code, out, told = command("evaluate", *words)
        assert (code, out) == (2, ""), words
        assert named in told


def test_the_calculators_results_count_as_said(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum is right when the forced result is the last number that a reader sees."""
    (item,) = skill_items("sums", "test", 1, [])
    assert not isinstance(item.answer, str)
    told = [Piece(part["type"], part["text"]) for part in item.answer][:2]  # type: ignore[arg-type]
    monkeypatch.setattr(Session, "_pieces", lambda self, tokens: iter(told))
    code, out, _ = command("evaluate", "--skills", "sums", "--num-items", "1", "--max-tokens", "2", "--json")
    assert (code, json.loads(out)["skills"]["sums"]["right"]) == (0, 1)


def test_the_bare_flag_asks_for_every_skill() -> None:
    config = configs.parse_flags(EvaluateConfig, ["--skills"], "evaluate")
    assert config.skills == ()
    assert configs.from_dict(EvaluateConfig, configs.to_dict(config), "here") == config
