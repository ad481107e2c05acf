"""``nanochat evaluate``: measure a model, or every saved step of a run on one fixed text."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nanochat import checkpoint
from nanochat.context import Context, Result
from nanochat.data.blend import Blend, resolve_blend
from nanochat.errors import UserError
from nanochat.evaluation.bits_per_byte import BitsPerByte
from nanochat.evaluation.validation import Validation, plan_validation
from nanochat.hardware.device import dtype_name
from nanochat.inference.session import Session, open_session, setting_of
from nanochat.stages.configs import EvaluateConfig
from nanochat.train.step import to_device


@dataclass(frozen=True)
class Measured:
    """Bits per byte of one saved step."""

    step: int
    figure: BitsPerByte


def run(config: EvaluateConfig, context: Context) -> Result:
    """Measure what was asked for."""
    if not config.bpb:
        raise UserError("nothing to measure: ask for bits per byte with --bpb")
    every_step = config.step == "all"
    if config.step is not None and not every_step and not config.step.isdigit():
        raise UserError(f"--step {config.step!r} is neither a step nor all: give a number, all, or nothing")
    step = int(config.step) if config.step and not every_step else None
    session = _open(config, context, step)
    with _text(config, session, context) as blend:
        validation = plan_validation(
            blend,
            session.tokenizer,
            batch_size=config.device_batch_size or setting_of(session.saved, "device_batch_size") or 32,
            sequence_len=config.text.max_seq_len or session.model.config.sequence_len,
            eval_tokens=config.text.eval_tokens,
            buffer_documents=config.text.buffer_size,
            fetch_documents=config.text.tokenizer_batch_size,
        )
        if not every_step:
            figure = _measure(session, validation, context)
            return _single(session, blend, figure)
        found = []
        for saved_step in checkpoint.steps(session.folder.parent):
            opened = session if saved_step == session.saved.step else _open(config, context, saved_step)
            found.append(Measured(saved_step, _measure(opened, validation, context)))
            context.terminal.say(f"step {saved_step}: {_shown(found[-1].figure)} bits per byte")
        return _curve(session, blend, found)


def _open(config: EvaluateConfig, context: Context, step: int | None) -> Session:
    return open_session(
        config.model_tag,
        source=config.source,
        step=step,
        device=config.device,
        tokenizer=config.text.tokenizer,
        base=context.base,
    )


@contextmanager
def _text(config: EvaluateConfig, session: Session, context: Context) -> Iterator[Blend]:
    """The text to measure on: what was asked for, else the run's own."""
    asked = config.text.data
    if asked is not None and len(asked) == 1 and Path(asked[0]).is_file():
        from nanochat.data.own_text import open_as_validation

        with tempfile.TemporaryDirectory(prefix="nanochat-") as folder:
            yield Blend.of(open_as_validation(Path(asked[0]), Path(folder)))
        return
    own = setting_of(session.saved, "data")
    specs = asked or ([own] if isinstance(own, str) else own if isinstance(own, (list, tuple)) else None)
    blend, notices = resolve_blend(specs, context.base)
    for notice in notices:
        context.terminal.say(notice)
    yield blend


def _measure(session: Session, validation: Validation, context: Context) -> BitsPerByte:
    place = session.device.torch_device
    done = 0
    with context.terminal.progress("validating", validation.num_batches) as progress, torch.inference_mode():

        def losses(inputs: NDArray[np.int64], targets: NDArray[np.int64]) -> torch.Tensor:
            nonlocal done
            done += 1
            progress.update(done)
            return session.model.losses(to_device(inputs, place), to_device(targets, place))

        return validation.measure(losses, session.tokenizer)


def _shown(figure: BitsPerByte) -> str:
    return "n/a (no target stands for a byte)" if figure.value is None else f"{figure.value:.6f}"


def _values(session: Session, blend: Blend, measured: BitsPerByte) -> dict[str, Any]:
    return {
        "val_bpb": measured.value,
        "tokens": measured.num_tokens,
        "bytes": measured.num_bytes,
        "source": session.source,
        "model_tag": session.folder.parent.name,
        "step": session.saved.step,
        "data": blend.name,
        "dtype": dtype_name(session.model.compute_dtype),
    }


def _single(session: Session, blend: Blend, measured: BitsPerByte) -> Result:
    values = _values(session, blend, measured)
    text = (
        f"{session.source} {values['model_tag']} step {session.saved.step}: {_shown(measured)} bits per byte"
        f" on {measured.num_tokens:,} tokens, {measured.num_bytes:,} bytes of {blend.name}"
    )
    return Result(values, text)


def _curve(session: Session, blend: Blend, found: list[Measured]) -> Result:
    """Figures of every saved step, on the same rows of the same text, so they compare."""
    last = found[-1].figure
    run_name = session.folder.parent.name
    picture = session.folder.parent / "val_bpb_all_steps.png"
    _draw(picture, run_name, blend, found)
    steps = [{"step": each.step, "val_bpb": each.figure.value} for each in found]
    values = {**_values(session, blend, last), "step": "all", "steps": steps, "picture": str(picture)}
    lines = [f"{each.step:>9,}  {_shown(each.figure)}" for each in found]
    text = "\n".join(
        [
            f"{session.source} {run_name}, bits per byte on {last.num_tokens:,} tokens, {last.num_bytes:,} bytes of"
            f" {blend.name}, the same rows at every step:",
            *lines,
            f"curve: {picture}",
        ]
    )
    return Result(values, text)


def _draw(path: Path, run_name: str, blend: Blend, found: list[Measured]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    known = [(each.step, each.figure.value) for each in found if each.figure.value is not None]
    axes.plot([step for step, _ in known], [value for _, value in known], marker="o")
    axes.set(xlabel="step", ylabel="bits per byte", title=f"{run_name} on {blend.name}")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
