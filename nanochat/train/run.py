"""One training run on disk: its folder, its log, and its checkpoints."""

from __future__ import annotations

import time
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
from nanochat.train.loop import Occasion
from nanochat.train.watch import RunLog


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

    def save(self, occasion: Occasion, loader_state: Mapping[str, Any]) -> None:
        """Save the run as it is at this occasion."""
        folder = checkpoint.save(
            self.folder,
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
            ),
        )
        num_bytes = sum(path.stat().st_size for path in folder.iterdir())
        self.log.records.write("save", step=occasion.step, folder=folder.name, bytes=num_bytes)
        self.log.say(f"step {occasion.step}: saved {folder} ({num_bytes / 1e6:.1f} MB)")


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
    facts: Mapping[str, Any],
) -> TrainingRun:
    """Open a run's folder and write its first record: where it came from, its config and ``facts``.

    An earlier run of that tag is moved aside, never overwritten; imported steps stay where they are.
    """
    folder = checkpoints_folder(stage, tag, base)
    aside = _move_aside(folder)
    log = RunLog(Records(folder), terminal)
    if aside is not None:
        log.say(f"an earlier run {tag} lay in {folder}: moved to {aside}")
    log.records.write("start", stage=stage, tag=tag, config=dict(config), **facts, provenance=describe())
    relative = (
        tokenizer_folder.relative_to(base) if tokenizer_folder.is_relative_to(base) else tokenizer_folder.resolve()
    )
    reference = TokenizerReference(tokenizer.fingerprint, relative.as_posix())
    return TrainingRun(stage, tag, folder, log, model, optimizer, reference, config)


def _move_aside(folder: Path) -> Path | None:
    """Move what an earlier run of our own left in ``folder`` to a folder beside it; returns that."""
    own = [folder / name for name in (RECORDS_NAME, LOG_NAME) if (folder / name).exists()]
    for step in checkpoint.steps(folder):
        path = checkpoint.step_folder(folder, step)
        if checkpoint.read_manifest(path).get("family") is None:
            own.append(path)
    if not own:
        return None
    aside = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}")
    number = 1
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}-{number}")
    aside.mkdir(parents=True)
    for path in own:
        path.rename(aside / path.name)
    return aside


def rows_per_batch(chosen: int | None, total_batch_size: int, sequence_len: int) -> int:
    """Rows of one forward pass: those chosen, else the most up to 32 that divide the total batch."""
    if chosen is not None:
        return chosen
    rows = total_batch_size // sequence_len
    return max((n for n in range(1, min(32, rows) + 1) if rows % n == 0), default=1)
