"""Commands that go on without their terminal, and how they are followed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanochat.context import Context
from nanochat.errors import UserError
from nanochat.processes import is_alive
from nanochat.stages import attach
from nanochat.terminal import Terminal
from nanochat.watching import detach
from nanochat.watching.configs import AttachConfig
from nanochat.watching.detach import Detached, all_detached, find_detached, follow, start_detached

#: Whole commands, many of them: left out of the quick check.
pytestmark = pytest.mark.slow

#: How long a small process may take to end before a test fails.
PATIENCE_SECONDS = 20.0

#: Says who it is, waits for a file called "go", and ends.
CHILD = """
import os, sys, time
print("started", os.environ["NANOCHAT_BASE_DIR"], sys.stdin.read() == "", os.getsid(0) == os.getpid(), flush=True)
print("on stderr", file=sys.stderr, flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
print("äöü done")
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small program is started in place of nanochat; returns the file it waits for."""
    script = tmp_path / "child.py"
    script.write_text(CHILD, encoding="utf-8")
    spawn = detach._spawn

    def spawn_child(command: list[str], output: int, base: Path) -> int:
        assert command[:3] == [sys.executable, "-m", "nanochat"]
        return spawn([sys.executable, str(script), *command[3:]], output, base)

    monkeypatch.setattr(detach, "_spawn", spawn_child)
    return tmp_path / "go"


def wait_for_end(detached: Detached) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while detached.is_running():
        assert time.monotonic() < deadline, "the process does not end"
        time.sleep(0.02)


def text_of(detached: Detached) -> str:
    return "".join(follow(detached, poll_seconds=0.02))


@pytest.mark.skipif(os.name == "nt", reason="sessions are asked for as POSIX has them")
def test_a_detached_command_has_a_session_of_its_own_and_writes_to_its_log(tmp_path: Path, child: Path) -> None:
    detached = start_detached([str(child)], tmp_path, "demo")
    assert detached.is_running()
    child.touch()
    text = text_of(detached)
    assert f"nanochat {child}" in text
    assert f"started {tmp_path} True True" in text
    assert "on stderr" in text
    assert text.endswith("äöü done\n")
    assert not detached.is_running()


def test_a_name_that_still_runs_is_refused_and_one_that_ended_is_not(tmp_path: Path, child: Path) -> None:
    first = start_detached([str(child)], tmp_path, "demo")
    with pytest.raises(UserError, match=rf"demo is still running \(process {first.pid}\).*nanochat attach demo"):
        start_detached([str(child)], tmp_path, "demo")
    other = start_detached([str(child)], tmp_path, "other")
    child.touch()
    wait_for_end(first)
    wait_for_end(other)
    second = start_detached([str(child)], tmp_path, "demo")
    wait_for_end(second)
    assert second.log == first.log
    assert text_of(second).count("started") == 1
    assert first.log.read_text(encoding="utf-8").count("started") == 2
    assert [each.name for each in all_detached(tmp_path)] == ["demo", "other"]


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b"])
def test_a_name_that_cannot_be_a_files_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="cannot be named"):
        start_detached(["plan"], tmp_path, name)
    assert not (tmp_path / "detached").exists()


def test_a_base_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "detached").write_text("in the way")
    with pytest.raises(UserError, match="cannot be started"):
        start_detached(["plan"], tmp_path, "demo")


@pytest.mark.slow
def test_a_real_command_runs_detached(tmp_path: Path) -> None:
    detached = start_detached(["plan", "--depth", "4"], tmp_path, "plan")
    assert "num_iterations" in text_of(detached)


def test_attach_prints_what_was_said_and_what_is_said_until_the_end(
    tmp_path: Path, child: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start_detached([str(child)], tmp_path, "demo")
    child.touch()
    attach.run(AttachConfig(), Context(tmp_path, Terminal()))
    printed = capsys.readouterr()
    assert printed.out.endswith("äöü done\n")
    assert "demo has ended" in printed.err


def test_leaving_leaves_the_run_alone(
    tmp_path: Path, child: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    detached = start_detached([str(child)], tmp_path, "demo")

    def interrupted(_: Detached) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(attach, "follow", interrupted)
    attach.run(AttachConfig("demo"), Context(tmp_path, Terminal()))
    assert "demo goes on" in capsys.readouterr().err
    assert detached.is_running()
    child.touch()
    wait_for_end(detached)


def test_attaching_to_an_unknown_name_lists_what_there_is(tmp_path: Path, child: Path) -> None:
    with pytest.raises(UserError, match="nothing was started with --detach"):
        attach.run(AttachConfig("demo"), Context(tmp_path, Terminal()))
    child.touch()
    wait_for_end(start_detached([str(child)], tmp_path, "other"))
    with pytest.raises(UserError, match=r"'demo': there are other \(ended\)"):
        attach.run(AttachConfig("demo"), Context(tmp_path, Terminal()))


def test_a_damaged_note_of_a_detached_run_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "detached").mkdir()
    (tmp_path / "detached" / "demo.json").write_text('{"name": "demo"')
    assert find_detached(tmp_path, "demo") is None
    assert all_detached(tmp_path) == []


def test_this_process_is_alive_and_an_ended_one_is_not() -> None:
    assert is_alive(os.getpid())
    assert is_alive(os.getpid(), time.time())
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert not is_alive(process.pid)
    assert not any(is_alive(pid) for pid in (0, -1, 2**40))


@pytest.mark.skipif(sys.platform != "linux", reason="a process's age and state are read from /proc")
def test_neither_a_process_nobody_waited_for_nor_a_younger_one_of_that_number_is_alive() -> None:
    assert not is_alive(os.getpid(), time.time() - 10 * 365 * 86_400)
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while is_alive(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.wait()
