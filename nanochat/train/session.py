"""One start of a run: from its first step, or the one it was resumed at, to its end or to a stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat import records
from nanochat.checkpoint import Checkpoint
from nanochat.context import Result
from nanochat.errors import UserError
from nanochat.hardware.device import Device
from nanochat.terminal import Terminal
from nanochat.train import random_state
from nanochat.train.interrupt import Interruption
from nanochat.train.loop import Hook, LoopState, NotFinite, Occasion, StepSource, train
from nanochat.train.run import TrainingRun
from nanochat.train.saving import SavePolicy, Saver
from nanochat.train.step import Trainer
from nanochat.watching import report


@dataclass(frozen=True)
class Outcome:
    """How a start of a run ended."""

    training: TrainingRun
    state: LoopState
    #: False when it was stopped before its last step.
    finished: bool

    @property
    def val_bpb(self) -> float | None:
        """The last validation figure of this start, in bits per byte."""
        return self.training.log.last_val_bpb

    def result(self, values: dict[str, Any], text: str) -> Result:
        """The stage's result; of a stopped run it says how to go on, and counts as not done."""
        folder = self.training.folder / f"step_{self.state.step:06d}"
        if self.finished:
            self.training.log.records.write("end", **values)
            self._write_report()
            return Result(values, text, outputs=(folder,))
        return Result(values, f"stopped at step {self.state.step}; continue with: {self.command}", finished=False)

    def _write_report(self) -> None:
        """A page and a picture of the run; their failure costs nothing but them."""
        log = self.training.log
        try:
            written = report.write(self.training.folder)
        except Exception as error:
            log.notice(self.state.step, "report failed", f"the report could not be written ({error})")
        else:
            log.say(f"report: {written.page}")

    @property
    def command(self) -> str:
        """What to type to go on."""
        stage = "pretrain" if self.training.stage == "base" else self.training.stage
        return f"nanochat {stage} --model-tag {self.training.tag} --resume"


def already_finished(folder: Path, saved: Checkpoint) -> Result:
    """The result of going on with a run that has done its last step: what it told at its end, nothing touched."""
    ends = list(records.read(folder.parent, "end"))
    told = {name: value for name, value in ends[-1].items() if name not in ("kind", "time")} if ends else {}
    values = {"model_tag": folder.parent.name, "step": saved.step, "finished": True, **told}
    return Result(
        values, f"{folder.parent.name} is finished already, at step {saved.step}: {folder}", outputs=(folder,)
    )


@dataclass(frozen=True)
class Progress:
    """What the progress of a run counts.

    Attributes:
        num_steps: steps in all, where that is known.
        total: parts in all; the steps when None.
        done: parts done after so many steps.
        data: where the data stands, for the records: position, tokens read and lost.
    """

    num_steps: int | None
    total: int | None = None
    done: Callable[[int], int] = lambda step: step
    data: Callable[[], Mapping[str, Any]] = dict


def run_to_the_end(
    training: TrainingRun,
    source: StepSource,
    *,
    device: Device,
    terminal: Terminal,
    compile_mode: str,
    compile_cache: Path,
    going_on: Checkpoint | None,
    loader_state: Callable[[], Mapping[str, Any]],
    policy: SavePolicy,
    hooks: Callable[[Trainer, Interruption], Sequence[Hook]],
    progress: Progress,
) -> Outcome:
    """Train with signals handled: at a stop the run is saved where it stands.

    Args:
        going_on: the checkpoint of a resumed run, whose loop and random states are taken over.
        loader_state: the data's position at this moment, for the saves.
        hooks: makes what happens at the occasions after the save.

    Raises:
        UserError: when the run diverges, or its last save fails; told in the records too.
    """
    log = training.log
    trainer = Trainer(
        training.model,
        training.optimizer,
        device.torch_device,
        compile_mode=compile_mode,
        obstacle=device.compile_obstacle(),
        compile_cache=compile_cache,
        say=log.say,
    )
    interruption = Interruption(log.say)
    saver = Saver(training, loader_state, policy, going_on.step if going_on is not None else None)
    state = LoopState() if going_on is None else LoopState(**going_on.loop)
    if going_on is not None and going_on.random is not None:
        random_state.restore(going_on.random)
    else:
        random_state.start(int(training.config.get("seed", 0)))
    total = progress.total or progress.num_steps or 0
    with interruption.listening(), terminal.progress(training.stage, total, progress.done(state.step)) as shown:
        report_step = log.step_reporter(
            shown,
            progress.num_steps,
            done=progress.done,
            data=progress.data,
            memory=device.peak_memory_bytes,
            alive=training.lock.touch,
        )
        try:
            finished = train(
                trainer,
                source,
                state=state,
                hooks=[saver, *hooks(trainer, interruption)],
                report=report_step,
                synchronize=device.synchronize,
                interruption=interruption,
            )
            if not finished:
                saver.stop(Occasion(state.step, False, state))
        except UserError as error:
            reason = "not finite" if isinstance(error, NotFinite) else "error"
            log.records.write("stop", step=state.step, reason=reason, text=str(error))
            log.records.log(str(error))
            raise
        finally:
            training.lock.release()
    if not finished:
        log.records.write("stop", step=state.step, reason="signal", text=interruption.signal_name)
        log.records.log(f"stopped at step {state.step} by {interruption.signal_name}")
    return Outcome(training, state, finished)
