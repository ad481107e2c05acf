"""A run's records read back, what looks wrong in them, and the report made of them."""

from __future__ import annotations

import builtins
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import watched_run as made

from nanochat.context import Context
from nanochat.errors import UserError
from nanochat.records import RECORDS_NAME, Records
from nanochat.stages import report as report_stage
from nanochat.terminal import Terminal
from nanochat.watching import curve, health, report
from nanochat.watching.configs import ReportConfig
from nanochat.watching.history import RunHistory, find_runs, read_history

PNG = b"\x89PNG\r\n\x1a\n"


def history_of(folder: Path, *records: dict[str, Any], **start: Any) -> RunHistory:
    """The history of a run with these records after its start."""
    return read_history(made.write(folder / "run", [made.start_record(0.0, **start), *records]))


def names(history: RunHistory) -> list[str]:
    return [notice.name for notice in health.notices(history)]


def steps(first: int, last: int, **values: Any) -> Iterator[dict[str, Any]]:
    for step in range(first, last + 1):
        yield made.step_record(step, float(step), **values)


# History


def test_what_the_records_writer_writes_is_read_back(tmp_path: Path) -> None:
    records = Records(tmp_path / "d4")
    records.write("start", stage="base", tag="d4", step=0, num_iterations=3)
    records.write("step", step=1, loss=4.5, tokens=256, seconds=0.5)
    records.write("validation", step=1, val_bpb=1.5, tokens=256)
    history = read_history(tmp_path / "d4")
    assert history.step == 1
    assert history.steps[0].loss == 4.5
    assert history.validations[0].val_bpb == 1.5
    assert history.start is not None
    assert history.start.num_iterations == 3


def test_a_folder_without_records_has_an_empty_history(tmp_path: Path) -> None:
    history = read_history(tmp_path)
    assert history.start is None
    assert history.step == 0


def test_the_later_record_of_a_step_counts_after_a_kill(tmp_path: Path) -> None:
    lost = [*steps(1, 40, loss=3.0), made.validation_record(30, 30.0, 1.1), {"kind": "sample", "step": 30, "text": "x"}]
    again = [made.start_record(100.0, 20), *steps(21, 25, loss=2.0)]
    history = history_of(tmp_path, *lost, *again)
    assert [step.step for step in history.steps] == list(range(1, 26))
    assert [step.loss for step in history.steps[18:22]] == [3.0, 3.0, 2.0, 2.0]
    assert history.validations == ()
    assert history.samples == ()
    assert history.redone_steps == 20
    assert [step.start for step in history.steps[18:22]] == [0, 0, 1, 1]


def test_a_stop_or_end_that_was_gone_on_from_is_no_longer_how_the_run_ended(tmp_path: Path) -> None:
    stop = {"kind": "stop", "time": 5.0, "step": 5, "reason": "signal", "text": ""}
    history = history_of(tmp_path, *steps(1, 5), stop, made.start_record(9.0, 5))
    assert history.stop is None
    assert len(history.stops) == 1


def test_a_line_cut_by_a_kill_costs_itself_alone(tmp_path: Path) -> None:
    folder = made.write(tmp_path / "run", [made.start_record(0.0), *steps(1, 3)])
    cut = json.dumps(made.step_record(4, 4.0))[:57]
    after = json.dumps(made.start_record(9.0, 3)) + "\n" + json.dumps(made.step_record(4, 10.0)) + "\n" + '{"kind": "st'
    with (folder / RECORDS_NAME).open("a") as file:
        file.write(cut + after)
    history = read_history(folder)
    assert [step.step for step in history.steps] == [1, 2, 3, 4]
    assert len(history.starts) == 2
    assert history.unreadable_lines == 1
    assert "records damaged" in names(history)


def test_every_prefix_of_a_records_file_can_be_read(tmp_path: Path) -> None:
    folder = made.write(tmp_path / "run", [made.start_record(0.0), *steps(1, 2), made.validation_record(2, 2.0, 1.0)])
    whole = (folder / RECORDS_NAME).read_bytes()
    chooser = random.Random(0)
    for length in {0, 1, len(whole) - 1, *(chooser.randrange(len(whole)) for _ in range(60))}:
        (folder / RECORDS_NAME).write_bytes(whole[:length])
        assert read_history(folder).step <= 2


