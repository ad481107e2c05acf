"""One training run on disk: its folder, its log, and its checkpoints."""

from __future__ import annotations

import os
import platform
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat import checkpoint
from nanochat.checkpoint import Checkpoint, TokenizerReference
from nanochat.model.gpt import GPT
from nanochat.optim.optimizer import Optimizer
from nanochat.paths import Source, checkpoints_folder
from nanochat.provenance import describe
from nanochat.records import LOG_NAME, RECORDS_NAME, Records
from nanochat.terminal import Terminal
from nanochat.tokenizer.bpe import Tokenizer
from nanochat.train import random_state
from nanochat.train.lock import RunLock, acquire
from nanochat.train.loop import Occasion
from nanochat.train.watch import RunLog

#: Folder in a run's folder where its first save is written.
FIRST_SAVE = ".first"


@dataclass
class EarlierRun:
    """What an earlier run of our own left in a folder: its saved steps, and its part of records and log."""

    folder: Path
    steps: list[Path]
    #: Size of each file when the new run began to write behind it.
    sizes: dict[str, int]
    moved: bool = False

    @classmethod
    def find(cls, folder: Path) -> EarlierRun:
        own = [checkpoint.step_folder(folder, step) for step in checkpoint.steps(folder)]
        own = [path for path in own if checkpoint.read_manifest(path).get("family") is None]
        logs = [folder / name for name in (RECORDS_NAME, LOG_NAME)]
        return cls(folder, own, {path.name: path.stat().st_size for path in logs if path.exists()})

    def move_aside(self) -> Path | None:
        """Move it to a folder beside the run's, once; returns that, or None when there is nothing to move."""
        if self.moved:
            return None
        self.moved = True
        if not (self.steps or self.sizes):
            return None
        aside = unused_name(self.folder)
        aside.mkdir()
        for step in self.steps:
            step.rename(aside / step.name)
        for name, size in self.sizes.items():
            content = (self.folder / name).read_bytes()
            (aside / name).write_bytes(content[:size])
            beside = self.folder / f".{name}.new"
            beside.write_bytes(content[size:])
            os.replace(beside, self.folder / name)
        return aside


def unused_name(folder: Path) -> Path:
    """A name beside a run's folder that says when it was moved there."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    candidates = (
        folder.with_name(f"{folder.name}.{stamp}{suffix}") for suffix in ("", *(f"-{i}" for i in range(2, 999)))
    )
    return next(path for path in candidates if not path.exists())


@dataclass(frozen=True)
class TrainingRun:
    """What a stage that trains needs besides the training itself.

    Attributes:
        config: the resolved config, ready for JSON; part of every checkpoint.
    """

    stage: Source
    tag: str
    folder: Path
    log: RunLog
    model: GPT
    optimizer: Optimizer
    tokenizer: TokenizerReference
    config: Mapping[str, Any]
    data: Mapping[str, Any]
    parent: Mapping[str, Any] | None
    run_id: str
    lock: RunLock
    #: What lay in the folder when a new run began there.
    earlier: EarlierRun | None

    def save(self, occasion: Occasion, loader_state: Mapping[str, Any], *, recovery: bool) -> Path:
        """Save the run as it is at this occasion; returns the folder.

        Raises:
            UserError: when the disk is full or cannot be written; earlier saves are untouched.
        """
        first = self.earlier is not None and not self.earlier.moved
        folder = checkpoint.save(
            self.folder / FIRST_SAVE if first else self.folder,
            Checkpoint(
                stage=self.stage,
                step=occasion.step,
                model_config=self.model.config,
                parameters=dict(self.model.named_parameters()),
                optimizer=self.optimizer.state_tensors(),
                optimizer_step_count=self.optimizer.step_count,
                tokenizer=self.tokenizer,
                config=self.config,
                loader=loader_state,
                loop=occasion.state.to_dict(),
                metrics={"smooth_loss": occasion.state.smooth_loss, "best_val_bpb": occasion.state.best_val_bpb},
                data=self.data,
                parent=self.parent,
                run_id=self.run_id,
                recovery=recovery,
                random=random_state.capture(),
            ),
        )
        if first:
            folder = self._settle_in(folder)
        num_bytes = sum(path.stat().st_size for path in folder.iterdir())
        self.log.records.write("save", step=occasion.step, folder=folder.name, bytes=num_bytes, recovery=recovery)
        self.log.say(f"step {occasion.step}: saved {folder} ({num_bytes / 1e6:.1f} MB{', recovery' * recovery})")
        return folder

    def _settle_in(self, first: Path) -> Path:
        """Put the first complete save in its place, and what an earlier run left there aside."""
        assert self.earlier is not None
        if aside := self.earlier.move_aside():
            self.log.say(f"an earlier run {self.tag} lay in {self.folder}: moved to {aside}")
        folder = self.folder / first.name
        if folder.exists():  # a damaged step, or an imported one of the same number
            aside = unused_name(self.folder)
            aside.mkdir()
            folder.rename(aside / folder.name)
            self.log.say(f"another {folder.name} lay in {self.folder}: moved to {aside}")
        first.rename(folder)
        first.parent.rmdir()
        return folder


def begin(
    stage: Source,
    tag: str,
    *,
    base: Path,
    terminal: Terminal,
    model: GPT,
    optimizer: Optimizer,
    tokenizer: Tokenizer,
    tokenizer_folder: Path,
    config: Mapping[str, Any],
    data: Mapping[str, Any],
    parent: Mapping[str, Any] | None,
    going_on: Checkpoint | None,
    facts: Mapping[str, Any],
) -> TrainingRun:
    """Open a run's folder and record this start: where it came from, its config and ``facts``.

    A run that starts anew under a tag that was used moves the earlier run aside when its own first
    save is complete, so a run that fails before takes nothing away; imported steps stay where they
    are. A run that is resumed goes on in its folder.

    Args:
        config: resolved, ready for JSON.
        data: name and fingerprint of the text, and what else is known of it.
        parent: the checkpoint a run begins from, None for one that begins from nothing.
        going_on: the checkpoint that the run goes on from, None for a new run.

    Raises:
        UserError: when another process trains this run.
    """
    folder = checkpoints_folder(stage, tag, base)
    lock = acquire(folder)
    earlier = EarlierRun.find(folder) if going_on is None else None
    run_id = (going_on.run_id if going_on is not None else None) or uuid.uuid4().hex
    log = RunLog(Records(folder), terminal)
    relative = (
        tokenizer_folder.relative_to(base) if tokenizer_folder.is_relative_to(base) else tokenizer_folder.resolve()
    )
    reference = TokenizerReference(tokenizer.fingerprint, relative.as_posix())
    log.records.write(
        "start",
        stage=stage,
        tag=tag,
        run_id=run_id,
        pid=os.getpid(),
        host=platform.node(),
        config=dict(config),
        step=going_on.step if going_on is not None else 0,
        resumed=going_on is not None,
        parent=parent,
        data=dict(data),
        tokenizer={**vars(reference), "vocab_size": tokenizer.vocab_size},
        **facts,
        provenance=describe(),
    )
    identity = {"name": data["name"], "fingerprint": data["fingerprint"]}
    return TrainingRun(
        stage, tag, folder, log, model, optimizer, reference, config, identity, parent, run_id, lock, earlier
    )


def rows_per_batch(chosen: int | None, total_batch_size: int, sequence_len: int) -> int:
    """Rows of one forward pass: those chosen, else the most up to 32 that divide the total batch."""
    if chosen is not None:
        return chosen
    rows = total_batch_size // sequence_len
    return max((n for n in range(1, min(32, rows) + 1) if rows % n == 0), default=1)
