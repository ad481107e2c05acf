"""The command line: instant help, one sentence for a mistake, exit code 2, nothing half-written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat.cli import main
from nanochat.commands import COMMANDS

GOLDEN = Path(__file__).parent / "golden"


def one_sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """What stderr holds, which must be one line that begins with the program's name."""
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = [line for line in printed.err.splitlines() if line]
    assert len(lines) == 1, printed.err
    assert lines[0].startswith("nanochat: ")
    return lines[0]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert name in printed
        assert command.help in printed


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_loads_no_torch_for_it(name: str) -> None:
    code = (
        "import sys\nfrom nanochat.cli import main\n"
        f"try: main([{name!r}, '--help'])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: nanochat " + name in done.stdout


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrian"]) == 2
    assert "'pretrian'" in one_sentence(capsys)


def test_an_unknown_flag_is_named_with_what_was_probably_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "--dept", "4"]) == 2
    said = one_sentence(capsys)
    assert "--dept" in said
    assert "--depth" in said


@pytest.mark.parametrize("flags", [["--depth"], ["--depth", "x"], ["--depth", "1.5"], ["--compile", "maybe"]])
def test_a_malformed_flag_is_one_sentence(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", *flags]) == 2
    assert flags[0] in one_sentence(capsys)


def test_plan_json_equals_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    for entry in json.loads((GOLDEN / "plan.json").read_text()):
        expected = dict(entry)
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in expected.pop("inputs").items()]
        assert main(["plan", "--json", *flags]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed == {
            key: pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
            for key, value in expected.items()
        }


def test_plan_takes_key_value_heads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "--depth", "4", "--num-kv-heads", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["n_kv_head"] == 1


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["plan", "--depth", "0"], "depth"),
        (["plan", "--depth", "4", "--num-kv-heads", "3"], "num-kv-heads"),
        (["plan", "--depth", "4", "--target-param-data-ratio", "0"], "ratio"),
        (["plan", "--depth", "4", "--window-pattern", "SX"], "SX"),
        (["plan", "--depth", "4", "--head-dim", "0"], "head"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    assert named in one_sentence(capsys)


@pytest.mark.parametrize(
    "flags",
    [
        ["pretrain", "--depth", "2"],
        ["tokenizer"],
        ["sft"],
        ["evaluate", "--bpb"],
        ["generate", "-p", "x"],
        ["chat", "-p", "x"],
        ["import", "nowhere"],
        ["run", "nothing"],
    ],
)
def test_an_empty_base_folder_is_told_and_stays_empty(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    assert main(flags) == 2
    one_sentence(capsys)
    assert list(tmp_path.iterdir()) == []
