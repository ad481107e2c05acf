"""A run's records read back: what happened, in order, whatever killed it in between.

A run may have several starts. One that was resumed from step S makes everything recorded after S
before it void: that work was lost and is done again, so the later record counts. Records that are
cut short are skipped, fields that are absent are ``None``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nanochat.errors import UserError
from nanochat.paths import CHECKPOINT_FOLDERS, Source
from nanochat.records import RECORDS_NAME
from nanochat.watching.events import (
    MEASURE_CHANGES,
    TEXT_CHANGES,
    Record,
    Start,
    Step,
    Validation,
    changes,
    number,
)


@dataclass(frozen=True)
class RunHistory:
    """Everything recorded of one run that still counts."""

    folder: Path
    source: Source
    tag: str
    starts: tuple[Start, ...] = ()
    steps: tuple[Step, ...] = ()
    validations: tuple[Validation, ...] = ()
    samples: tuple[Record, ...] = ()
    saves: tuple[Record, ...] = ()
    notices: tuple[Record, ...] = ()
    #: Every stop, also those that were resumed from.
    stops: tuple[Record, ...] = ()
    #: How the latest start ended; None while it has not.
    stop: Record | None = None
    end: Record | None = None
    #: When the run last told of itself.
    last_time: float | None = None
    #: Updates that were recorded, lost, and done again.
    redone_steps: int = 0
    #: Lines of the records that could not be read.
    unreadable_lines: int = 0
    _: dataclasses.KW_ONLY

    @property
    def start(self) -> Start | None:
        """The latest start."""
        return self.starts[-1] if self.starts else None

    @property
    def last_step(self) -> Step | None:
        return self.steps[-1] if self.steps else None

    @property
    def step(self) -> int:
        """Updates done."""
        return self.steps[-1].step if self.steps else self.starts[-1].step if self.starts else 0

    @functools.cached_property
    def latest_steps(self) -> tuple[Step, ...]:
        """The steps of the latest start."""
        first = len(self.steps)
        while first and self.steps[first - 1].start == len(self.starts) - 1:
            first -= 1
        return self.steps[first:]

    def best_validation(self, segment: int | None = None) -> Validation | None:
        """The lowest figure; of one segment, the present one when not given."""
        segment = self.validations[-1].segment if segment is None and self.validations else segment
        known = [v for v in self.validations if v.segment == segment and v.val_bpb is not None]
        return min(known, key=lambda v: v.val_bpb if v.val_bpb is not None else math.inf, default=None)


@dataclass(frozen=True)
class RunPlace:
    """Where a run lies."""

    source: Source
    tag: str
    folder: Path

    @property
    def last_written(self) -> float:
        """When its records, else its folder, changed last; in unix seconds."""
        path = self.folder / RECORDS_NAME
        return (path if path.exists() else self.folder).stat().st_mtime


def find_runs(base: Path) -> list[RunPlace]:
    """Every folder under ``base`` that holds records or saved steps, the latest first."""
    found = [
        RunPlace(source, folder.name, folder)
        for source, name in CHECKPOINT_FOLDERS.items()
        if (base / name).is_dir()
        for folder in (base / name).iterdir()
        if folder.is_dir()
        and not folder.name.startswith(".")
        and ((folder / RECORDS_NAME).exists() or any(folder.glob("step_*")))
    ]
    return sorted(found, key=lambda place: place.last_written, reverse=True)


def find_run(base: Path, tag: str | None = None, source: Source | None = None) -> RunPlace:
    """The run that is meant: of that name and source, the one that told of itself last.

    Raises:
        UserError: when there is none, listing what there is.
    """
    runs = find_runs(base)
    for place in runs:
        if tag in (None, place.tag) and source in (None, place.source):
            return place
    if not runs:
        raise UserError(f"there is no run in {base}: start one with `nanochat pretrain`")
    there = ", ".join(f"{place.tag} ({place.source})" for place in runs)
    wanted = " ".join(word for word in (source, "run", repr(tag) if tag is not None else None) if word)
    raise UserError(f"there is no {wanted} in {base}: there are {there}")


def read_history(folder: Path) -> RunHistory:
    """The history of the run in ``folder``; without any start when it has no records."""
    reader = _Reader()
    unreadable = 0
    for record in read_lines(folder / RECORDS_NAME):
        if record is None:
            unreadable += 1
        else:
            reader.take(record)
    source: Source = next((s for s, name in CHECKPOINT_FOLDERS.items() if name == folder.parent.name), "base")
    return RunHistory(
        folder=folder,
        source=source,
        tag=folder.name,
        starts=tuple(reader.starts),
        steps=tuple(reader.steps),
        validations=tuple(reader.validations),
        samples=tuple(reader.samples),
        saves=tuple(reader.saves),
        notices=tuple(reader.notices),
        stops=tuple(reader.stops),
        stop=reader.stop,
        end=reader.end,
        last_time=reader.last_time,
        redone_steps=reader.redone_steps,
        unreadable_lines=unreadable,
    )


def read_lines(path: Path) -> Iterator[Record | None]:
    """The records in ``path``; None for a line that is none.

    A process that was killed while it wrote leaves a line without an end, on which its successor's
    first record goes on: that record is found. The last line may still be being written.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            record = _parse(line)
            if record is None and (begin := line.rfind('{"kind"')) > 0:
                yield None
                record = _parse(line[begin:])
            if record is not None or line.endswith("\n"):
                yield record


