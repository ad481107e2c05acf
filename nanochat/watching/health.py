"""What looks wrong with a run, in words, with likely causes. Pure functions: a history in, notices out.

A notice is known by its name, so that whoever says it can see that it was said: see :func:`new_notices`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanochat.watching.events import Step, number
from nanochat.watching.figures import measure_pace, non_finite_steps
from nanochat.watching.history import RunHistory
from nanochat.watching.text_use import passes_begun, text_use
from nanochat.watching.words import count, times

#: A loss is a spike when it is this many mean deviations, and this share, above the running mean ...
SPIKE_DEVIATIONS = 8.0
SPIKE_SHARE = 0.05
#: ... which forgets over about this many steps, and is trusted after as many.
SPIKE_MEMORY_STEPS = 50
#: How long after a spike the loss may take to come down again.
RECOVERY_STEPS = 100
#: Up to about four passes over a text are worth almost as much as fresh text (Muennighoff et al. 2023).
WORTHWHILE_PASSES = 4
#: Share of tokens lost in packing from which it is named among the causes of repetition.
LOSSY_SHARE = 0.1
#: Slowdown within one start from which it is told.
SLOW_SHARE = 0.25


@dataclass(frozen=True)
class Notice:
    """Something that looks wrong: a name for programs, a sentence for people, the step it was seen at."""

    name: str
    step: int
    text: str


def notices(history: RunHistory) -> list[Notice]:
    """Everything that looks wrong, as the run stands now."""
    found = [check(history) for check in _CHECKS]
    return [notice for notice in found if notice is not None] + changed_settings(history)


def new_notices(history: RunHistory) -> list[Notice]:
    """Those that the run's records do not hold yet."""
    said = {notice.get("name") for notice in history.notices}
    return [notice for notice in notices(history) if notice.name not in said]


def non_finite(history: RunHistory) -> Notice | None:
    """A loss or gradient that is not finite."""
    num_steps = non_finite_steps(history)
    if not num_steps:
        return None
    start = history.start
    half = start is not None and start.get("dtype") == "float16"
    causes = "learning rates that are too high, a damaged text, or faulty memory of the machine"
    if half:
        causes = "float16, whose largest number is 65,504, " + causes
    where = next((s.step for s in history.steps if s.loss is not None and not math.isfinite(s.loss)), history.step)
    return Notice(
        "not finite",
        where,
        f"{num_steps} {'update' if num_steps == 1 else 'updates'} had a loss or gradient that is not finite, first at"
        f" step {where:,}; likely causes: {causes}; go on from a checkpoint before it, with lower rates",
    )


def rising_validation(history: RunHistory) -> Notice | None:
    """The validation figure rose twice in a row, on the same text."""
    figures = [v for v in history.validations if v.val_bpb is not None]
    rises = 0
    while rises + 1 < len(figures):
        one, other = figures[-2 - rises], figures[-1 - rises]
        if one.segment != other.segment or (other.val_bpb or 0.0) <= (one.val_bpb or 0.0):
            break
        rises += 1
    if rises < 2:
        return None
    low, last = figures[-1 - rises], figures[-1]
    causes = []
    passes = passes_begun(history)
    if passes is not None and passes > 1:
        causes.append(f"the model learns its text by heart (pass {passes} over it)")
    causes.append("rates that are too high")
    causes.append("training text that grows unlike the validation text")
    return Notice(
        "validation rises",
        last.step,
        f"bits per byte of the validation text rose at the last {rises} evaluations, from {low.val_bpb:.4f} at step"
        f" {low.step:,} to {last.val_bpb:.4f} at step {last.step:,}; likely causes: {', or '.join(causes)}",
    )


def repeated_text(history: RunHistory) -> Notice | None:
    """The text is read again; under another name from the point on where that teaches little."""
    use, passes = text_use(history), passes_begun(history)
    if passes is None or passes < 2:
        return None
    text = f"pass {passes} over its text"
    if use.available is not None:
        text += f" of about {count(use.available)} tokens"
    if use.planned_passes is not None and use.planned_passes > 1 and history.end is None:
        text += f" (read {times(use.planned_passes)} at the end)"
    limit = f"about {WORTHWHILE_PASSES} passes"
    many = passes > WORTHWHILE_PASSES
    if many:
        text += f": beyond {limit} a text teaches little more and is learnt by heart; more text or fewer steps help"
    else:
        text += f": up to {limit} are worth almost as much as fresh text"
    if use.lost_share is not None and use.lost_share > LOSSY_SHARE:
        text += f"; packing throws {use.lost_share:.0%} of the tokens away, --packing keep loses under 1 %"
    return Notice("text repeated many times" if many else "text repeated", history.step, text)


