"""Where text comes from: folders of parquet files with a ``text`` column, one document a row.

The last file by name is the validation text, unless a ``manifest.json`` in the folder says otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow
import pyarrow.parquet

from nanochat.data.manifest import Manifest, read_manifest
from nanochat.errors import UserError

Split = Literal["train", "val"]

#: Folders of text in a base folder of the family: today's, and that of before March 2026.
FAMILY_FOLDER = "base_data_climbmix"
OLD_FAMILY_FOLDER = "base_data"

COLUMN = "text"

#: A set without a manifest that is no larger is told apart by all of its content: about a second of reading.
HASHED_BYTES = 2**30


@dataclass(frozen=True)
class Shard:
    """One parquet file: how many documents each of its row groups holds."""

    path: Path
    row_groups: tuple[int, ...]


@dataclass(frozen=True)
class DataSet:
    """Text to train on and text to validate on.

    Attributes:
        name: by which :func:`resolve_data` finds it again: a name in the base folder, or else a path.
        manifest: of the folder, when it has one.
    """

    name: str
    folder: Path
    train: tuple[Shard, ...]
    val: tuple[Shard, ...]
    manifest: Manifest | None = None

    def shards(self, split: Split) -> tuple[Shard, ...]:
        return self.train if split == "train" else self.val

    def documents(self, split: Split) -> int:
        """How many documents a split has."""
        return sum(sum(shard.row_groups) for shard in self.shards(split))

    def text_bytes(self, split: Split) -> int | None:
        """UTF-8 bytes of a split's text; None when no manifest tells."""
        if self.manifest is None:
            return None
        return sum(entry.text_bytes for entry in self.manifest.shards if entry.split == split)

    def fingerprint(self, split: Split | None = None) -> str:
        """SHA-256 (hex) that tells another text, or another order of it, apart.

        Of the files' hashes in the manifest; without one, of their content where that is small, else of their
        names, sizes and the directories at their ends.

        Args:
            split: of this split alone; of both when not given.
        """
        splits: tuple[Split, ...] = ("train", "val") if split is None else (split,)
        whole = sum(shard.path.stat().st_size for shard in (*self.train, *self.val)) <= HASHED_BYTES
        hashes = {entry.name: entry.sha256 for entry in self.manifest.shards} if self.manifest else {}
        parts: list[Any] = []
        for each in splits:
            for shard in self.shards(each):
                name = shard.path.name
                parts.append([each, hashes.get(name) or [name, shard.row_groups, _content_hash(shard.path, whole)]])
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _content_hash(path: Path, whole: bool) -> str:
    """SHA-256 of a file; of its size and its last megabyte, where parquet keeps its directory, when not whole."""
    with path.open("rb") as file:
        if whole:
            return hashlib.file_digest(file, "sha256").hexdigest()
        size = file.seek(0, 2)
        file.seek(max(0, size - 2**20))
        return hashlib.sha256(str(size).encode() + file.read()).hexdigest()


def open_data_set(folder: Path, name: str | None = None) -> DataSet:
    """Look into a folder of shards; every file's directory is read, none of its text.

    Raises:
        UserError: when the folder, its text or its training text is missing, or a file is not what it should be.
    """
    if not folder.is_dir():
        raise UserError(
            f"there is no folder {folder}: name a folder of parquet files, or make one with nanochat dataset"
        )
    paths = sorted(folder.glob("*.parquet"))
    if not paths:
        raise UserError(f"{folder} holds no parquet files: put some with a column named {COLUMN!r} there")
    manifest = read_manifest(folder)
    if manifest is None:
        train, val = paths[:-1], paths[-1:]
    else:
        train, val = _paths_of(manifest, folder, paths)
    if not train:
        raise UserError(
            f"{folder} holds one file, {paths[0].name}, and the last file is the validation text:"
            " add another one to train on, or split it by document with nanochat dataset import"
        )
    if not val:
        raise UserError(f"the manifest in {folder} names no validation file: make the data set again")
    shards = [tuple(open_shard(path) for path in split) for split in (train, val)]
    for split_name, of_split in zip(("training", "validation"), shards, strict=True):
        if not any(sum(shard.row_groups) for shard in of_split):
            raise UserError(f"the {split_name} files in {folder} hold no documents: replace them")
    return DataSet(name or str(folder.resolve()), folder, shards[0], shards[1], manifest)