def _parse(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


class _Reader:
    """Takes records one by one, as they were written."""

    def __init__(self) -> None:
        self.starts: list[Start] = []
        self.steps: list[Step] = []
        self.validations: list[Validation] = []
        self.samples: list[Record] = []
        self.saves: list[Record] = []
        self.notices: list[Record] = []
        self.stops: list[Record] = []
        self.stop: Record | None = None
        self.end: Record | None = None
        self.last_time: float | None = None
        self.redone_steps = 0

    def take(self, record: Record) -> None:
        time = number(record.get("time"))
        if time is not None:
            self.last_time = time if self.last_time is None else max(self.last_time, time)
        match record["kind"]:
            case "start":
                self._start(record, time or 0.0)
            case "step":
                self._step(record, time or 0.0)
            case "validation":
                self._validation(record, time or 0.0)
            case "sample":
                self.samples.append(record)
            case "save":
                self.saves.append(record)
            case "notice":
                self.notices.append(record)
            case "stop":
                self.stops.append(record)
                self.stop = record
            case "end":
                self.end = record

    def _start(self, record: Record, time: float) -> None:
        step = int(number(record.get("step")) or 0)
        start = Start(time, step, bool(record.get("resumed")), record)
        if self.starts and not start.resumed:  # a new run of the same tag: what is before it is another one's
            last_time = self.last_time
            self.__init__()  # type: ignore[misc]
            self.last_time = last_time
        self.stop = self.end = None
        if self.starts:
            changed = changes(self.starts[-1], start)
            broken = any(change.name in TEXT_CHANGES for change in changed)
            start = dataclasses.replace(start, changes=changed, segment=self.starts[-1].segment + broken)
        self._forget_after(step)
        self.starts.append(start)

    def _forget_after(self, step: int) -> None:
        """What was done after ``step`` was lost."""
        kept = len(self.steps)
        while kept and self.steps[kept - 1].step > step:
            kept -= 1
        self.redone_steps += len(self.steps) - kept
        del self.steps[kept:]
        self.validations = [validation for validation in self.validations if validation.step <= step]
        self.samples = [sample for sample in self.samples if (number(sample.get("step")) or 0) <= step]

    def _step(self, record: Record, time: float) -> None:
        values = {name: number(record.get(name)) for name in _STEP_NUMBERS}
        step = int(number(record.get("step")) or 0)
        if self.steps and self.steps[-1].step >= step:
            self._forget_after(step - 1)
        if values["training_seconds"] is None and values["seconds"] is not None:  # records of the first version
            before = self.steps[-1].training_seconds if self.steps else 0.0
            values["training_seconds"] = None if before is None else before + values["seconds"]
        position, positions = (_mapping(record.get(name)) for name in ("position", "positions"))
        start = max(0, len(self.starts) - 1)
        self.steps.append(Step(step, time, start, position=position, positions=positions, **values))

    def _validation(self, record: Record, time: float) -> None:
        step, text = int(number(record.get("step")) or 0), record.get("data")
        new = Validation(step, time, len(self.starts) - 1, number(record.get("val_bpb")), text, segment=0)
        while self.validations and self.validations[-1].step >= step:  # measured again
            self.validations.pop()
        if self.validations:
            last = self.validations[-1]
            new = dataclasses.replace(new, segment=last.segment + (not self._comparable(last, new)))
        self.validations.append(new)

    def _comparable(self, one: Validation, other: Validation) -> bool:
        """Whether two figures were measured on the same text in the same way."""
        broken = {change.name for start in self.starts[one.start + 1 : other.start + 1] for change in start.changes}
        if one.data is not None and other.data is not None:
            return one.data == other.data and not broken & MEASURE_CHANGES
        return not broken & (TEXT_CHANGES | MEASURE_CHANGES)


def _mapping(value: object) -> Record | None:
    return value if isinstance(value, dict) else None


_STEP_NUMBERS = (
    *("loss", "smooth_loss", "lr_multiplier", "tokens", "seconds", "training_seconds"),
    *("tokens_read", "tokens_lost", "memory_bytes"),
)
