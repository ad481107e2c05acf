"""What a run must survive: mistakes, two at once, odd terminals. One sentence, exit code 2, nothing lost."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanochat import checkpoint
from nanochat.cli import main
from nanochat.errors import UserError
from nanochat.optim.optimizer import Optimizer
from nanochat.records import read
from nanochat.train import lock

#: Whole commands, many of them: left out of the quick check.
pytestmark = pytest.mark.slow

RUN = Path(__file__).parent / "golden" / "run"

SMALL = [
    *["--depth", "1", "--aspect-ratio", "32", "--head-dim", "16", "--max-seq-len", "16", "--compile", "off"],
    *["--device-batch-size", "2", "--total-batch-size", "32", "--eval-every", "0", "--sample-every", "0"],
]

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    monkeypatch.setenv("NANOCHAT_DTYPE", "float32")
    assert main(["import", str(RUN)]) == 0

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(words))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def train(command: Command, tag: str, *flags: str, steps: int = 2) -> tuple[int, str, str]:
    return command("pretrain", *SMALL, "--model-tag", tag, "--num-iterations", str(steps), *flags)


def refused(answer: tuple[int, str, str]) -> str:
    code, out, said = answer
    assert code == 2, said
    assert out == ""
    (sentence,) = [line for line in said.splitlines() if line.startswith("nanochat: ")]
    return sentence


def test_a_run_that_fails_takes_nothing_from_the_earlier_one(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "base_checkpoints" / "good"
    assert train(command, "good")[0] == 0
    assert "is nan" in refused(train(command, "good", "--embedding-lr", "1e6", "--matrix-lr", "1e6", steps=50))
    monkeypatch.setattr(checkpoint, "save", no_room)
    assert "no room" in refused(train(command, "good", steps=3))
    monkeypatch.undo()
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    assert checkpoint.steps(folder) == [2]
    assert command("generate", "-g", "good", "-p", "The", "--max-tokens", "2")[0] == 0
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith("good.")] == []


def no_room(*_: object) -> None:
    raise UserError("there is no room on the disk: free some")


def test_an_earlier_run_is_moved_aside_whole_when_the_new_one_has_saved(command: Command, tmp_path: Path) -> None:
    assert train(command, "again", steps=2)[0] == 0
    assert train(command, "again", steps=2)[0] == 0
    folder = tmp_path / "base_checkpoints" / "again"
    (aside,) = [path for path in folder.parent.iterdir() if path.name.startswith("again.")]
    assert checkpoint.steps(folder) == checkpoint.steps(aside) == [2]
    for place in (folder, aside):
        assert [record["kind"] for record in read(place)].count("start") == 1
        assert "step 2/2" in (place / "log.txt").read_text()
    assert not (folder / ".first").exists()
    first, second = (next(read(place, "start"))["run_id"] for place in (aside, folder))
    assert first != second


def test_a_new_run_killed_before_its_first_save_is_not_taken_for_the_earlier_one(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(command, "run")[0] == 0
    monkeypatch.setattr(checkpoint, "save", no_room)
    refused(train(command, "run", steps=3))
    monkeypatch.undo()
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    monkeypatch.setenv("NANOCHAT_DTYPE", "float32")
    assert "to resume" in refused(command("pretrain", "--model-tag", "run", "--resume"))
    code, _, said = train(command, "run", "--resume", "auto", steps=3)
    assert code == 0, said
    assert checkpoint.steps(tmp_path / "base_checkpoints" / "run") == [3]


@pytest.mark.parametrize("name", ["..", ".", "/tmp/elsewhere", "a/b", ".hidden", "", "a\nb", "x" * 300])
def test_a_name_never_leads_out_of_the_base_folder(name: str, command: Command, tmp_path: Path) -> None:
    before = sorted(path.name for path in tmp_path.rglob("*"))
    assert "cannot name a folder" in refused(train(command, name))
    assert "cannot name a folder" in refused(command("tokenizer", "--vocab-size", "300", "--name", name))
    assert "cannot name a folder" in refused(command("generate", "-p", "The", "--model-tag", name))
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_run_that_another_process_trains_is_refused(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "base_checkpoints" / "busy"
    folder.mkdir()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        owner = {"pid": other.pid, "host": platform.node(), "time": time.time()}
        (folder / lock.FILE_NAME).write_text(json.dumps(owner))
        assert f"process {other.pid}" in refused(train(command, "busy"))
    finally:
        other.kill()
        other.wait()
    assert train(command, "busy")[0] == 0  # a dead process holds nothing
    assert not (folder / lock.FILE_NAME).exists()


def test_a_lock_of_another_machine_holds_as_long_as_it_is_touched(tmp_path: Path) -> None:
    path = tmp_path / lock.FILE_NAME
    path.write_text(json.dumps({"pid": 1, "host": "another-machine", "time": time.time()}))
    with pytest.raises(UserError, match="another-machine"):
        lock.acquire(tmp_path)
    long_ago = time.time() - 2 * lock.SILENT_SECONDS
    os.utime(path, (long_ago, long_ago))
    with lock.locked(tmp_path):
        assert path.exists()
    assert not path.exists()


@pytest.mark.slow
def test_of_two_processes_under_one_tag_one_is_refused(command: Command, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "nanochat", "pretrain", *SMALL, "--model-tag", "both", "--num-iterations", "300"]
    both = [subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120)[1] for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes == [0, 2], said
    assert checkpoint.steps(tmp_path / "base_checkpoints" / "both") == [300]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--embedding-lr", "nan"], "--embedding-lr"),
        (["--matrix-lr", "-1"], "--matrix-lr"),
        (["--warmup-steps", "-1"], "--warmup-steps"),
        (["--warmdown-ratio", "2"], "--warmdown-ratio"),
        (["--final-lr-frac", "nan"], "--final-lr-frac"),
        (["--buffer-size", "0"], "--buffer-size"),
        (["--tokenizer-batch-size", "-1"], "--tokenizer-batch-size"),
        (["--seed", "99999999999999999999999"], "--seed"),
        (["--device-batch-size", "0"], "--device-batch-size"),
        (["--depth", "10000000"], "--depth"),
        (["--recovery-minutes", "-1"], "--recovery-minutes"),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_anything_is_written(
    flags: list[str], named: str, command: Command, tmp_path: Path
) -> None:
    assert named in refused(train(command, "run", *flags))
    assert not (tmp_path / "base_checkpoints" / "run").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["tokenizer", "--vocab-size", "100000000000"],
        ["plan", "--target-param-data-ratio", "1e308"],
        ["plan", "--depth", "99999999999999"],
        ["sft", "--load-optimizer", "5"],
        ["sft", "--name", " "],
    ],
)
def test_numbers_beyond_any_use_are_refused(words: list[str], command: Command) -> None:
    assert words[1] in refused(command(*words))


def test_weights_that_are_not_finite_are_never_saved(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(optimizer: Optimizer, *_: float) -> None:
        with torch.no_grad():
            next(iter(optimizer._parameters.values())).fill_(float("inf"))

    monkeypatch.setattr(Optimizer, "step", diverge)
    assert "not finite" in refused(train(command, "run", steps=1))
    assert checkpoint.steps(tmp_path / "base_checkpoints" / "run") == []


def test_what_the_system_refuses_is_one_sentence_that_names_the_place(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a file"
    file.write_text("")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(file / "below"))
    for words in (["import", str(RUN)], ["dataset", "import", str(file)]):
        assert str(file) in refused(command(*words))


def test_a_broken_link_among_the_shards_is_named(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "linked"
    folder.mkdir(parents=True)
    for number in range(2):
        (folder / f"shard_{number:05d}.parquet").symlink_to(tmp_path / "gone")
    assert "shard_0000" in refused(train(command, "run", "--data", "linked"))


def test_a_manifest_that_does_not_fit_its_tensors_is_refused(command: Command, tmp_path: Path) -> None:
    manifest = tmp_path / "base_checkpoints" / "d2" / "step_000060" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["model_config"]["num_layers"] = 99
    manifest.write_text(json.dumps(content))
    assert "step 60 is damaged" in refused(command("generate", "-p", "The"))


def test_generating_needs_no_optimizer_state(command: Command, tmp_path: Path) -> None:
    state = tmp_path / "base_checkpoints" / "d2" / "step_000060" / "optim_owner0.safetensors"
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(bytes(content))
    assert command("generate", "-p", "The", "--max-tokens", "2")[0] == 0


def run_cut_off(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = f"{sys.executable} -m nanochat"
    return subprocess.run(
        ["sh", "-c", command.replace("nanochat", program)],
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, **environment},
    )


def test_a_terminal_without_utf8_gets_other_characters_not_a_traceback() -> None:
    done = run_cut_off("nanochat plan --depth 4", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "6 ? N" in done.stdout


@pytest.mark.parametrize("command", ["nanochat --help | true", "nanochat plan --depth 4 | true"])
def test_a_reader_that_goes_away_is_no_fault(command: str) -> None:
    assert run_cut_off(command).stderr == ""


def test_a_full_device_for_output_is_one_sentence() -> None:
    if not Path("/dev/full").exists():
        return
    done = run_cut_off("nanochat plan --depth 4 > /dev/full")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_out_of_memory_is_one_sentence(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanochat.model import init

    def fail(*_: object) -> None:
        torch.empty(2**62, dtype=torch.uint8)

    monkeypatch.setattr("nanochat.stages.pretrain.initialize", fail)
    assert init is not None
    assert "out of memory" in refused(train(command, "run"))
