"""Bytes on disk: the files of a checkpoint, and what all checkpoints of a run take. No torch here."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from nanochat.forecast.memory import Choices, optimizer_bytes, weight_bytes
from nanochat.model.config import ModelConfig

#: Index, manifest, random states, tokenizer: per checkpoint, all together.
SMALL_FILES_BYTES = 200_000


@dataclass(frozen=True)
class CheckpointFiles:
    """Bytes of the two large files of one checkpoint."""

    model_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.model_bytes + self.optimizer_bytes + SMALL_FILES_BYTES


@dataclass(frozen=True)
class DiskNeed:
    """What the checkpoints of a run take, at most, against what is there."""

    checkpoint: CheckpointFiles
    #: Complete checkpoints that lie there at once, one being written included.
    num_checkpoints: int
    reason: str
    #: None when the folder of the run cannot be asked.
    free_bytes: int | None

    @property
    def needed_bytes(self) -> int:
        return self.num_checkpoints * self.checkpoint.total_bytes

    @property
    def fits(self) -> bool | None:
        """Whether there is room; None when that is not known."""
        return None if self.free_bytes is None else self.needed_bytes <= self.free_bytes


def checkpoint_files(config: ModelConfig, dtype: str) -> CheckpointFiles:
    """Sizes of ``model.safetensors`` and of the optimizer's file; tables are stored in the dtype of the activations."""
    choices = Choices(dtype=dtype)
    return CheckpointFiles(weight_bytes(config, choices), optimizer_bytes(config, choices))


def disk_need(
    config: ModelConfig,
    dtype: str,
    num_iterations: int,
    *,
    save_every: int | None = None,
    keep_last: int | None = None,
    recovery: bool = True,
    folder: Path | None = None,
) -> DiskNeed:
    """What the checkpoints of a run take when the most of them lie there.

    Args:
        save_every: steps between regular saves; only the last step when None, or 0 and below.
        keep_last: regular saves that are kept; all when None.
        recovery: whether saves are made in between, of which one is kept.
        folder: where they will lie, or any folder above it.
    """
    saves = 1 if save_every is None or save_every <= 0 else -(-num_iterations // save_every)
    kept = saves if keep_last is None else min(saves, keep_last)
    # An old one goes only when the new one is complete.
    written = 1 if keep_last is not None and saves > kept else 0
    reason = f"{kept} kept" + f", {written} being written" * bool(written) + ", 1 recovery save" * recovery
    return DiskNeed(checkpoint_files(config, dtype), kept + written + recovery, reason, _free_bytes(folder))


def _free_bytes(folder: Path | None) -> int | None:
    """Free bytes where a folder is, or would be made."""
    if folder is None:
        return None
    for place in (folder, *folder.absolute().parents):
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None
