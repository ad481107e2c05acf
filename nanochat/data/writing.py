"""Writes documents as a data set: parquet shards and a manifest, whole or not at all, in bounded memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet

from nanochat import atomic
from nanochat.data.manifest import Manifest, ShardEntry, file_sha256, read_manifest
from nanochat.data.sources import COLUMN, Split
from nanochat.errors import UserError
from nanochat.tokenizer.bpe import Tokenizer

#: Documents of a row group. Streams share a file by row groups, so small ones serve many streams.
ROWS_PER_GROUP = 128
#: UTF-8 bytes after which a row group ends even with fewer documents.
GROUP_BYTES = 4_000_000
#: Documents and UTF-8 bytes after which a file ends.
DOCUMENTS_PER_SHARD = 65_536
SHARD_BYTES = 250_000_000

#: Names of the files: the validation text's come last, where programs without our manifest look for it.
_PREFIXES: dict[Split, str] = {"train": "shard", "val": "val"}


def write_shards(
    folder: Path,
    train_docs: Iterable[str],
    val_docs: Iterable[str],
    *,
    name: str,
    source: str,
    tokenizer: Tokenizer | None = None,
    rows_per_group: int = ROWS_PER_GROUP,
    documents_per_shard: int = DOCUMENTS_PER_SHARD,
) -> Manifest:
    """Write documents that are split already; see :func:`write_documents`."""

    def documents() -> Iterator[tuple[Split, str]]:
        for text in train_docs:
            yield "train", text
        for text in val_docs:
            yield "val", text

    return write_documents(
        folder,
        documents(),
        name=name,
        source=source,
        tokenizer=tokenizer,
        rows_per_group=rows_per_group,
        documents_per_shard=documents_per_shard,
    )


def write_documents(
    folder: Path,
    documents: Iterable[tuple[Split, str]],
    *,
    name: str,
    source: str,
    tokenizer: Tokenizer | None = None,
    rows_per_group: int = ROWS_PER_GROUP,
    documents_per_shard: int = DOCUMENTS_PER_SHARD,
) -> Manifest:
    """Write documents, each with its split, as a data set with a manifest; the folder appears whole or not at all.

    Args:
        documents: read once; a row group's worth of each split is in memory at a time.
        name: of the data set.
        source: where the text comes from, in words. A set of the same source is replaced, another one never.
        tokenizer: with one, tokens are counted too.

    Raises:
        UserError: when one of the splits is empty, something else lies in ``folder``, or the disk refuses; and what
            ``documents`` raises.
    """
    try:
        check_replaceable(folder, source)
        folder.parent.mkdir(parents=True, exist_ok=True)
        atomic.remove_leftovers(folder.parent)
        with atomic.new_folder(folder) as temporary:
            manifest = _write(temporary, documents, name, source, tokenizer, rows_per_group, documents_per_shard)
            manifest.write(temporary)
    except OSError as error:
        raise UserError(
            f"the data set cannot be written to {folder} ({error.strerror or error}): free some space, or check that"
            " the folder can be written"
        ) from error
    return manifest


def check_replaceable(folder: Path, source: str) -> None:
    """Raise :class:`UserError` unless ``folder`` is free, or holds a data set of the same source."""
    if not folder.exists():
        return
    present = read_manifest(folder) if folder.is_dir() else None
    if present is None or present.source != source:
        raise UserError(f"{folder} is there already and holds something else: choose another --name, or move it away")


def _write(
    folder: Path,
    documents: Iterable[tuple[Split, str]],
    name: str,
    source: str,
    tokenizer: Tokenizer | None,
    rows_per_group: int,
    documents_per_shard: int,
) -> Manifest:
    with contextlib.ExitStack() as stack:
        writers: dict[Split, SplitWriter] = {
            split: stack.enter_context(
                SplitWriter(folder, split, rows_per_group, documents_per_shard, tokenizer=tokenizer)
            )
            for split in ("train", "val")
        }
        for split, text in documents:
            writers[split].add(text)
        for split, writer in writers.items():
            writer.finish()
            if not writer.entries:
                raise UserError(f"data set {name} would have no {split} documents: give it more text")
    entries = [entry for writer in writers.values() for entry in writer.entries]
    counts: dict[str, int] = {split: writer.tokens for split, writer in writers.items()}
    return Manifest(name, source, tuple(entries), {tokenizer.fingerprint: counts} if tokenizer else {})


class SplitWriter:
    """Appends the documents of one split to its files, a row group at a time.

    Attributes:
        entries: of the files that are finished.
        tokens: counted so far, a bos per document included; 0 without a tokenizer.
    """

    def __init__(
        self,
        folder: Path,
        split: Split,
        rows_per_group: int = ROWS_PER_GROUP,
        documents_per_shard: int = DOCUMENTS_PER_SHARD,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.entries: list[ShardEntry] = []
        self.tokens = 0
        self._folder, self._split, self._tokenizer = folder, split, tokenizer
        self._rows_per_group, self._documents_per_shard = rows_per_group, documents_per_shard
        #: Documents that wait for their row group, and their UTF-8 bytes.
        self._waiting: list[str] = []
        self._waiting_bytes = 0
        #: The open file, and what it holds.
        self._writer: pyarrow.parquet.ParquetWriter | None = None
        self._documents = self._row_groups = self._text_bytes = 0

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):  # what went wrong before is what counts
                self._writer.close()

    def add(self, text: str) -> None:
        """Append one document."""
        self._waiting.append(text)
        self._waiting_bytes += len(text.encode())
        of_file = self._documents + len(self._waiting)
        if (
            len(self._waiting) >= self._rows_per_group
            or self._waiting_bytes >= GROUP_BYTES
            or of_file >= self._documents_per_shard
        ):
            self._write_group()

    def finish(self) -> None:
        """Write what waits, and finish the last file."""
        if self._waiting:
            self._write_group()
        self._finish_file()

    def _write_group(self) -> None:
        path = self._path()
        if self._writer is None:
            self._writer = pyarrow.parquet.ParquetWriter(path, pyarrow.schema([(COLUMN, pyarrow.string())]))
        self._writer.write_table(pyarrow.table({COLUMN: pyarrow.array(self._waiting, pyarrow.string())}))
        if self._tokenizer is not None:
            self.tokens += sum(1 + len(ids) for ids in self._tokenizer.encode_batch(self._waiting))
        self._documents += len(self._waiting)
        self._text_bytes += self._waiting_bytes
        self._row_groups += 1
        self._waiting, self._waiting_bytes = [], 0
        if self._documents >= self._documents_per_shard or self._text_bytes >= SHARD_BYTES:
            self._finish_file()

    def _finish_file(self) -> None:
        if self._writer is None:
            return
        path, writer, self._writer = self._path(), self._writer, None
        writer.close()
        self.entries.append(
            ShardEntry(
                name=path.name,
                split=self._split,
                documents=self._documents,
                row_groups=self._row_groups,
                text_bytes=self._text_bytes,
                file_bytes=path.stat().st_size,
                sha256=file_sha256(path),
            )
        )
        self._documents = self._row_groups = self._text_bytes = 0

    def _path(self) -> Path:
        return self._folder / f"{_PREFIXES[self._split]}_{len(self.entries):05d}.parquet"
