"""The demo: on the real conversations it reaches what the family's own program reaches on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat.cli import main
from nanochat.data.mixture import SKILL_ITEMS
from nanochat.recipe import read_recipe

RUNS = Path(__file__).resolve().parent.parent / "runs"

#: Validation bits per byte after 150 steps, and how far from it a run may be.
FAMILY_BPB, BPB_TOLERANCE = 1.723, 0.015

SMALL = [
    *["--depth", "1", "--aspect-ratio", "64", "--head-dim", "32", "--max-seq-len", "64", "--device-batch-size", "2"],
    *["--total-batch-size", "128", "--num-iterations", "2", "--eval-tokens", "256", "--sample-every", "0"],
    *["--compile", "off", "--model-tag", "small", "--tokenizer", "small", "--data", "chitchat"],
]


@pytest.mark.extras
def test_real_conversations_go_through_the_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    assert main(["dataset", "chitchat", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["train_documents"], made["val_documents"]) == (3717, 300)
    assert main(["tokenizer", "--data", "chitchat", "--name", "small", "--vocab-size", "400"]) == 0
    assert main(["pretrain", *SMALL]) == 0
    taught = ["--model-tag", "small", "--num-iterations", "1", "--eval-every", "0", "--compile", "off", "--name", "Ada"]
    assert main(["sft", *taught]) == 0
    capsys.readouterr()
    assert main(["chat", "-g", "small", "-p", "Who are you?", "--max-tokens", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "Who are you?"


def test_the_demo_grades_every_skill_it_teaches_and_then_answers_three_messages() -> None:
    stages = {stage.name: stage.config for stage in read_recipe(RUNS / "demo.toml").stages}
    assert list(stages)[-3:] == ["sft", "evaluate", "chat"]
    assert set(stages["sft"].lessons.conversations) == {"chitchat", "identity", *SKILL_ITEMS}
    assert stages["evaluate"].skills == ()  # all of them
    assert (stages["evaluate"].questions.part, stages["evaluate"].questions.num_items) == ("test", 200)
    assert len(stages["chat"].prompt) == 3
    assert {stages[name].model_tag for name in ("pretrain", "sft", "evaluate", "chat")} == {"demo"}


@pytest.mark.soak
def test_the_demo_text_gives_the_familys_bits_per_byte(tmp_path: Path) -> None:
    """At the demo's size, packed as the family packs: some eight minutes on two cores."""
    environment = {**os.environ, "NANOCHAT_BASE_DIR": str(tmp_path)}

    def nanochat(*words: str) -> str:
        command = [sys.executable, "-m", "nanochat", *words]
        return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout

    nanochat("dataset", "import", "chitchat")
    nanochat("tokenizer", "--data", "chitchat", "--vocab-size", "4096")
    printed = nanochat(
        *["pretrain", "--depth", "4", "--head-dim", "64", "--max-seq-len", "512", "--window-pattern", "L"],
        *["--device-batch-size", "8", "--total-batch-size", "16384", "--num-iterations", "150", "--packing", "bestfit"],
        *["--eval-every", "25", "--eval-tokens", "65536", "--sample-every", "0", "--json"],
    )
    assert json.loads(printed)["val_bpb"] == pytest.approx(FAMILY_BPB, abs=BPB_TOLERANCE)
