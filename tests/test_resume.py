"""A resumed run is the uninterrupted one, bit for bit; and it is refused as soon as it would be another run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nanochat import checkpoint
from nanochat.checkpoint import Checkpoint
from nanochat.cli import main
from nanochat.records import read
from nanochat.tokenizer.bpe import Tokenizer

#: Whole commands, many of them: left out of the quick check.
pytestmark = pytest.mark.slow

RUN = Path(__file__).parent / "golden" / "run"

SMALL = [
    *["--depth", "2", "--aspect-ratio", "16", "--head-dim", "16", "--max-seq-len", "32", "--window-pattern", "L"],
    *["--device-batch-size", "2", "--total-batch-size", "128", "--compile", "off", "--buffer-size", "12"],
    *["--tokenizer-batch-size", "5", "--eval-every", "0", "--sample-every", "0"],
]
STEPS = 40

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    monkeypatch.setenv("NANOCHAT_DTYPE", "float32")
    return tmp_path


@pytest.fixture
def command(base: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Types a command; returns exit code, stdout and stderr. A tokenizer and uneven shards are there."""
    assert main(["import", str(RUN)]) == 0
    uneven_shards(base / "data" / "uneven")

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(words))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def uneven_shards(folder: Path) -> None:
    """Three training shards and one for validation; their row groups hold 1 to 9 documents each."""
    folder.mkdir(parents=True)
    groups = [[3, 1, 7], [2], [9, 4, 1, 5], [6]]
    number = 0
    for shard, sizes in enumerate(groups):
        with pq.ParquetWriter(folder / f"shard_{shard:05d}.parquet", pa.schema([("text", pa.string())])) as writer:
            for size in sizes:
                texts = [
                    f"Document {number + i} tells of a red kite. " * (1 + (number + i) * 5 % 4) for i in range(size)
                ]
                writer.write_table(pa.table({"text": texts}), row_group_size=size)
                number += size


def pretrain(command: Command, tag: str, *flags: str) -> Any:
    code, out, said = command(
        "pretrain", *SMALL, "--data", "uneven", "--model-tag", tag, "--num-iterations", str(STEPS), "--json", *flags
    )
    assert code == 0, said
    return json.loads(out)


def losses(base: Path, tag: str, source: str = "base") -> dict[int, float]:
    """Loss of each update; where one was done twice, the later counts."""
    folder = base / {"base": "base_checkpoints", "sft": "chatsft_checkpoints"}[source] / tag
    return {record["step"]: record["loss"] for record in read(folder, "step")}


def load(base: Path, tag: str, step: int, source: str = "base") -> Checkpoint:
    folder = base / {"base": "base_checkpoints", "sft": "chatsft_checkpoints"}[source] / tag
    return checkpoint.load(checkpoint.step_folder(folder, step), optimizer=True)


def assert_same_bits(one: Checkpoint, other: Checkpoint) -> None:
    for kind in ("parameters", "optimizer", "random"):
        ours, theirs = getattr(one, kind), getattr(other, kind)
        assert set(ours) == set(theirs)
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), f"{kind} {name}"
    assert one.loader == other.loader
    assert one.optimizer_step_count == other.optimizer_step_count
    clocks = {"training_seconds"}
    assert {k: v for k, v in one.loop.items() if k not in clocks} == {
        k: v for k, v in other.loop.items() if k not in clocks
    }


@pytest.mark.parametrize("packing", ["bestfit", "keep"])
@pytest.mark.parametrize("boundary", [1, 13, 20, 39])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    boundary: int, packing: str, command: Command, base: Path
) -> None:
    flags = ["--packing", packing, "--save-every", str(boundary)]
    pretrain(command, "whole", *flags)
    whole = base / "base_checkpoints" / "whole"
    assert load(base, "whole", STEPS).loader is not None
    part = base / "base_checkpoints" / "part"
    shutil.copytree(whole, part)
    for step in checkpoint.steps(part):
        if step != boundary:
            shutil.rmtree(checkpoint.step_folder(part, step))
    code, _, said = command("pretrain", "--model-tag", "part", "--resume")
    assert code == 0, said
    assert "resumed from" in said
    assert losses(base, "part") == losses(base, "whole")
    assert len(losses(base, "whole")) == STEPS
    assert_same_bits(load(base, "whole", STEPS), load(base, "part", STEPS))


