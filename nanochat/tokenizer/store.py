"""Where tokenizers lie in the base folder, and which one a checkpoint belongs to.

``<base>/tokenizer/`` is the base folder's own; named ones lie in ``<base>/tokenizers/<name>/``. A
checkpoint records the fingerprint of its tokenizer and where it lay, so a tokenizer that was moved
aside is still found, and another one is never used in its place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from nanochat.errors import UserError
from nanochat.paths import check_name
from nanochat.tokenizer.bpe import FILE_NAME as FILE_NAME
from nanochat.tokenizer.bpe import Tokenizer


def folder(name: str | None, base: Path) -> Path:
    """Folder of the tokenizer of that name; of the base folder's own one for None.

    Raises:
        UserError: for a name that cannot name a folder.
    """
    return base / "tokenizers" / check_name(name, "the tokenizer") if name is not None else base / "tokenizer"


def open_tokenizer(name_or_path: str | None, base: Path) -> tuple[Tokenizer, Path]:
    """The tokenizer of that name or folder, and its folder.

    Raises:
        UserError: when there is none, or it is damaged.
    """
    if name_or_path and (Path(name_or_path) / FILE_NAME).is_file():
        path = Path(name_or_path)
    else:
        path = folder(name_or_path, base)
        if not (path / FILE_NAME).is_file():
            present = ", ".join(str(found) for found in _folders(base)) or "none"
            raise UserError(
                f"there is no tokenizer in {path} (present: {present}): train one with nanochat tokenizer,"
                " or name one with --tokenizer"
            )
    return Tokenizer.load(path), path


def find_tokenizer(fingerprint: str, recorded: str, base: Path) -> tuple[Tokenizer, Path]:
    """The tokenizer a checkpoint was trained with, wherever it lies in the base folder.

    Args:
        fingerprint: of the tokenizer, as the checkpoint records it.
        recorded: where it lay when the checkpoint was saved, relative to the base folder.

    Raises:
        UserError: when no tokenizer in the base folder has that fingerprint.
    """
    candidates = [path for path in (base / recorded, Path(recorded)) if recorded and (path / FILE_NAME).is_file()]
    candidates += [path for path in _folders(base) if path not in candidates]
    for path in candidates:
        try:
            tokenizer = Tokenizer.load(path)
        except UserError:
            if len(candidates) == 1:
                raise
            continue  # a damaged one cannot be it
        if tokenizer.fingerprint == fingerprint:
            return tokenizer, path
    looked = f"{len(candidates)} tokenizer(s) there have others" if candidates else "none is there"
    raise UserError(
        f"the tokenizer of this checkpoint (fingerprint {fingerprint[:8]}) is not in {base}: {looked};"
        f" put it back into {base / recorded}, or name its folder with --tokenizer"
    )


def check_belongs(tokenizer: Tokenizer, path: Path, fingerprint: str, checkpoint: Path) -> None:
    """Raises :class:`UserError` unless ``tokenizer`` (from ``path``) is the one of the checkpoint."""
    if tokenizer.fingerprint != fingerprint:
        raise UserError(
            f"the tokenizer in {path} (fingerprint {tokenizer.fingerprint[:8]}) does not belong to {checkpoint}"
            f" (trained with {fingerprint[:8]}): leave --tokenizer away to use the right one"
        )


def install(tokenizer: Tokenizer, name: str | None, base: Path) -> tuple[Path, str | None]:
    """Keep a tokenizer under a name; another one that lies there is moved aside, never lost.

    Returns:
        Its folder, and what had to be moved, in a sentence.
    """
    path = folder(name, base)
    notice = None
    if (path / FILE_NAME).is_file():
        try:
            present = Tokenizer.load(path)
        except UserError as error:
            tokenizer.save(path)
            return path, f"{error}: replaced"
        if present.fingerprint == tokenizer.fingerprint:
            return path, None
        aside = folder(present.fingerprint[:8], base)
        if not (aside / FILE_NAME).is_file():
            aside.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, aside)
            notice = f"another tokenizer lay in {path}: moved to {aside}, where checkpoints trained with it find it"
    tokenizer.save(path)
    return path, notice


def _folders(base: Path) -> Iterator[Path]:
    """Folders of all tokenizers of the base folder."""
    for path in [base / "tokenizer", *sorted((base / "tokenizers").glob("*"))]:
        if (path / FILE_NAME).is_file():
            yield path
