"""What a data set consists of, as it was written: beside the shards in ``manifest.json``."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanochat.errors import UserError

FILE_NAME = "manifest.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class ShardEntry:
    """One parquet file of a data set."""

    name: str
    #: ``train`` or ``val``.
    split: str
    documents: int
    row_groups: int
    #: UTF-8 bytes of its text, uncompressed.
    text_bytes: int
    #: Size of the file.
    file_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A data set's files in the order they are read, and where its text comes from."""

    name: str
    source: str
    shards: tuple[ShardEntry, ...]
    #: Tokens of each split, a bos per document included, by the fingerprint of the tokenizer that counted them.
    tokens: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write ``<folder>/manifest.json``."""
        data = {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        (folder / FILE_NAME).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in ``folder``, or None when there is none.

    Raises:
        UserError: when it is damaged, or of a newer version.
    """
    path = folder / FILE_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): make the data set again") from None
    if not isinstance(data, dict) or data.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{path} is not a manifest of format version {FORMAT_VERSION}: make the data set again")
    try:
        shards = tuple(_entry(entry) for entry in data["shards"])
        tokens = {
            str(fingerprint): {str(split): int(count) for split, count in counts.items()}
            for fingerprint, counts in data.get("tokens", {}).items()
        }
        return Manifest(str(data["name"]), str(data["source"]), shards, tokens)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{path} is damaged (parts are missing or malformed): make the data set again") from None


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entry(data: Mapping[str, Any]) -> ShardEntry:
    entry = ShardEntry(**data)
    if Path(entry.name).name != entry.name or entry.split not in ("train", "val"):
        raise ValueError(entry)
    return entry