@pytest.mark.slow
def test_every_boundary_can_be_resumed_at(command: Command, base: Path) -> None:
    pretrain(command, "whole", "--save-every", "1")
    expected, whole = load(base, "whole", STEPS), base / "base_checkpoints" / "whole"
    for boundary in range(1, STEPS):
        part = base / "base_checkpoints" / f"part{boundary}"
        part.mkdir()
        shutil.copytree(checkpoint.step_folder(whole, boundary), checkpoint.step_folder(part, boundary))
        code, _, said = command("pretrain", "--model-tag", part.name, "--resume", str(boundary), "--save-every", "1000")
        assert code == 0, said
        assert_same_bits(expected, load(base, part.name, STEPS))


def test_the_data_of_the_test_crosses_row_groups_shards_and_epochs(command: Command, base: Path) -> None:
    pretrain(command, "whole")
    positions = [record["position"] for record in read(base / "base_checkpoints" / "whole", "step")]
    assert {position["pq_idx"] for position in positions} == {0, 1, 2}
    assert len({position["rg_idx"] for position in positions}) > 1
    assert max(position["epoch"] for position in positions) > 2


def conversations(folder: Path) -> str:
    path = folder / "talk.jsonl"
    lines = [
        [
            {"role": "user", "content": f"What did {name} find on day {day}?"},
            {"role": "assistant", "content": "A red kite. " * (1 + day % 3)},
        ]
        for day, name in enumerate(["Anna", "Emil", "Goro", "Farah", "Lucía"] * 12)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("flags", [[], ["--num-iterations", "12"]])
def test_chat_training_resumes_bit_for_bit_too(flags: list[str], command: Command, base: Path) -> None:
    words = [
        *["sft", "--model-tag", "d2", "--conversations", conversations(base), "--compile", "off", "--eval-every", "0"],
        *["--device-batch-size", "1", "--total-batch-size", "128", *flags],
    ]
    code, _, said = command(*words, "--save-every", "3")
    assert code == 0, said
    folder = base / "chatsft_checkpoints" / "d2"
    *_, before_last, last = checkpoint.steps(folder)
    whole = load(base, "d2", last, "sft")
    whole_losses = losses(base, "d2", "sft")
    shutil.rmtree(checkpoint.step_folder(folder, last))
    code, _, said = command("sft", "--model-tag", "d2", "--resume", str(before_last))
    assert code == 0, said
    assert losses(base, "d2", "sft") == whole_losses
    assert_same_bits(whole, load(base, "d2", last, "sft"))


def refused(answer: tuple[int, str, str]) -> str:
    code, out, said = answer
    assert code == 2, said
    assert out == ""
    (sentence,) = [line for line in said.splitlines() if line.startswith("nanochat: ")]
    return sentence


def test_other_settings_are_refused_by_name_unless_allowed(command: Command, base: Path) -> None:
    pretrain(command, "run", "--save-every", "20")
    sentence = refused(
        command("pretrain", "--model-tag", "run", "--resume", "20", "--matrix-lr", "0.5", "--max-seq-len", "16")
    )
    assert "rates.matrix_lr 0.02 → 0.5" in sentence
    assert "model.max_seq_len 32 → 16" in sentence
    code, _, said = command("pretrain", "--model-tag", "run", "--resume", "20", "--matrix-lr", "0.5", "--allow-changes")
    assert code == 0, said
    assert "do not compare" in said
    folder = base / "base_checkpoints" / "run"
    assert any("matrix_lr" in record["name"] for record in read(folder, "notice"))


def test_other_text_and_another_tokenizer_are_refused(command: Command, base: Path) -> None:
    pretrain(command, "run", "--save-every", "20")
    assert "data" in refused(
        command("pretrain", "--model-tag", "run", "--resume", "20", "--data", "base_data_climbmix")
    )
    # The same name, other documents.
    shutil.rmtree(base / "data" / "uneven")
    shutil.copytree(RUN / "base_data_climbmix", base / "data" / "uneven")
    assert "data" in refused(command("pretrain", "--model-tag", "run", "--resume", "20"))
    code, _, said = command("pretrain", "--model-tag", "run", "--resume", "20", "--allow-changes")
    assert code == 0, said
    other = Tokenizer.load(base / "tokenizer")
    *tokens, (before, id_before), (last, id_last) = other.mergeable_ranks.items()
    swapped = dict([*tokens, (before, id_last), (last, id_before)])
    Tokenizer(other.pattern, swapped, other.special_tokens).save(base / "tokenizer")
    assert "tokenizer" in refused(command("pretrain", "--model-tag", "run", "--resume", "20"))


def test_what_does_not_change_the_training_may_differ(command: Command) -> None:
    pretrain(command, "run", "--save-every", "20")
    code, _, said = command(
        *["pretrain", "--model-tag", "run", "--resume", "20", "--save-every", "7", "--eval-every", "10"],
        *["--eval-tokens", "128", "--keep-last", "2"],
    )
    assert code == 0, said


def test_auto_starts_when_there_is_nothing_and_goes_on_when_there_is(command: Command, base: Path) -> None:
    pretrain(command, "run", "--resume", "auto", "--save-every", "20")
    folder = base / "base_checkpoints" / "run"
    shutil.rmtree(checkpoint.step_folder(folder, STEPS))
    pretrain(command, "run", "--resume", "auto", "--save-every", "20")
    starts = list(read(folder, "start"))
    assert [(start["resumed"], start["step"]) for start in starts] == [(False, 0), (True, 20)]


def test_a_resume_without_a_run_or_step_is_refused(command: Command) -> None:
    assert "nowhere" in refused(command("pretrain", "--model-tag", "nowhere", "--resume"))
    pretrain(command, "run")
    assert "40" in refused(command("pretrain", "--model-tag", "run", "--resume", "7"))
    assert "sometimes" in refused(command("pretrain", "--model-tag", "run", "--resume", "sometimes"))


def test_an_imported_step_cannot_be_resumed_but_begun_from(command: Command, base: Path) -> None:
    assert "d2" in refused(command("pretrain", "--model-tag", "d2", "--resume"))
    code, _, said = command(
        *["pretrain", "--from", "d2@60", "--model-tag", "child", "--num-iterations", "3", "--compile", "off"],
        *["--device-batch-size", "2", "--total-batch-size", "128", "--eval-tokens", "128", "--data", "uneven"],
    )
    assert code == 0, said
    saved = load(base, "child", 3)
    assert saved.parent == {"source": "base", "tag": "d2", "step": 60}
    first = next(read(base / "base_checkpoints" / "child", "start"))
    assert (first["step"], first["resumed"], first["parent"]["tag"]) == (0, False, "d2")


@pytest.mark.parametrize("moments", [True, False])
def test_a_run_begun_from_another_takes_its_weights_and_moments_if_asked(
    moments: bool, command: Command, base: Path
) -> None:
    pretrain(command, "parent")
    flags = ["--keep-moments"] if moments else []
    code, _, said = command(
        *["pretrain", "--from", "parent", "--model-tag", "child", "--num-iterations", "2", "--compile", "off"],
        *["--device-batch-size", "2", "--total-batch-size", "128", "--eval-every", "0", "--sample-every", "0", *flags],
    )
    assert code == 0, said
    child = load(base, "child", 2)
    assert child.optimizer_step_count == 2 + (STEPS if moments else 0)
    assert losses(base, "child")[1] < losses(base, "parent")[1]


def test_beginning_from_another_run_needs_its_shape_and_a_name(command: Command) -> None:
    pretrain(command, "parent")
    assert "depth 2 → 3" in refused(command("pretrain", "--from", "parent", "--model-tag", "child", "--depth", "3"))
    assert "--model-tag" in refused(command("pretrain", "--from", "parent"))
    assert "nobody" in refused(command("pretrain", "--from", "nobody", "--model-tag", "child"))


def test_keep_last_keeps_that_many_and_nothing_else_is_ever_deleted(command: Command, base: Path) -> None:
    folder = base / "base_checkpoints" / "run"
    pretrain(command, "run", "--save-every", "10")
    assert checkpoint.steps(folder) == [10, 20, 30, 40]
    pretrain(command, "last", "--save-every", "10", "--keep-last", "2")
    assert checkpoint.steps(base / "base_checkpoints" / "last") == [30, 40]
    assert "keep" in refused(command("pretrain", *SMALL, "--data", "uneven", "--keep-last", "0"))


def test_a_recovery_save_is_made_by_the_clock_and_one_is_kept(command: Command, base: Path) -> None:
    pretrain(command, "run", "--recovery-minutes", "0.000001", "--save-every", "25")
    folder = base / "base_checkpoints" / "run"
    assert checkpoint.steps(folder) == [25, 40]
    saves = [(record["step"], record["recovery"]) for record in read(folder, "save")]
    assert (24, True) in saves
    assert (25, False) in saves


def start_in_background(base: Path, *flags: str) -> subprocess.Popen[str]:
    words = ["pretrain", *SMALL, "--data", "uneven", "--model-tag", "run", "--num-iterations", "100000", *flags]
    return subprocess.Popen(
        [sys.executable, "-m", "nanochat", *words],
        env={**os.environ, "NANOCHAT_BASE_DIR": str(base)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_steps(base: Path, at_least: int) -> None:
    folder = base / "base_checkpoints" / "run"
    deadline = time.monotonic() + 60
    while len(losses(base, "run")) < at_least:
        assert time.monotonic() < deadline, "the run does not get going"
        time.sleep(0.1)
    assert folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_finishes_the_step_saves_and_prints_how_to_go_on(name: str, command: Command, base: Path) -> None:
    running = start_in_background(base)
    wait_for_steps(base, 5)
    running.send_signal(getattr(signal, name))
    out, said = running.communicate(timeout=60)
    assert running.returncode == 0, said
    assert "nanochat pretrain --model-tag run --resume" in out
    folder = base / "base_checkpoints" / "run"
    (step,) = checkpoint.steps(folder)
    assert step == max(losses(base, "run"))
    assert [record["reason"] for record in read(folder, "stop")] == ["signal"]


@pytest.mark.slow
def test_a_lost_terminal_stops_nothing_and_a_second_signal_stops_at_once(command: Command, base: Path) -> None:
    running = start_in_background(base)
    wait_for_steps(base, 3)
    running.send_signal(signal.SIGHUP)
    wait_for_steps(base, len(losses(base, "run")) + 3)
    running.send_signal(signal.SIGINT)
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=60)
    assert running.returncode in (0, 130)  # the save may be done before the second signal arrives


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_save(command: Command, base: Path) -> None:
    running = start_in_background(base, "--save-every", "4")
    wait_for_steps(base, 10)
    running.kill()
    running.communicate(timeout=60)
    folder = base / "base_checkpoints" / "run"
    newest = checkpoint.steps(folder)[-1]
    again = start_in_background(base, "--save-every", "4", "--resume", "auto")
    wait_for_steps(base, len(losses(base, "run")) + 5)
    again.send_signal(signal.SIGTERM)
    _, said = again.communicate(timeout=60)
    assert again.returncode == 0, said
    assert [start["step"] for start in read(folder, "start")] == [0, newest]


def test_a_failing_evaluation_is_told_and_training_goes_on(
    command: Command, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanochat.evaluation.validation import Validation

    def fail(*_: object) -> None:
        raise MemoryError("no room to evaluate")

    monkeypatch.setattr(Validation, "measure", fail)
    printed = pretrain(command, "run", "--eval-every", "10", "--eval-tokens", "128")
    assert printed["step"] == STEPS
    notices = [record["text"] for record in read(base / "base_checkpoints" / "run", "notice")]
    assert len([text for text in notices if "no room to evaluate" in text]) == 1


def test_a_full_disk_during_training_keeps_the_earlier_save_and_goes_on(
    command: Command, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage
    full: list[bool] = []

    def usage(path: str) -> Any:
        full.append(True)
        found = real(path)
        return found._replace(free=0) if len(full) in (2, 3) else found

    monkeypatch.setattr(checkpoint.shutil, "disk_usage", usage)
    printed = pretrain(command, "run", "--save-every", "10")
    assert printed["step"] == STEPS
    folder = base / "base_checkpoints" / "run"
    assert checkpoint.steps(folder) == [10, 40]
    assert any("free" in record["text"] for record in read(folder, "notice"))


def test_a_setting_that_was_given_counts_even_where_it_is_the_default(command: Command) -> None:
    pretrain(command, "run", "--save-every", "20")
    sentence = refused(command("pretrain", "--model-tag", "run", "--resume", "20", "--buffer-size", "1000"))
    assert "text.buffer_size 12 → 1000" in sentence


def test_one_changed_byte_of_the_text_is_noticed(command: Command, base: Path) -> None:
    pretrain(command, "run", "--save-every", "20")
    shard = base / "data" / "uneven" / "shard_00001.parquet"
    content = bytearray(shard.read_bytes())
    content[len(content) // 4] ^= 1
    shard.write_bytes(bytes(content))
    assert "data uneven" in refused(command("pretrain", "--model-tag", "run", "--resume", "20"))


def test_a_finished_run_is_not_touched_by_a_resume(command: Command, base: Path) -> None:
    first = pretrain(command, "run")
    folder = base / "base_checkpoints" / "run"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    again = pretrain(command, "run", "--resume", "auto")
    assert again["val_bpb"] == first["val_bpb"]
    assert again["step"] == STEPS
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_torn_record_does_not_stop_a_resume(command: Command, base: Path) -> None:
    pretrain(command, "run", "--save-every", "20")
    folder = base / "base_checkpoints" / "run"
    for resumed in (1, 2):
        shutil.rmtree(checkpoint.step_folder(folder, STEPS), ignore_errors=True)
        with (folder / "records.jsonl").open("a") as file:
            file.write('{"kind": "step", "ti')
        code, _, said = command("pretrain", "--model-tag", "run", "--resume")
        assert code == 0, said
        assert len(list(read(folder, "start"))) == 1 + resumed


def test_a_new_run_puts_a_damaged_step_of_its_number_aside(command: Command, base: Path) -> None:
    pretrain(command, "run", "--save-every", "20")
    folder = base / "base_checkpoints" / "run"
    (checkpoint.step_folder(folder, 20) / "model.safetensors").write_bytes(b"")
    pretrain(command, "run", "--save-every", "20")
    assert checkpoint.steps(folder) == [20, 40]
    assert not (folder / ".first").exists()


def test_records_that_cannot_be_written_do_not_end_the_run(
    command: Command, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanochat.records import Records

    real = Records._append

    def refuse_steps(self: Records, name: str, text: str) -> None:
        if '"step"' in text:
            name = "no such folder/records.jsonl"
        real(self, name, text)

    monkeypatch.setattr(Records, "_append", refuse_steps)
    code, _, said = command("pretrain", *SMALL, "--data", "uneven", "--model-tag", "run", "--num-iterations", "3")
    assert code == 0, said
    assert said.count("cannot be written") == 1
    assert checkpoint.steps(base / "base_checkpoints" / "run") == [3]
