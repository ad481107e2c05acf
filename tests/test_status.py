"""What ``nanochat status`` and ``nanochat runs`` tell, against a published status report and by state."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import watched_run as made

from nanochat.context import Context
from nanochat.errors import UserError
from nanochat.stages import runs as runs_stage
from nanochat.stages import status as status_stage
from nanochat.terminal import Terminal
from nanochat.watching import figures
from nanochat.watching.configs import RunsConfig, StatusConfig
from nanochat.watching.history import read_history
from nanochat.watching.render import render_status
from nanochat.watching.status import Status, describe
from nanochat.watching.text_use import text_use
from nanochat.watching.words import count, duration, size

#: A process number that no system gives.
NO_PROCESS = 2**31 - 1


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Status:
    """The status of the published run, five seconds after its last record."""
    monkeypatch.setattr(figures, "is_alive", lambda pid, noted_at: True)
    return describe(read_history(made.write_published(tmp_path)), made.published_time() + 5)


def small_run(base: Path, *more: dict[str, Any], source: str = "base", tag: str = "d12", **start: Any) -> Path:
    """A run that began a minute ago, of three steps, with more records after them."""
    now = time.time()
    records = [made.start_record(now - 60, **start)]
    records += [made.step_record(step, now - 60 + step) for step in (1, 2, 3)]
    folder = {"base": "base_checkpoints", "sft": "chatsft_checkpoints"}[source]
    return made.write(base / folder / tag, [*records, *more])


def status_of(folder: Path) -> Status:
    return describe(read_history(folder))


@pytest.mark.parametrize(
    ("label", "parts"),
    [
        ("step", ["35,729 of 87,000", "41.07%"]),
        ("left", ["16.8 h"]),
        ("training time", ["11.7 h"]),
        ("since this start", ["8.4 h"]),
        ("started", ["resumed once", "from step 10,000"]),
        (
            "model",
            [
                *("286,261,730 parameters", "12 layers", "6 heads", "6 key-value heads", "dim 768", "head dim 128"),
                *("vocabulary 32,768", "T 2,048", "887 M FLOPs a token"),
            ],
        ),
        ("batch", ["65,536 tokens", "8 rows x 2,048 x 4"]),
        ("horizon", ["5.70 B tokens", "51.8 by scaling parameters", "19.9 by all parameters"]),
        ("rates", ["matrix 0.02", "0.3536", "weight decay 0.0990"]),
        ("schedule", ["warm-up 40 steps", "warm-down 65%"]),
        ("text", ["climbmix", "374 GB", "177 shards", "about 143 B tokens"]),
        ("share used", ["1.18% so far since the text changed", "4% at the end"]),
        ("tokens", ["2.34 B trained of 5.70 B"]),
        ("position", ["shard 4 of 177, row group 97"]),
        ("epoch", ["1"]),
        ("speed", ["55,660 tokens/s", "1,177 ms"]),
        ("steadiness", ["steady: ±0.5%"]),
        ("MFU", ["n/a", "peak", "49.4 TFLOP/s"]),
        ("loss", ["3.16 to 3.20", "nats per token"]),
        (
            "validation",
            ["last 1.0020 at step 30,000", "best 0.9350 at step 10,000 on the text before", "not comparable"],
        ),
        ("trajectory", ["0: 3.2210", "10,000: 0.9350 best", "20,000: 1.0160", "30,000: 1.0020"]),
        ("checkpoints", ["3 (8.58 GB)", "10,000, 20,000, 30,000"]),
        ("not finite", ["no step"]),
        ("memory", ["10.4 GB"]),
        ("looks wrong", ["resumed at step 10,000", "fineweb-edu", "climbmix", "do not compare"]),
        ("expect", ["n/a"]),
    ],
)
def test_status_says_what_the_published_report_of_that_run_says(
    published: Status, label: str, parts: list[str]
) -> None:
    for part in parts:
        assert part in published.value(label)


def test_the_same_figures_are_there_for_programs(published: Status) -> None:
    values = json.loads(json.dumps(published.values, allow_nan=False))
    assert values["state"] == "running"
    assert (values["step"], values["num_iterations"]) == (35_729, 87_000)
    assert round(values["tokens_per_second"]) == 55_660
    assert values["position"] == {"pq_idx": 3, "rg_idx": 96, "epoch": 1}
    assert values["mfu"] is None
    assert [figure["text"] for figure in values["validation"]] == [0, 0, 1, 1]


def test_the_end_is_later_than_the_pace_alone_says_when_evaluations_take_time(tmp_path: Path) -> None:
    now = time.time()
    records = [made.start_record(now - 500, num_iterations=200)]
    records += [made.step_record(step, now - 500 + 4 * step, seconds=2.0) for step in range(1, 101)]
    left = figures.remaining(read_history(made.write(tmp_path / "run", records)))
    assert left is not None
    assert left.steps == 100
    assert left.training_seconds == pytest.approx(200, rel=0.01)
    assert left.wall_seconds == pytest.approx(400, rel=0.01)


def test_the_share_of_the_peak_names_its_basis(tmp_path: Path) -> None:
    history = read_history(small_run(tmp_path, peak_flops=58.3e12))
    mfu = figures.utilization(history)
    assert mfu.share == pytest.approx(49.4 / 58.3, abs=0.005)
    assert "% of the 58.3 TFLOP/s of NVIDIA GeForce RTX 4070 in bfloat16" in mfu.text


def test_a_share_over_all_is_reported_as_a_wrong_basis_and_not_clamped(tmp_path: Path) -> None:
    mfu = figures.utilization(read_history(small_run(tmp_path, peak_flops=40e12)))
    assert mfu.share is not None
    assert mfu.share > 1.2
    assert "123." in mfu.text
    assert "wrong basis" in mfu.text


def test_a_run_whose_process_lives_is_running(tmp_path: Path) -> None:
    assert status_of(small_run(tmp_path)).state.name == "running"


def test_a_run_whose_process_is_gone_has_died(tmp_path: Path) -> None:
    status = status_of(small_run(tmp_path, pid=NO_PROCESS))
    assert status.state.name == "died"
    assert "gone without a word" in status.value("state")


def test_a_run_that_died_after_a_save_says_how_to_go_on(tmp_path: Path) -> None:
    folder = small_run(tmp_path, pid=NO_PROCESS)
    (folder / "step_000002").mkdir()
    (folder / "step_000002" / "manifest.json").write_text("{}")
    assert status_of(folder).value("continue") == "nanochat pretrain --model-tag d12 --resume"


def test_a_process_number_given_to_a_younger_process_is_not_the_run(tmp_path: Path) -> None:
    long_ago = time.time() - 10 * 365 * 86_400
    records = [made.start_record(long_ago), made.step_record(1, long_ago + 1)]
    expected = "died" if sys.platform == "linux" else "running"  # elsewhere a process's age is not asked
    assert status_of(made.write(tmp_path / "run", records)).state.name == expected


def test_a_run_on_another_machine_is_believed_while_it_tells_of_itself(tmp_path: Path) -> None:
    assert status_of(small_run(tmp_path, host="elsewhere", pid=NO_PROCESS)).state.name == "running"
    history = read_history(small_run(tmp_path, host="elsewhere"))
    later = figures.state(history, time.time() + 7200)
    assert later.name == "unknown"
    assert "elsewhere" in later.text


def test_a_finished_run_has_nothing_left(tmp_path: Path) -> None:
    status = status_of(small_run(tmp_path, {"kind": "end", "time": time.time(), "step": 3}, pid=NO_PROCESS))
    assert status.state.name == "finished"
    assert status.value("left").startswith("nothing")


@pytest.mark.parametrize(("reason", "words"), [("signal", "after saving"), ("error", "disk"), ("not finite", "finite")])
def test_a_stopped_run_says_why(tmp_path: Path, reason: str, words: str) -> None:
    stop = {"kind": "stop", "time": time.time(), "step": 3, "reason": reason, "text": "the disk is full"}
    status = status_of(small_run(tmp_path, stop, pid=NO_PROCESS))
    assert status.state.name == "stopped"
    assert words in status.value("state")


def test_a_silent_process_is_told_of(tmp_path: Path) -> None:
    state = figures.state(read_history(small_run(tmp_path)), time.time() + 3600)
    assert state.name == "running"
    assert "silent" in state.text


def test_a_run_before_its_first_step_has_a_status(tmp_path: Path) -> None:
    status = status_of(made.write(tmp_path / "run", [made.start_record(time.time())]))
    assert "no step is done yet" in status.value("loss")
    assert status.value("step").startswith("0 of 87,000")


def test_records_of_the_first_version_have_a_status(tmp_path: Path) -> None:
    now = time.time()
    start = {"kind": "start", "time": now - 9, "stage": "base", "tag": "d4", "config": {}, "device": "AMD EPYC"}
    steps = [
        {"kind": "step", "time": now, "step": n, "loss": 5.0, "tokens": n * 256, "seconds": 0.5} for n in (1, 2, 3)
    ]
    status = status_of(made.write(tmp_path / "run", [start, *steps]))
    assert status.value("training time").startswith("1.5 s")
    assert "512 tokens/s" in status.value("speed")
    assert status.value("MFU").startswith("n/a")
    assert render_status(status, colours=False)


def test_a_chat_run_whose_steps_are_not_known_beforehand_has_a_status(tmp_path: Path) -> None:
    config = {
        "max_seq_len": 512,
        "batch": {"total_batch_size": 8192, "device_batch_size": 8},
        "rates": {"matrix_lr": 1},
    }
    folder = small_run(tmp_path, source="sft", stage="sft", plan=None, num_iterations=None, config=config)
    status = status_of(folder)
    assert "not known beforehand" in status.value("step")
    assert status.value("left").startswith("n/a")
    assert "conversations" in status.value("horizon")
    assert "8,192 tokens a step = 8 rows x 512 x 2" in status.value("batch")


def test_an_imported_run_without_records_has_a_status(tmp_path: Path) -> None:
    step = tmp_path / "base_checkpoints" / "d2" / "step_000060"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    status = status_of(step.parent)
    assert status.state.name == "imported"
    assert "60" in status.value("checkpoints")


def test_what_packing_lost_and_how_often_the_text_is_read_is_told(tmp_path: Path) -> None:
    data = made.start_record(0.0)["data"] | {"tokens": 1e6, "tokens_exact": True}
    read = made.step_record(4, time.time(), tokens_read=400_000, tokens_lost=138_400)
    status = status_of(small_run(tmp_path, read, data=data))
    assert "of which packing lost 138,400 (34.6%)" in status.value("text read")
    assert "times at the end" in status.value("share used")


def test_what_was_read_of_another_text_does_not_count_for_the_present_one(tmp_path: Path) -> None:
    now = time.time()
    data = {"name": "other", "fingerprint": "0" * 64, "tokens": 10 * made.BATCH, "tokens_exact": True}
    before = made.step_record(4, now, tokens_read=5 * made.BATCH, tokens_lost=made.BATCH)
    again = made.start_record(now, 4, data=data, num_iterations=14)
    after = made.step_record(5, now, tokens_read=2 * made.BATCH, tokens_lost=0)
    use = text_use(read_history(small_run(tmp_path, before, again, after)))
    assert use.passes == pytest.approx(0.2)
    assert use.planned_passes == pytest.approx(2.0)  # ten steps, and twice as much read as trained on


def test_the_position_in_a_blend_is_told_by_source(tmp_path: Path) -> None:
    sources = [{"share": 0.8, "name": "a", "shards": 5}, {"share": 0.2, "name": "b", "shards": 1}]
    places = {"a": {"pq_idx": 2, "rg_idx": 0, "epoch": 1}, "b": {"pq_idx": 0, "rg_idx": 3, "epoch": 4}}
    data = {"name": "a:0.8 b:0.2", "fingerprint": "0" * 64, "sources": sources}
    folder = small_run(tmp_path, made.step_record(4, time.time(), positions=places), data=data)
    shown = status_of(folder).value("position")
    assert shown == "a: shard 3 of 5, row group 1, epoch 1\nb: shard 1 of 1, row group 4, epoch 4"


def test_a_loss_that_is_not_finite_is_counted_and_still_json(tmp_path: Path) -> None:
    status = status_of(small_run(tmp_path, made.step_record(4, time.time(), loss=math.nan)))
    assert status.value("not finite") == "1 step"
    assert json.loads(json.dumps(status.values, allow_nan=False))["loss_nats_per_token"] is None


def test_nats_per_token_never_stand_beside_bits_per_byte_without_saying_so(published: Status) -> None:
    assert "beside no bits per byte" in published.value("loss")
    assert "bits per byte" in published.value("validation")


def test_plain_text_is_aligned_and_without_colours(published: Status) -> None:
    text = render_status(published, colours=False)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 120
    assert "state             running: " in text
    text.encode("cp1252")  # what a Windows console may be limited to


def test_a_terminal_gets_colours_and_the_same_words(published: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = render_status(published, colours=True)
    assert "\x1b[" in text
    for word in ("41.07%", "16.8 h", "55,660 tokens/s", "shard 4 of 177"):
        assert word in text


def context(base: Path) -> Context:
    return Context(base, Terminal())


def test_the_run_that_told_of_itself_last_is_meant_when_none_is_named(tmp_path: Path) -> None:
    older, newer = small_run(tmp_path, tag="older"), small_run(tmp_path, tag="newer", source="sft")
    os.utime(older / "records.jsonl", (1, 1))
    result = status_stage.run(StatusConfig(), context(tmp_path))
    assert result.values["folder"] == str(newer)
    assert status_stage.run(StatusConfig("older"), context(tmp_path)).values["tag"] == "older"
    assert status_stage.run(StatusConfig(source="base"), context(tmp_path)).values["tag"] == "older"


def test_an_unknown_run_is_one_sentence_that_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="start one with `nanochat pretrain`"):
        status_stage.run(StatusConfig("d12"), context(tmp_path))
    small_run(tmp_path, tag="d4")
    with pytest.raises(UserError, match=r"no run 'd12'.*there are d4 \(base\)"):
        status_stage.run(StatusConfig("d12"), context(tmp_path))
    with pytest.raises(UserError, match=r"no sft run 'd4'"):
        status_stage.run(StatusConfig("d4", source="sft"), context(tmp_path))


def test_runs_lists_every_run_the_latest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "is_alive", lambda pid, noted_at: pid == os.getpid())
    os.utime(made.write_published(tmp_path) / "records.jsonl", (1, 1))
    small_run(tmp_path, made.validation_record(3, time.time(), 1.25), tag="d4", source="sft", pid=NO_PROCESS)
    result = runs_stage.run(RunsConfig(), context(tmp_path))
    assert [run["tag"] for run in result.values["runs"]] == ["d4", "rtx4070-d12-chinchilla"]
    assert [run["state"] for run in result.values["runs"]] == ["died", "running"]
    header, small, large, note = result.text.splitlines()
    assert header.startswith("run ")
    assert "1.2500" in small
    assert "35,729" in large
    assert "41%" in large
    assert "1.0020*" in large
    assert "several texts" in note


def test_an_empty_base_folder_has_no_runs(tmp_path: Path) -> None:
    result = runs_stage.run(RunsConfig(), context(tmp_path))
    assert result.values == {"runs": [], "detached": []}
    assert "nanochat pretrain" in result.text


def test_this_machine_is_the_one_the_records_name() -> None:
    assert made.start_record(0.0)["host"] == platform.node()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (3.21, "3.2 s"),
        (42, "42 s"),
        (725, "12 min 5 s"),
        (3599.7, "60 min"),
        (60_367, "16.8 h"),
        (223_200, "62.0 h (2.6 days)"),
    ],
)
def test_durations_read_well(value: float, shown: str) -> None:
    assert duration(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(55_660, "55,660"), (887_097_888, "887 M"), (2.3415e9, "2.34 B"), (999_999_999, "1.00 B")]
)
def test_counts_read_well(value: float, shown: str) -> None:
    assert count(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(512, "512 bytes"), (3_210_000, "3.21 MB"), (374e9, "374 GB")])
def test_sizes_read_well(value: float, shown: str) -> None:
    assert size(value) == shown