def loss_spike(history: RunHistory) -> Notice | None:
    """The latest jump of the loss far above its usual scatter."""
    spike = _last_spike(history.steps)
    if spike is None:
        return None
    step, mean, came_down = spike
    after = {
        True: "it has come down since",
        False: "and it has not come down since: go back to a checkpoint before it",
        None: "whether it comes down again will show",
    }[came_down]
    return Notice(
        "loss spike",
        step.step,
        f"the loss jumped from about {mean:.3f} to {step.loss:.3f} nats a token at step {step.step:,}; {after}; likely"
        " causes: rates that are too high, too short a warm-up, or a stretch of odd text",
    )


def _last_spike(steps: Sequence[Step]) -> tuple[Step, float, bool | None] | None:
    """The last spike, the mean before it, and whether the loss came down again (None: too early to tell)."""
    finite = [step for step in steps if step.loss is not None and math.isfinite(step.loss)]
    spike: tuple[int, float] | None = None
    mean = deviation = 0.0
    seen, start = 0, -1
    for index, step in enumerate(finite):
        loss = step.loss or 0.0
        if step.start != start:  # another start may read another text
            start, seen, mean, deviation = step.start, 0, loss, 0.0
        limit = max(SPIKE_DEVIATIONS * deviation, SPIKE_SHARE * mean)
        if seen > SPIKE_MEMORY_STEPS and loss - mean > limit:
            if spike is None or index > spike[0] + RECOVERY_STEPS:
                spike = index, mean
            loss = mean + limit  # so that it hardly moves the mean
        weight = 1 / min(seen + 1, SPIKE_MEMORY_STEPS)
        deviation += weight * (abs(loss - mean) - deviation)
        mean += weight * (loss - mean)
        seen += 1
    if spike is None:
        return None
    index, before = spike
    after = finite[index + 1 : index + 1 + RECOVERY_STEPS]
    came_down = any((step.loss or 0.0) <= before * (1 + SPIKE_SHARE / 2) for step in after)
    return finite[index], before, True if came_down else False if len(after) == RECOVERY_STEPS else None


def slower(history: RunHistory) -> Notice | None:
    """The steps take longer than earlier in the same start."""
    pace = measure_pace(history)
    if pace is None or pace.slowdown is None or pace.slowdown < SLOW_SHARE:
        return None
    return Notice(
        "slower",
        history.step,
        f"steps are {pace.slowdown:.0%} slower than earlier in this start; likely causes: another program on the"
        " device, heat, or memory that is being swapped",
    )


def changed_settings(history: RunHistory) -> list[Notice]:
    """Starts that went on with another text, tokenizer or setting."""
    found = []
    for start in history.starts:
        breaking = [str(change) for change in start.changes if change.breaks_curve]
        others = [str(change) for change in start.changes if not change.breaks_curve]
        if breaking:
            text = (
                f"resumed at step {start.step:,} with a change ({'; '.join(breaking)}): figures before and after were"
            )
            text += " measured differently and do not compare"
            found.append(Notice(f"text changed at step {start.step}", start.step, text))
        if others:
            text = f"resumed at step {start.step:,} with other settings: {'; '.join(others)}"
            found.append(Notice(f"settings changed at step {start.step}", start.step, text))
    return found


def unreadable(history: RunHistory) -> Notice | None:
    """Records that were cut short."""
    if not history.unreadable_lines:
        return None
    return Notice(
        "records damaged",
        history.step,
        f"{history.unreadable_lines} records could not be read, as after a kill or a full disk; the others count",
    )


_CHECKS: tuple[Callable[[RunHistory], Notice | None], ...] = (
    *(non_finite, rising_validation, repeated_text, loss_spike, slower, unreadable),
)


def recorded(history: RunHistory) -> list[Notice]:
    """What the run itself said, as it was recorded."""
    return [
        Notice(str(record.get("name")), int(number(record.get("step")) or 0), str(record.get("text", "")))
        for record in history.notices
    ]