@pytest.mark.parametrize(
    "line", ["", "null", "[1]", '"text"', "{}", '{"kind": 3}', '{"kind": "step"}', "\x00\x00", "\ufffd"]
)
def test_strange_lines_do_no_harm(tmp_path: Path, line: str) -> None:
    folder = made.write(tmp_path / "run", [made.start_record(0.0), *steps(1, 2)])
    with (folder / RECORDS_NAME).open("a") as file:
        file.write(line + "\n" + json.dumps(made.step_record(3, 3.0)) + "\n")
    assert read_history(folder).step == 3


def test_figures_on_another_text_are_another_segment(tmp_path: Path) -> None:
    history = read_history(made.write_published(tmp_path))
    assert [v.segment for v in history.validations] == [0, 0, 1, 1]
    best = history.best_validation()
    assert best is not None
    assert best.val_bpb == 1.002


def test_figures_on_the_same_text_compare_though_the_training_text_changed(tmp_path: Path) -> None:
    before, after = made.validation_record(2, 2.0, 1.2, data="v"), made.validation_record(4, 4.0, 1.1, data="v")
    again = made.start_record(3.0, 2, data={"name": "other", "fingerprint": "0" * 64})
    history = history_of(tmp_path, *steps(1, 2), before, again, *steps(3, 4), after)
    assert [v.segment for v in history.validations] == [0, 0]
    assert history.starts[1].segment == 1


def test_figures_over_another_number_of_tokens_do_not_compare(tmp_path: Path) -> None:
    config = made.start_record(0.0)["config"] | {"occasions": {"eval_tokens": 5}}
    again = made.start_record(3.0, 2, config=config)
    figures = [made.validation_record(2, 2.0, 1.2, "v"), again, made.validation_record(4, 4.0, 1.1, "v")]
    assert [v.segment for v in history_of(tmp_path, *figures).validations] == [0, 1]


def test_a_resume_with_everything_the_same_changes_nothing(tmp_path: Path) -> None:
    config = made.start_record(0.0)["config"] | {"saving": {"save_every": 7}, "continuation": {"resume": "latest"}}
    history = history_of(tmp_path, *steps(1, 2), made.start_record(3.0, 2, config=config))
    assert history.starts[1].changes == ()
    assert names(history) == []


def test_runs_of_every_source_are_found_and_other_folders_are_not(tmp_path: Path) -> None:
    made.write(tmp_path / "base_checkpoints" / "d4", [])
    made.write(tmp_path / "chatsft_checkpoints" / "d4", [])
    (tmp_path / "base_checkpoints" / "imported" / "step_000060").mkdir(parents=True)
    (tmp_path / "base_checkpoints" / "empty").mkdir()
    (tmp_path / "data" / "text").mkdir(parents=True)
    found = {(place.source, place.tag) for place in find_runs(tmp_path)}
    assert found == {("base", "d4"), ("sft", "d4"), ("base", "imported")}


# Health


def test_a_healthy_run_has_nothing_wrong(tmp_path: Path) -> None:
    figures = [made.validation_record(step, float(step), 1.0 + 50 / step) for step in (100, 200, 300)]
    assert names(history_of(tmp_path, *steps(1, 300), *figures)) == []


@pytest.mark.parametrize(
    ("figures", "expected"),
    [([1.0, 1.1, 1.2], True), ([1.2, 1.1, 1.2], False), ([1.0, 1.1], False), ([1, 1.1, 1.1], False)],
)
def test_a_validation_figure_that_rises_twice_is_told(tmp_path: Path, figures: list[float], expected: bool) -> None:
    records = [made.validation_record(10 * n, 10.0 * n, figure) for n, figure in enumerate(figures, 1)]
    assert ("validation rises" in names(history_of(tmp_path, *records))) == expected


def test_a_rise_across_a_change_of_text_is_not_called_a_rise(tmp_path: Path) -> None:
    history = read_history(made.write_published(tmp_path))
    assert names(history) == ["text changed at step 10000"]
    (notice,) = health.notices(history)
    assert "do not compare" in notice.text


