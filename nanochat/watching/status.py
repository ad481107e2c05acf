"""How a run stands, line by line: what is known, and n/a with the reason for what is not."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanochat.watching import health
from nanochat.watching.events import number
from nanochat.watching.figures import State, measure_pace, non_finite_steps, remaining, saved_steps, state, utilization
from nanochat.watching.history import RunHistory
from nanochat.watching.settings import describe_model, describe_settings
from nanochat.watching.text_use import epoch, passes_begun, text_use
from nanochat.watching.values import values_of, values_without_start
from nanochat.watching.words import count, duration, moment, size, times

#: Steps over which the range of the loss is told.
LOSS_STEPS = 50
NO_STEP = "n/a (no step is done yet)"


@dataclass(frozen=True)
class Line:
    """One line: a label, and a value that may have several rows."""

    label: str
    value: str


@dataclass(frozen=True)
class Status:
    """A run's status as lines by section, and as values for programs."""

    title: str
    state: State
    sections: dict[str, list[Line]]
    values: dict[str, Any] = field(repr=False)

    def value(self, label: str) -> str:
        """The line of that label."""
        return next(line.value for lines in self.sections.values() for line in lines if line.label == label)


def describe(history: RunHistory, now: float | None = None) -> Status:
    """The status of a run at ``now`` (unix seconds; this moment when not given)."""
    now = time.time() if now is None else now
    stands = state(history, now)
    title = f"{history.tag} ({history.source})"
    if history.start is None:
        sections = {"run": [Line("state", stands.text), Line("folder", str(history.folder)), _checkpoints(history)]}
        return Status(title, stands, sections, values_without_start(history, stands))
    sections = {
        "run": _run_lines(history, stands, now),
        "model": [
            Line("model", describe_model(history.start)),
            *(Line(label, value) for label, value in describe_settings(history.start).items()),
        ],
        "text": _text_lines(history),
        "learning": _learning_lines(history),
        "machine": _machine_lines(history),
        "outlook": _outlook_lines(history),
    }
    return Status(title, stands, sections, values_of(history, stands, now))


def _run_lines(history: RunHistory, stands: State, now: float) -> list[Line]:
    start, last, left = history.start, history.last_step, remaining(history)
    assert start is not None
    total = start.num_iterations
    progress = f"{history.step:,} (how many there will be is not known beforehand)"
    if total:
        progress = f"{history.step:,} of {total:,} ({history.step / total:.2%})"
    until = now if stands.name == "running" else history.last_time or now
    trained = last.training_seconds if last else 0.0
    lines = [
        Line("state", stands.text if stands.text.startswith(stands.name) else f"{stands.name}: {stands.text}"),
        Line("step", progress),
        Line("started", _started(history)),
        Line("since this start", f"{duration(max(0.0, until - start.time))} of wall time"),
        Line("training time", "n/a (not recorded)" if trained is None else f"{duration(trained)}, all starts together"),
        Line("left", "n/a (the number of steps is not known beforehand)" if left is None else NO_STEP),
    ]
    if stands.name == "finished":
        lines[-1] = Line("left", f"nothing; ended {moment(history.last_time or now)}")
    elif left is not None and left.training_seconds is not None and left.wall_seconds is not None:
        text = f"{duration(left.training_seconds)} of training at the present pace"
        if stands.name == "running":
            text += f"; with pauses as so far, the end is at {moment((history.last_time or now) + left.wall_seconds)}"
        lines[-1] = Line("left", text)
    if stands.name in ("stopped", "died") and saved_steps(history):
        lines.append(Line("continue", command_to_continue(history)))
    return [*lines, Line("folder", str(history.folder))]


def command_to_continue(history: RunHistory) -> str:
    """What to type to go on with a run from its newest save."""
    return f"nanochat {'pretrain' if history.source == 'base' else history.source} --model-tag {history.tag} --resume"


