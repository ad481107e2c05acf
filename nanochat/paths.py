"""Where things lie on disk. Touches nothing: only names places under the base folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

Source = Literal["base", "sft", "rl"]

#: Folder of each kind of checkpoint, by the names the family uses.
CHECKPOINT_FOLDERS: dict[Source, str] = {
    "base": "base_checkpoints",
    "sft": "chatsft_checkpoints",
    "rl": "chatrl_checkpoints",
}


def base_folder() -> Path:
    """The folder that holds data, tokenizers and checkpoints.

    ``NANOCHAT_BASE_DIR`` when set, else ``~/.cache/nanochat``, as in the family.
    """
    chosen = os.environ.get("NANOCHAT_BASE_DIR")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "nanochat"


def checkpoints_folder(source: Source, tag: str, base: Path | None = None) -> Path:
    """Folder of all saved steps of one run: ``<base>/<source>_checkpoints/<tag>``."""
    return (base or base_folder()) / CHECKPOINT_FOLDERS[source] / tag
