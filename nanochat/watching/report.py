"""One page and a picture about a run, written into its folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nanochat.errors import UserError
from nanochat.watching.curve import draw
from nanochat.watching.events import Validation
from nanochat.watching.history import RunHistory, read_history
from nanochat.watching.status import Status, command_to_continue, describe
from nanochat.watching.words import moment

PAGE_NAME = "report.md"
PICTURE_NAME = "loss.png"
#: Rows of the table of figures, and samples shown, at most: it stays one page.
MAX_ROWS = 12
MAX_SAMPLES = 5
SAMPLE_CHARACTERS = 300


@dataclass(frozen=True)
class Written:
    """What was written; ``obstacle`` says why there is no picture."""

    page: Path
    picture: Path | None
    obstacle: str | None


def write(run_folder: Path, now: float | None = None) -> Written:
    """Write ``report.md`` and ``loss.png`` into a run's folder, over those of before.

    Without matplotlib the page is written alone.

    Raises:
        UserError: when the folder cannot be written.
    """
    now = time.time() if now is None else now
    history = read_history(run_folder)
    picture, obstacle = run_folder / PICTURE_NAME, None
    try:
        try:
            _replace(picture, lambda path: draw(history, path))
        except UserError as error:
            obstacle = str(error)
        text = page(history, describe(history, now), now=now, with_picture=obstacle is None)
        _replace(run_folder / PAGE_NAME, lambda path: path.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise UserError(f"the report of {run_folder} cannot be written there ({error.strerror}): check it") from None
    return Written(run_folder / PAGE_NAME, picture if obstacle is None else None, obstacle)


def _replace(final: Path, fill: Callable[[Path], object]) -> None:
    """Fill a file beside ``final``, then put it in its place."""
    beside = final.with_name(f".{final.name}.tmp-{os.getpid()}")
    try:
        fill(beside)
        os.replace(beside, final)
    finally:
        beside.unlink(missing_ok=True)


def page(history: RunHistory, status: Status, *, now: float, with_picture: bool) -> str:
    """The report as Markdown, as the run stood at ``now``."""
    parts = [f"# {status.title}", f"As of {moment(now)}: {status.state.text}."]
    if with_picture:
        parts.append(f"![Training loss and validation figure by step]({PICTURE_NAME})")
    for name, lines in status.sections.items():
        rows = [
            f"| {line.label} | {_cell(line.value)} |" for line in lines if line.label not in ("state", "trajectory")
        ]
        parts.append("\n".join([f"## {name.capitalize()}", "", "| | |", "|---|---|", *rows]))
    parts += [_figures(history), _samples(history), _provenance(history), _next(history)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


def _figures(history: RunHistory) -> str:
    """A table of validation figures: the first, best and last, and some between."""
    known = [v for v in history.validations if v.val_bpb is not None]
    if not known:
        return ""
    best = history.best_validation(known[-1].segment)
    shown = _chosen(known, best)
    rows = []
    for before, figure in zip([None, *shown[:-1]], shown, strict=True):
        if before is not None and before.segment != figure.segment:
            rows.append("| | *other text from here on: not comparable with the rows above* |")
        rows.append(f"| {figure.step:,} | {figure.val_bpb:.4f}{' **best**' if figure is best else ''} |")
    left_out = f"\n\n{len(known) - len(shown)} more are in the records." if len(known) > len(shown) else ""
    unit = "bits per byte of the answers" if history.source == "sft" else "bits per byte"
    return "\n".join(["## Validation", "", f"| step | {unit} |", "|---:|:---|", *rows]) + left_out


def _chosen(known: list[Validation], best: Validation | None) -> list[Validation]:
    if len(known) <= MAX_ROWS:
        return known
    last = len(known) - 1
    indices = {round(i * last / (MAX_ROWS - 2)) for i in range(MAX_ROWS - 1)}
    indices |= {known.index(best)} if best is not None else set()
    return [known[index] for index in sorted(indices)]


def _samples(history: RunHistory) -> str:
    """What the model said last."""
    if not history.samples:
        return ""
    latest = [sample for sample in history.samples if sample.get("step") == history.samples[-1].get("step")]
    lines = [f"## Samples at step {latest[0].get('step', 0):,}", "", "```"]
    for sample in latest[:MAX_SAMPLES]:
        prompt, text = str(sample.get("prompt", "")), str(sample.get("text", ""))
        said = text if text.startswith(prompt) else f"{prompt} … {text}"
        lines.append(said[:SAMPLE_CHARACTERS].replace("```", "'''").strip())
    return "\n".join([*lines, "```"])


def _provenance(history: RunHistory) -> str:
    start = history.start
    if start is None:
        return ""
    versions = start.get("provenance", "versions")
    lines = ["## Where it came from", ""]
    for each in (history.starts[0], start)[: len(history.starts)]:
        arguments = each.get("provenance", "arguments")
        if isinstance(arguments, list):
            command = " ".join(["nanochat", *map(str, arguments[1:])])
            lines.append(f"- {'resumed' if each.resumed else 'started'} with `{command}`")
    lines.append(f"- commit: {start.get('provenance', 'commit') or 'n/a (not a checkout)'}")
    if isinstance(versions, dict):
        lines.append("- versions: " + ", ".join(f"{name} {version}" for name, version in versions.items() if version))
    machine = start.get("provenance", "machine")
    if isinstance(machine, dict):
        lines.append("- machine: " + ", ".join(str(value) for value in machine.values() if value))
    fingerprint = start.get("tokenizer", "fingerprint")
    if fingerprint:
        lines.append(f"- tokenizer: {fingerprint}")
    return "\n".join(lines)


def _next(history: RunHistory) -> str:
    commands = {
        "base": [f"nanochat generate -g {history.tag} -p 'Once'", f"nanochat sft --model-tag {history.tag}"],
        "sft": [f"nanochat chat -g {history.tag}"],
        "rl": [f"nanochat chat -i rl -g {history.tag}"],
    }[history.source]
    if history.end is None and history.start is not None:
        commands.insert(0, command_to_continue(history))
    return "\n".join(["## Next", "", "```", *commands, "```"])
