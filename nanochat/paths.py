"""Where things lie on disk. Touches nothing: only names places under the base folder."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from nanochat.errors import UserError

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


def check_name(name: str, flag: str) -> str:
    """A name that becomes a folder in the base folder; returned as it is.

    Raises:
        UserError: unless it is letters, digits, ``-``, ``_`` and ``.``, does not begin with a dot, and is of 100
            characters at most: so that no name leads out of the base folder or hides in it.
    """
    if not re.fullmatch(r"\w[\w.-]{0,99}", name):
        raise UserError(f"{flag} {name[:120]!r} cannot name a folder: use up to 100 letters, digits, '-', '_' and '.'")
    return name


def checkpoints_folder(source: Source, tag: str, base: Path | None = None) -> Path:
    """Folder of all saved steps of one run: ``<base>/<source>_checkpoints/<tag>``.

    Raises:
        UserError: for a tag that cannot name a folder.
    """
    return (base or base_folder()) / CHECKPOINT_FOLDERS[source] / check_name(tag, "--model-tag")
