"""One start of a run: from its first step, or the one it was resumed at, to its end or to a stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanochat.checkpoint import Checkpoint
from nanochat.context import Result
from nanochat.errors import UserError
from nanochat.hardware.device import Device
from nanochat.terminal import Terminal
from nanochat.train import random_state
from nanochat.train.interrupt import Interruption
from nanochat.train.loop import Hook, LoopState, NotFinite, Occasion, StepSource, train
from nanochat.train.run import TrainingRun
from nanochat.train.saving import Saver
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


def run_to_the_end(
    training: TrainingRun,
    trainer: Trainer,
    source: StepSource,
    saver: Saver,
    hooks: Sequence[Hook],
    interruption: Interruption,
    *,
    device: Device,
    terminal: Terminal,
    saved: Checkpoint | None,
    num_steps: int | None,
    data: Callable[[], Mapping[str, Any]],
    progress_total: int | None = None,
    progress_done: Callable[[int], int] = lambda step: step,
) -> Outcome:
    """Train with signals handled: at a stop the run is saved where it stands.

    Args:
        hooks: what happens at the occasions after the save.
        saved: the checkpoint of a resumed run, whose loop and random states are taken over.
        num_steps: steps in all, where that is known.
        data: where the data stands, for the records.
        progress_total, progress_done: what the progress counts, when that is not steps.

    Raises:
        UserError: when the run diverges, or its last save fails; told in the records too.
    """
    state = LoopState() if saved is None else LoopState(**saved.loop)
    if saved is not None and saved.random is not None:
        random_state.restore(saved.random)
    log = training.log
    with (
        interruption.listening(),
        terminal.progress(training.stage, progress_total or num_steps or 0, progress_done(state.step)) as progress,
    ):
        try:
            finished = train(
                trainer,
                source,
                state=state,
                hooks=[saver, *hooks],
                report=log.step_reporter(
                    progress,
                    num_steps,
                    done=progress_done,
                    data=data,
                    memory=device.peak_memory_bytes,
                    alive=training.lock.touch,
                ),
                synchronize=device.synchronize,
                interruption=interruption,
            )
            if not finished:
                saver.stop(Occasion(state.step, False, state))
        except NotFinite as error:
            log.records.write("stop", step=error.step, reason="not finite", text=str(error))
            log.records.log(str(error))
            raise
        except UserError as error:
            log.records.write("stop", step=state.step, reason="error", text=str(error))
            raise
        finally:
            training.lock.release()
    if not finished:
        log.records.write("stop", step=state.step, reason="signal", text=interruption.signal_name)
        log.records.log(f"stopped at step {state.step} by {interruption.signal_name}")
    return Outcome(training, state, finished)