def test_a_rise_tells_where_from_and_to_and_names_causes(tmp_path: Path) -> None:
    position = {"pq_idx": 0, "rg_idx": 0, "epoch": 6}
    records = [made.validation_record(10 * n, 10.0 * n, 1 + n / 10) for n in range(4)]
    found = {n.name: n.text for n in health.notices(history_of(tmp_path, *steps(1, 30, position=position), *records))}
    assert "from 1.0000 at step 0 to 1.3000 at step 30" in found["validation rises"]
    assert "by heart (pass 6 over it)" in found["validation rises"]
    assert "beyond about 4 passes" in found["text repeated many times"]


def test_the_second_pass_over_a_text_is_told_with_how_often_it_will_be_read(tmp_path: Path) -> None:
    data = made.start_record(0.0)["data"] | {"tokens": 6 * made.BATCH}
    values = {
        "position": {"pq_idx": 0, "rg_idx": 0, "epoch": 2},
        "tokens_read": 10 * made.BATCH,
        "tokens_lost": made.BATCH * 4,
    }
    history = history_of(tmp_path, *steps(1, 6, **values), data=data, num_iterations=9)
    (notice,) = health.notices(history)
    assert notice.name == "text repeated"
    assert "pass 2" in notice.text
    assert "2.5 times at the end" in notice.text
    assert "throws 40% of the tokens away" in notice.text


def test_documents_that_wait_to_be_packed_do_not_make_a_second_pass(tmp_path: Path) -> None:
    data = made.start_record(0.0)["data"] | {"tokens": 100 * made.BATCH}
    ahead = {"position": {"pq_idx": 0, "rg_idx": 0, "epoch": 2}, "tokens_read": 10 * made.BATCH, "tokens_lost": 0}
    assert names(history_of(tmp_path, *steps(1, 6, **ahead), data=data)) == []


def test_a_jump_of_the_loss_is_told_and_whether_it_came_down(tmp_path: Path) -> None:
    jump = [made.step_record(step, float(step), loss=6.0 if step == 200 else 3.18) for step in range(1, 350)]
    (notice,) = health.notices(history_of(tmp_path, *jump))
    assert notice.name == "loss spike"
    assert notice.step == 200
    assert "has come down since" in notice.text


def test_a_jump_that_stays_is_told_as_such(tmp_path: Path) -> None:
    jump = [made.step_record(step, float(step), loss=3.18 if step < 200 else 4.5) for step in range(1, 350)]
    (notice,) = health.notices(history_of(tmp_path, *jump))
    assert "has not come down since" in notice.text
    assert notice.step == 200


def test_the_scatter_of_small_batches_is_no_jump(tmp_path: Path) -> None:
    chooser = random.Random(1)
    losses = [4 + 5 * math.exp(-step / 50) + chooser.gauss(0, 0.3) for step in range(3000)]
    records = [made.step_record(step + 1, float(step), loss=loss) for step, loss in enumerate(losses)]
    assert names(history_of(tmp_path, *records)) == []


def test_a_resume_on_another_text_is_a_change_and_not_a_jump(tmp_path: Path) -> None:
    again = made.start_record(300.0, 200, data={"name": "other", "fingerprint": "0" * 64})
    history = history_of(tmp_path, *steps(1, 200, loss=3.0), again, *steps(201, 400, loss=4.5))
    assert names(history) == ["text changed at step 200"]


def test_training_that_diverged_is_told_with_causes(tmp_path: Path) -> None:
    stop = {"kind": "stop", "time": 9.0, "step": 7, "reason": "not finite", "text": "the loss of step 7 is nan"}
    (notice,) = health.notices(history_of(tmp_path, *steps(1, 7), stop, dtype="float16"))
    assert notice.name == "not finite"
    assert "float16" in notice.text
    assert "learning rates" in notice.text


def test_steps_that_became_slower_are_told(tmp_path: Path) -> None:
    history = history_of(tmp_path, *steps(1, 200, seconds=1.0), *steps(201, 310, seconds=1.5))
    assert names(history) == ["slower"]


def test_other_settings_after_a_resume_are_told(tmp_path: Path) -> None:
    config = made.start_record(0.0)["config"]
    again = made.start_record(3.0, 2, config=config | {"rates": config["rates"] | {"matrix_lr": 0.01}})
    (notice,) = health.notices(history_of(tmp_path, *steps(1, 2), again))
    assert notice.name == "settings changed at step 2"
    assert "matrix-lr 0.02 before, 0.01 now" in notice.text


