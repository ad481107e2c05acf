"""When a run is saved, and which of its saves are kept.

Regular saves are kept, unless ``keep_last`` says how many. A recovery save, made when the last save is
some minutes old or when the run is stopped, is kept until the next save of either kind is complete.
Nothing else is ever deleted.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanochat import checkpoint
from nanochat.errors import UserError
from nanochat.train.loop import Occasion
from nanochat.train.run import TrainingRun


@dataclass(frozen=True)
class SavePolicy:
    """When to save, and what to keep.

    Attributes:
        every: steps between regular saves; only at the end when None.
        keep_last: how many regular saves to keep; all when None.
        recovery_minutes: most time between saves; 0 makes no recovery saves.
    """

    every: int | None
    keep_last: int | None
    recovery_minutes: float


@dataclass
class Saver:
    """Saves a run at the occasions between its steps.

    Args:
        loader_state: the data's position at this moment.
        saved_step: the step the run was resumed from, which needs no save.
    """

    run: TrainingRun
    loader_state: Callable[[], Mapping[str, Any]]
    policy: SavePolicy
    saved_step: int | None = None
    clock: Callable[[], float] = time.monotonic
    _last_save: float = field(init=False)

    def __post_init__(self) -> None:
        self._last_save = self.clock()

    def __call__(self, occasion: Occasion) -> None:
        """The hook: save when it is time."""
        minutes = self.policy.recovery_minutes
        if occasion.last or occasion.due(self.policy.every, at_start=False):
            self._save(occasion, recovery=False)
        elif minutes and self.clock() - self._last_save >= 60 * minutes:
            self._save(occasion, recovery=True)

    def stop(self, occasion: Occasion) -> None:
        """Save because the run is stopped here."""
        self._save(occasion, recovery=True)

    def _save(self, occasion: Occasion, *, recovery: bool) -> None:
        if self.saved_step == occasion.step and (recovery or not occasion.last):
            return
        log = self.run.log
        if broken := [name for name, tensor in self.run.model.named_parameters() if not tensor.isfinite().all()]:
            raise UserError(
                f"after step {occasion.step} {broken[0]} holds values that are not finite: training has diverged,"
                " nothing was saved and the last checkpoint is kept; lower the learning rates"
            )
        try:
            folder = self.run.save(occasion, self.loader_state(), recovery=recovery)
        except UserError as error:
            # The earlier saves are untouched. Training goes on, and the next occasion tries again; only
            # at the end there is none.
            if occasion.last:
                raise
            log.notice(occasion.step, "save failed", f"{error}; training goes on, the earlier checkpoints are kept")
            self._last_save = self.clock()
            return
        self._last_save, self.saved_step = self.clock(), occasion.step
        for old in self._outdated(folder):
            shutil.rmtree(old, ignore_errors=True)

    def _outdated(self, newest: Path) -> list[Path]:
        """Saves of this run that are no longer wanted, now that ``newest`` is complete."""
        regular: list[Path] = []
        outdated: list[Path] = []
        for step in checkpoint.steps(self.run.folder):
            path = checkpoint.step_folder(self.run.folder, step)
            manifest = checkpoint.read_manifest(path)
            if path == newest or manifest.get("family") is not None:
                continue
            (outdated if manifest.get("recovery") else regular).append(path)
        if self.policy.keep_last is not None:
            kept = self.policy.keep_last - (not checkpoint.read_manifest(newest).get("recovery"))
            outdated += regular[: len(regular) - kept] if kept else regular
        return outdated