def resolve_data(name_or_path: str | None, base: Path) -> tuple[DataSet, str | None]:
    """The data set of that name (``<base>/data/<name>``) or folder; without one, what lies in the base folder.

    Without a name that is the family's folder of today, else its old one, else the only set in ``<base>/data``.

    Returns:
        The data set, and what should be said aloud about the choice.

    Raises:
        UserError: when there is none, or more than one to choose from; and those of :func:`open_data_set`.
    """
    if name_or_path is not None:
        return _named(name_or_path, base), None
    today, old = (any((base / name).glob("*.parquet")) for name in (FAMILY_FOLDER, OLD_FAMILY_FOLDER))
    if today:
        notice = f"reading {FAMILY_FOLDER}, not {OLD_FAMILY_FOLDER}, which is there too" if old else None
        return open_data_set(base / FAMILY_FOLDER, FAMILY_FOLDER), notice
    if old:
        notice = f"reading {OLD_FAMILY_FOLDER}, because there is no {FAMILY_FOLDER}: figures of the two do not compare"
        return open_data_set(base / OLD_FAMILY_FOLDER, OLD_FAMILY_FOLDER), notice
    present = _names(base)
    if len(present) == 1:
        return open_data_set(base / "data" / present[0], present[0]), None
    if present:
        raise UserError(f"there are {len(present)} data sets in {base / 'data'}: choose --data {' or '.join(present)}")
    raise UserError(f"there is no data in {base}: make a set with nanochat dataset, or name a folder with --data")


def open_shard(path: Path, column: str = COLUMN) -> Shard:
    """Look into one parquet file, whose ``column`` must hold strings.

    Raises:
        UserError: when it cannot be read, or has no such column.
    """
    if not path.stat().st_size:
        raise UserError(f"{path} is empty: fetch it again")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} is not a readable parquet file ({error}): fetch it again") from None
    index = schema.get_field_index(column)
    if index < 0:
        raise UserError(
            f"{path} has no column {column!r} (it has {', '.join(schema.names)}): rename the one with the text"
        )
    kind = schema.field(index).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise UserError(f"column {column!r} of {path} holds {kind}, not strings: write its text as strings")
    return Shard(path, tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)))


def read_texts(shard: Shard, row_group: int) -> list[str]:
    """The documents of one row group; a missing value is an empty one.

    Raises:
        UserError: when the file cannot be read.
    """
    try:
        with pyarrow.parquet.ParquetFile(shard.path) as file:
            values = file.read_row_group(row_group, columns=[COLUMN]).column(COLUMN).to_pylist()
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(
            f"row group {row_group} of {shard.path} cannot be read ({error}): fetch the file again"
        ) from None
    return [value or "" for value in values]


def iterate_texts(data_set: DataSet, split: Split) -> Iterator[str]:
    """All documents of a split, in the order of the files; one row group is in memory at a time."""
    for shard in data_set.shards(split):
        for row_group in range(len(shard.row_groups)):
            yield from read_texts(shard, row_group)


def _named(name_or_path: str, base: Path) -> DataSet:
    places = [base / "data" / name_or_path]
    if name_or_path in (FAMILY_FOLDER, OLD_FAMILY_FOLDER):
        places.append(base / name_or_path)
    for place in places:
        if Path(name_or_path).name == name_or_path and place.is_dir():
            return open_data_set(place, name_or_path)
    path = Path(name_or_path).expanduser()
    if not path.is_dir():
        present = ", ".join(_names(base)) or "none"
        raise UserError(f"there is no data set or folder {name_or_path!r} (in {base / 'data'}: {present})")
    return open_data_set(path)


def _names(base: Path) -> list[str]:
    return sorted(path.name for path in (base / "data").glob("[!.]*") if path.is_dir())


def _paths_of(manifest: Manifest, folder: Path, present: list[Path]) -> tuple[list[Path], list[Path]]:
    """Training and validation files as the manifest has them, which must be all there are, in their sizes."""
    unknown = {path.name for path in present} - {entry.name for entry in manifest.shards}
    if unknown:
        raise UserError(
            f"{folder / min(unknown)} is not in the manifest beside it: remove it, or make the data set again"
        )
    for entry in manifest.shards:
        path = folder / entry.name
        if not path.is_file() or path.stat().st_size != entry.file_bytes:
            raise UserError(f"{path} is missing or not {entry.file_bytes:,} bytes long: make the data set again")
    train, val = ([folder / e.name for e in manifest.shards if e.split == split] for split in ("train", "val"))
    return train, val