def _started(history: RunHistory) -> str:
    first, latest = history.starts[0], history.starts[-1]
    text = moment(first.time)
    if latest.resumed:
        again = len(history.starts) - 1
        text += f"; resumed {f'{again} times' if again > 1 else 'once'}, lastly from step {latest.step:,}"
        text += f" at {moment(latest.time)}"
    if history.redone_steps:
        text += f"; {history.redone_steps:,} steps were lost and done again"
    parent = latest.get("parent")
    if isinstance(parent, Mapping):
        text += f"; from {parent.get('source')} {parent.get('tag')} step {parent.get('step')}"
    elif isinstance(parent, str):
        text += f"; from {parent}"
    return text


def _text_lines(history: RunHistory) -> list[Line]:
    start, last, use = history.start, history.last_step, text_use(history)
    assert start is not None
    name, num_bytes, shards = (
        start.get("data", "name"),
        start.number("data", "text_bytes"),
        start.number("data", "shards"),
    )
    about = "" if start.get("data", "tokens_exact") else "about "
    parts = [str(name)] if name else [start.text or "n/a (not recorded)"]
    parts += [size(num_bytes)] if num_bytes else []
    parts += [f"{shards:,.0f} {'shard' if shards == 1 else 'shards'}"] if shards else []
    parts += [f"{about}{count(use.available)} tokens"] if use.available else []
    share = "n/a (how many tokens the text has is not known)"
    if use.passes is not None:
        share = f"{use.passes:.2%} so far" if use.passes <= 1 else f"read {times(use.passes)} so far"
        share += " since the text changed" if use.trained_before else ""
        if use.planned_passes is not None and history.end is None:
            share += f"; {_share_at_end(use.planned_passes)}"
    trained = NO_STEP if use.trained is None or last is None else f"{count(use.trained)} trained"
    if use.planned is not None and last is not None:
        trained += f" of {count(use.planned)}"
    read = "n/a (not recorded)"
    if use.read is not None:
        read = f"{count(use.read)} tokens"
        if use.lost is not None and use.lost_share is not None:
            read += f", of which packing lost {count(use.lost)} ({use.lost_share:.1%})"
        read += " since the text changed" if use.trained_before else ""
    packing = start.get("packing")
    return [
        Line("text", ", ".join(parts)),
        Line("share used", share),
        Line("tokens", trained),
        Line("text read", read + (f"; packing {packing}" if packing else "")),
        Line("position", _position(history)),
        Line("epoch", _epoch(history)),
    ]


def _epoch(history: RunHistory) -> str:
    fetched, begun = epoch(history), passes_begun(history)
    if begun is None:
        return "n/a (not recorded)"
    return f"{begun}" if fetched in (None, begun) else f"{begun} (documents are fetched ahead, from pass {fetched})"


def _share_at_end(passes: float) -> str:
    return f"{passes:.0%} at the end" if passes <= 1 else f"read {times(passes)} at the end"


def _position(history: RunHistory) -> str:
    """Shard and row group, counted from 1; of each source when there are several."""
    last, start = history.last_step, history.start
    if last is None or start is None:
        return NO_STEP
    sources = start.get("data", "sources")
    if not isinstance(sources, list):
        return _place(last.position, start.number("data", "shards"))
    if last.positions is None:
        return f"{_place(last.position, None)} of the source that is read fastest"
    shards = {source.get("name"): source.get("shards") for source in sources if isinstance(source, Mapping)}
    return "\n".join(
        f"{name}: {_place(place, number(shards.get(name)))}, epoch {place.get('epoch', 'n/a')}"
        for name, place in last.positions.items()
        if isinstance(place, Mapping)
    )


def _place(position: Mapping[str, Any] | None, shards: float | None) -> str:
    shard, group = (number(position.get(name)) if position else None for name in ("pq_idx", "rg_idx"))
    if shard is None:
        return "n/a (not recorded)"
    text = f"shard {shard + 1:,.0f}" + (f" of {shards:,.0f}" if shards else "")
    return text + (f", row group {group + 1:,.0f}" if group is not None else "")


