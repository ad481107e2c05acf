"""``nanochat evaluate``: measure a model on text, or every saved step of a run on one; grade what it was taught."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
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
from nanochat.data.skills import SKILLS, Item, Skill
from nanochat.errors import UserError
from nanochat.evaluation.bits_per_byte import BitsPerByte
from nanochat.evaluation.skills import Answerer, Graded, grade, held_out_items, skill_table, wrong_answers
from nanochat.evaluation.validation import Validation, plan_validation
from nanochat.hardware.device import dtype_name
from nanochat.inference.session import Session, open_session, setting_of
from nanochat.paths import CHECKPOINT_FOLDERS
from nanochat.stages.configs import EvaluateConfig
from nanochat.stages.settings import Lessons
from nanochat.train.step import to_device


@dataclass(frozen=True)
class Measured:
    """Bits per byte of one saved step."""

    step: int
    figure: BitsPerByte


def run(config: EvaluateConfig, context: Context) -> Result:
    """Measure what was asked for.

    Raises:
        UserError: when nothing was asked for, or the run, the text or the questions are not to be had.
    """
    if not config.bpb and config.skills is None:
        raise UserError("nothing to measure: ask for bits per byte with --bpb, or for skills with --skills")
    every_step = config.step == "all"
    if config.step is not None and not every_step and not config.step.isdigit():
        raise UserError(f"--step {config.step!r} is neither a step nor all: give a number, all, or nothing")
    if every_step and config.skills is not None:
        raise UserError("skills are graded at one step: give --step a number, or ask for --bpb alone")
    step = int(config.step) if config.step and not every_step else None
    session = _open(config, context, step)
    if config.skills is None:
        return _bits_per_byte(config, session, context)
    # Questions first: where there are none, nothing is computed in vain.
    questions, notices = _questions(config, session)
    measured = _bits_per_byte(config, session, context) if config.bpb else None
    for notice in notices:
        context.terminal.say(notice)
    began = time.perf_counter()
    graded = grade(questions, _answerer(config, session), config.questions.num_items, context.terminal)
    values = {
        **(measured.values if measured is not None else _about(session)),
        "skills": {each.skill: each.values(config.questions.show_wrong) for each in graded},
        "part": config.questions.part,
        "grading_seconds": time.perf_counter() - began,
        "notices": list(notices),
    }
    blocks = [measured.text] if measured is not None else []
    blocks.append(_graded(config, session, graded, notices))
    finished = len(graded) == len(questions) and all(each.finished for each in graded)
    return Result({**values, "finished": finished}, "\n\n".join(blocks), finished=finished)


def _questions(config: EvaluateConfig, session: Session) -> tuple[dict[Skill, list[Item]], tuple[str, ...]]:
    """What to ask the model, and what should be known of it."""
    asked = config.questions
    taught = session.saved.config.get("lessons") or {}
    conversations = asked.conversations or tuple(taught.get("conversations") or Lessons().conversations)
    name = asked.name or taught.get("name") or Lessons().name
    wanted = config.skills or SKILLS
    try:
        questions, notices = held_out_items(wanted, asked.part, asked.num_items, conversations, name)
    except UserError as error:
        if asked.conversations is not None:
            raise
        raise UserError(f"{error}; --conversations names other sources than the run was taught with") from None
    return questions, (*_untaught(session, taught, wanted), *notices)


def _untaught(session: Session, taught: Mapping[str, Any], wanted: Sequence[Skill]) -> Iterator[str]:
    """Why few right answers are to be expected."""
    run = session.folder.parent.name
    if session.source == "base":
        yield f"{run} is a base model, never taught to answer: expect few right answers, or give --source sft"
    elif not taught:
        yield f"what {run} was taught is not known: asked with the words of the default conversations"
    else:
        sources = {source.partition(":")[0] for source in taught.get("conversations", ())}
        missing = [skill for skill in wanted if ("identity" if skill == "name" else skill) not in sources]
        if missing:
            yield f"{run} was never taught {', '.join(missing)}: expect few right answers"


def _answerer(config: EvaluateConfig, session: Session) -> Answerer:
    def answer(questions: Sequence[str]) -> Iterator[tuple[int, str]]:
        for number, said in session.generate_many(questions, max_tokens=config.questions.max_tokens):
            yield number, said.text

    return answer


def _graded(config: EvaluateConfig, session: Session, graded: Sequence[Graded], notices: Sequence[str]) -> str:
    what = f"{session.source} {session.folder.parent.name} step {session.saved.step}"
    lines = [
        f"{what}: right answers to held-out questions ({config.questions.part})",
        skill_table(graded, colours=sys.stdout.isatty()),
        *notices,
    ]
    if shown := wrong_answers(graded, config.questions.show_wrong):
        lines += ["", shown]
    return "\n".join(lines)


def _bits_per_byte(config: EvaluateConfig, session: Session, context: Context) -> Result:
    """Of the session's step, or of every saved one."""
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
        if config.step != "all":
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
        source=config.source or ("base" if config.skills is None else "sft"),
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
    own = setting_of(session.saved, "data") or _text_of_base(session, context)
    specs = asked or ([own] if isinstance(own, str) else own if isinstance(own, (list, tuple)) else None)
    blend, notices = resolve_blend(specs, context.base)
    for notice in notices:
        context.terminal.say(notice)
    yield blend


def _text_of_base(session: Session, context: Context) -> Any:
    """The text of the base run that a chat model was made from; None when that is not known or gone."""
    parent = session.saved.parent or {}
    if parent.get("source") != "base":
        return None
    try:
        run_folder = context.base / CHECKPOINT_FOLDERS["base"] / parent["tag"]
        manifest = checkpoint.read_manifest(checkpoint.step_folder(run_folder, parent["step"]))
    except (UserError, KeyError):
        return None
    return manifest["config"].get("text", {}).get("data")


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
        "data": blend.name,
        **_about(session),
    }


def _about(session: Session) -> dict[str, Any]:
    return {
        "source": session.source,
        "model_tag": session.folder.parent.name,
        "step": session.saved.step,
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
