"""Brings the family's files of text into the base folder, without a second copy where the disk allows it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from nanochat.errors import UserError

#: Folders of text, today's and that of before March 2026.
DATA_FOLDERS = ("base_data_climbmix", "base_data")


@dataclass(frozen=True)
class ShardCopy:
    """One file of text and its place in the base folder."""

    source: Path
    target: Path

    def write(self) -> None:
        """Link the file to its place, or copy it there; does nothing when it is there already."""
        if self.target.exists():
            return
        self.target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(self.source.resolve(), self.target)
            return
        except OSError:  # another disk, or one without links
            pass
        temporary = self.target.with_name(f".{self.target.name}.tmp-{os.getpid()}")
        try:
            shutil.copyfile(self.source, temporary)
            temporary.replace(self.target)
        except OSError as error:
            raise UserError(
                f"{self.source} cannot be copied to {self.target.parent} ({error.strerror}): free some space or check"
                " that the folder can be written, then import again"
            ) from error
        finally:
            temporary.unlink(missing_ok=True)


def plan_copies(folder: Path, base: Path) -> list[ShardCopy]:
    """The files of text in ``folder`` and where each goes.

    Raises:
        UserError: when a file of that name but another size is there already.
    """
    copies = [
        ShardCopy(path, base / name / path.name)
        for name in DATA_FOLDERS
        for path in sorted((folder / name).glob("*.parquet"))
    ]
    for copy in copies:
        if copy.target.exists() and copy.target.stat().st_size != copy.source.stat().st_size:
            raise UserError(f"{copy.target} is there but differs from {copy.source}: move it away and import again")
    return copies