def _learning_lines(history: RunHistory) -> list[Line]:
    last = history.last_step
    losses = [s.loss for s in history.steps[-LOSS_STEPS:] if s.loss is not None and math.isfinite(s.loss)]
    loss = NO_STEP
    if last is not None and losses:
        smooth = f"{last.smooth_loss:.4f} smoothed, " if last.smooth_loss is not None else ""
        among = f"{min(losses):.2f} to {max(losses):.2f} over the last {len(losses):,} steps"
        loss = f"{losses[-1]:.4f} nats per token ({smooth}{among})"
        loss += "\nof this tokenizer and this text: it stands beside no bits per byte and no other tokenizer's loss"
    rate = NO_STEP if last is None or last.lr_multiplier is None else f"now {last.lr_multiplier:.1%} of the full rates"
    bad = non_finite_steps(history)
    return [
        Line("loss", loss),
        Line("validation", _validation(history)),
        Line("trajectory", trajectory(history)),
        Line("rate", rate),
        Line("not finite", "no step" if not bad else f"{bad:,} {'step' if bad == 1 else 'steps'}"),
    ]


def _validation(history: RunHistory) -> str:
    """Best and last; a best on other text is told apart."""
    known = [v for v in history.validations if v.val_bpb is not None]
    if not known:
        return "n/a (not measured yet)"
    last, best = known[-1], history.best_validation(known[-1].segment)
    assert best is not None
    text = f"last {last.val_bpb:.4f} at step {last.step:,}, best {best.val_bpb:.4f} at step {best.step:,}"
    text += " (bits per byte of the answers)" if history.source == "sft" else " (bits per byte)"
    for segment in range(last.segment):
        if (earlier := history.best_validation(segment)) is not None:
            text += (
                f"\nbest {earlier.val_bpb:.4f} at step {earlier.step:,} on the text before: other text, not comparable"
            )
    return text


def trajectory(history: RunHistory, per_row: int = 6) -> str:
    """Every validation figure with its step; a row begins where the text changed."""
    rows: list[str] = []
    best = {v.segment: history.best_validation(v.segment) for v in history.validations}
    cells: list[str] = []
    for index, figure in enumerate(history.validations):
        if index and figure.segment != history.validations[index - 1].segment:
            rows.append("  ".join(cells))
            rows.append(f"- another text from step {history.starts[figure.start].step:,} on -")
            cells = []
        shown = "n/a" if figure.val_bpb is None else f"{figure.val_bpb:.4f}"
        cells.append(f"{figure.step:,}: {shown}{' best' if figure is best[figure.segment] else ''}")
        if len(cells) == per_row:
            rows.append("  ".join(cells))
            cells = []
    rows += ["  ".join(cells)] if cells else []
    return "\n".join(rows) or "n/a (not measured yet)"


def _machine_lines(history: RunHistory) -> list[Line]:
    pace, last = measure_pace(history), history.last_step
    speed = NO_STEP
    if pace is not None:
        speed = f"{pace.tokens_per_second:,.0f} tokens/s, " if pace.tokens_per_second is not None else ""
        speed += f"{pace.step_seconds * 1000:,.0f} ms a step"
    memory = "n/a (the device does not tell)" if last is not None else NO_STEP
    if last is not None and last.memory_bytes:
        memory = f"{size(last.memory_bytes)} at most"
    return [
        Line("speed", speed),
        Line("steadiness", pace.steadiness if pace is not None else NO_STEP),
        Line("MFU", utilization(history).text),
        Line("memory", memory),
        _checkpoints(history),
    ]


def _checkpoints(history: RunHistory) -> Line:
    saves = saved_steps(history)
    if not saves:
        return Line("checkpoints", "none yet")
    steps = [
        f"{save['step']:,}{' (recovery)' if save['recovery'] else ''}" for save in saves if save["step"] is not None
    ]
    shown = ", ".join(steps if len(steps) <= 8 else [*steps[:3], "…", *steps[-4:]])
    total = sum(save["bytes"] for save in saves)
    return Line("checkpoints", f"{len(saves)} ({size(total)}): {'steps' if len(saves) > 1 else 'step'} {shown}")


def _outlook_lines(history: RunHistory) -> list[Line]:
    found = health.notices(history)
    names = {notice.name for notice in found}
    found += [notice for notice in health.recorded(history) if notice.name not in names]
    wrong = "\n".join(f"- {notice.text}" for notice in found)
    return [
        Line("looks wrong", wrong or "nothing"),
        Line("expect", "n/a (the plan cannot tell yet what a model of this size will be able to do)"),
    ]