def test_each_notice_is_new_once(tmp_path: Path) -> None:
    figures = [made.validation_record(10 * n, 10.0 * n, 1 + n / 10) for n in range(4)]
    history = history_of(tmp_path, *steps(1, 30), *figures)
    (new,) = health.new_notices(history)
    said = {"kind": "notice", "time": 31.0, "step": 30, "name": new.name, "text": new.text}
    assert health.new_notices(history_of(tmp_path, *steps(1, 30), *figures, said)) == []


# Curve and report


def test_the_thinned_curve_keeps_the_highest_and_lowest_loss(tmp_path: Path) -> None:
    records = [made.step_record(step, 0.0, loss=9.0 if step == 4321 else 3.0 + step % 7) for step in range(1, 9001)]
    at, losses = curve.thinned(history_of(tmp_path, *records).steps)
    assert len(at) <= curve.MAX_POINTS
    assert (4321, 9.0) in zip(at, losses, strict=True)
    assert max(losses) == 9.0
    assert min(losses) == 3.0


def test_the_moving_mean_of_a_short_run_is_the_loss(tmp_path: Path) -> None:
    history = history_of(tmp_path, *steps(1, 5))
    at, means = curve.moving_mean(history.steps)
    assert at == [1, 2, 3, 4, 5]
    assert means == pytest.approx([made.loss_at(step) for step in at])


@pytest.mark.parametrize("records", [[], list(steps(1, 1)), [*steps(1, 3, loss=math.nan)], [*steps(1, 3, loss=None)]])
def test_a_run_of_hardly_anything_has_a_report(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    folder = made.write(tmp_path / "base_checkpoints" / "d4", [made.start_record(time.time()), *records])
    written = report.write(folder)
    assert written.picture is not None
    assert written.picture.read_bytes().startswith(PNG)
    assert written.page.read_text(encoding="utf-8").startswith("# d4 (base)")


def test_the_report_is_one_page_with_the_figures_and_where_they_came_from(tmp_path: Path) -> None:
    folder = made.write_published(tmp_path)
    report.write(folder, made.published_time())
    page = (folder / "report.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) < 100
    for part in ("35,729 of 87,000", "| 30,000 | 1.0020 **best** |", "not comparable", "](loss.png)", "python 3.11.9"):
        assert part in page
    assert (folder / "loss.png").read_bytes().startswith(PNG)
    assert sorted(path.name for path in folder.glob("[.lr]*")) == ["loss.png", RECORDS_NAME, "report.md"]


def test_curves_before_and_after_a_change_of_text_are_separate(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    loss, validation = Figure().subplots(2, 1)
    history = read_history(made.write_published(tmp_path))
    curve.draw_loss(loss, history)
    curve.draw_validation(validation, history)
    assert [line.get_label() for line in loss.lines[1::2]] == ["fineweb-edu (f1e0f1e0)", "climbmix (c11bc11b)"]
    assert [list(line.get_xdata()) for line in validation.lines] == [[0, 10_000], [20_000, 30_000]]


def test_without_matplotlib_the_page_is_written_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return load(name, *rest)

    made.write_published(tmp_path)
    monkeypatch.setattr(builtins, "__import__", refuse)
    result = report_stage.run(ReportConfig(), Context(tmp_path, Terminal()))
    assert result.values["picture"] is None
    assert "pip install matplotlib" in result.text
    assert "![" not in Path(result.values["report"]).read_text(encoding="utf-8")


def test_a_report_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    folder = made.write_published(tmp_path)
    (folder / "report.md").mkdir()
    with pytest.raises(UserError, match="cannot be written there"):
        report.write(folder)
    assert not list(folder.glob(".*"))


def test_the_commands_that_watch_load_nothing_heavy() -> None:
    modules = [f"nanochat.stages.{name}" for name in ("status", "runs", "report", "attach")]
    code = (
        f"import sys, {', '.join(modules)};"
        "print([m for m in ('torch', 'numpy', 'pyarrow', 'matplotlib', 'tyro') if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "['tyro']"
