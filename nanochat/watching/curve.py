"""The loss curve of a run as a picture: training loss and validation figure, each in a panel of its own.

What was measured on different text is drawn as separate curves; every resume is marked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanochat.errors import UserError
from nanochat.watching.events import Step, Validation
from nanochat.watching.history import RunHistory
from nanochat.watching.words import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Points of a curve at most; more would lie on the same pixel.
MAX_POINTS = 1500
#: Share of the first steps that may lie above the picture, in runs of at least so many steps.
HIDDEN_SHARE = 0.02
LONG_RUN_STEPS = 200
#: Colours of the text in turn, readable for the colour-blind (Okabe and Ito 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
GREY = "#777777"


def draw(history: RunHistory, path: Path) -> None:
    """Write the picture to ``path`` as PNG.

    Raises:
        UserError: when matplotlib is not installed.
        OSError: when the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("loss curves are drawn with matplotlib: install it with `pip install matplotlib`") from None

    figure = Figure(figsize=(9, 6.6), dpi=120, layout="constrained")
    loss, validation = figure.subplots(2, 1, sharex=True)
    figure.suptitle(_title(history), fontsize=11)
    draw_loss(loss, history)
    draw_validation(validation, history)
    for axes in (loss, validation):
        axes.grid(color="#e6e6e6", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        _mark_starts(axes, history, named=axes is loss)
    validation.set_xlabel("step")
    validation.set_xlim(0, max(1, history.step) * 1.02)
    figure.savefig(path, format="png")


def _title(history: RunHistory) -> str:
    parts = [f"{history.tag} ({history.source})"]
    start = history.start
    if start is not None:
        parameters = start.number("num_parameters") or start.number("plan", "params", "total")
        parts += [f"{count(parameters)} parameters"] if parameters else []
        parts += [f"{history.step:,} of {start.num_iterations:,} steps"] if start.num_iterations else []
    return ", ".join(parts)


def draw_loss(axes: Axes, history: RunHistory) -> None:
    axes.set_ylabel("training loss\nnats per token")
    finite = [step for step in history.steps if step.loss is not None and math.isfinite(step.loss)]
    if not finite:
        _say(axes, "no step is done yet")
        return
    segments = [history.starts[step.start].segment if history.starts else 0 for step in finite]
    means: list[float] = []
    for segment in sorted(set(segments)):
        steps = [step for step, of in zip(finite, segments, strict=True) if of == segment]
        colour = COLOURS[segment % len(COLOURS)]
        low_high = thinned(steps)
        axes.plot(*low_high, color=colour, alpha=0.25, linewidth=0.6)
        at, mean = moving_mean(steps)
        means += mean
        axes.plot(at, mean, color=colour, linewidth=1.6, label=_text_name(history, segment))
    last = finite[-1]
    axes.annotate(
        f"{means[-1]:.3f}", (last.step, means[-1]), xytext=(4, 0), textcoords="offset points", fontsize=8, va="center"
    )
    if len(finite) >= LONG_RUN_STEPS:
        shown = [_loss(step) for step in finite[int(len(finite) * HIDDEN_SHARE) :]]
        bottom, top = min(shown), max(max(shown[: len(shown) // 4]), *means[-len(means) // 2 :])
        axes.set_ylim(bottom - 0.05 * (top - bottom), top + 0.05 * (top - bottom))
        if max(_loss(step) for step in finite) > top * 1.02:
            axes.text(
                0.995,
                0.97,
                "the highest losses lie above",
                transform=axes.transAxes,
                fontsize=7,
                color=GREY,
                ha="right",
                va="top",
            )
    if len(set(segments)) > 1:
        axes.legend(fontsize=8, frameon=False, loc="upper center")


def thinned(steps: Sequence[Step]) -> tuple[list[int], list[float]]:
    """Lowest and highest loss of each stretch, so that no spike is lost between the points drawn."""
    stretch = max(1, -(-len(steps) // (MAX_POINTS // 2)))
    at: list[int] = []
    losses: list[float] = []
    for begin in range(0, len(steps), stretch):
        part = steps[begin : begin + stretch]
        low, high = min(part, key=_loss), max(part, key=_loss)
        ends = [low] if low is high else sorted((low, high), key=lambda step: step.step)
        at += [step.step for step in ends]
        losses += [_loss(step) for step in ends]
    return at, losses


def _loss(step: Step) -> float:
    assert step.loss is not None, "steps without a loss are not drawn"
    return step.loss


def moving_mean(steps: Sequence[Step]) -> tuple[list[int], list[float]]:
    """The loss averaged over a window of about a hundredth of the steps, from its first step on."""
    window = max(1, min(len(steps) // 100, 500))
    every = max(1, len(steps) // MAX_POINTS)
    at: list[int] = []
    means: list[float] = []
    total = 0.0
    for index, step in enumerate(steps):
        total += _loss(step)
        if index >= window:
            total -= _loss(steps[index - window])
        if index % every == 0 or index == len(steps) - 1:
            at.append(step.step)
            means.append(total / min(index + 1, window))
    return at, means


def draw_validation(axes: Axes, history: RunHistory) -> None:
    of = "answers" if history.source == "sft" else "validation text"
    axes.set_ylabel(f"{of}\nbits per byte")
    axes.margins(y=0.15)  # room for the labels below the points
    known = [v for v in history.validations if v.val_bpb is not None and math.isfinite(v.val_bpb)]
    if not known:
        _say(axes, "not measured yet")
        return
    for segment in sorted({v.segment for v in known}):
        figures = [v for v in known if v.segment == segment]
        at, values = [v.step for v in figures], [v.val_bpb or 0.0 for v in figures]
        axes.plot(at, values, color=COLOURS[segment % len(COLOURS)], marker="o", markersize=3.5, linewidth=1.3)
        best = history.best_validation(segment)
        assert best is not None
        _label(axes, best, "best ", last_of_all=best is known[-1])
        if figures[-1] is not best:
            _label(axes, figures[-1], "", last_of_all=figures[-1] is known[-1])
    later = [v.val_bpb or 0.0 for v in known if v.step > 0]
    if len(later) > 2 and max(v.val_bpb or 0.0 for v in known) > 1.5 * max(later):  # the untrained model's figure
        span = max(later) - min(later) or 0.1 * max(later)
        axes.set_ylim(min(later) - 0.3 * span, max(later) + 0.3 * span)
        axes.text(
            0.995,
            0.97,
            f"{known[0].val_bpb:.3f} at step 0",
            transform=axes.transAxes,
            fontsize=7,
            color=GREY,
            ha="right",
            va="top",
        )


def _label(axes: Axes, figure: Validation, word: str, *, last_of_all: bool) -> None:
    axes.annotate(
        f"{word}{figure.val_bpb:.4f}",
        (figure.step, figure.val_bpb or 0.0),
        xytext=(0, -12),
        textcoords="offset points",
        fontsize=8,
        ha="right" if last_of_all else "center",
        annotation_clip=False,
    )


def _mark_starts(axes: Axes, history: RunHistory, *, named: bool) -> None:
    """A line at every resume, darker where figures before and after do not compare."""
    for start in history.starts[1:]:
        breaking = [change.name for change in start.changes if change.breaks_curve]
        axes.axvline(
            start.step, color="black" if breaking else GREY, linewidth=0.9, linestyle="--" if breaking else ":"
        )
        if named:
            text = f"resumed, {' and '.join(breaking)} changed" if breaking else "resumed"
            axes.annotate(
                text,
                (start.step, 0.98),
                xycoords=axes.get_xaxis_transform(),
                xytext=(3, 0),
                textcoords="offset points",
                fontsize=7,
                color="black" if breaking else GREY,
                rotation=90,
                va="top",
            )


def _text_name(history: RunHistory, segment: int) -> str:
    start = next((start for start in history.starts if start.segment == segment), None)
    return (start.text if start is not None else None) or "text not recorded"


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
