"""Files of text as streams of documents: .txt, .md, .jsonl and .parquet.

A .txt or .md file is one document, unless told where documents end. A document longer than
:data:`LONGEST_DOCUMENT` characters becomes several, cut at paragraphs: so one book, too, gives a
validation part, and no text is too long for the memory there is.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow
import pyarrow.parquet

from nanochat.data import json_lines
from nanochat.data.parts import end_of_part
from nanochat.data.sources import COLUMN, open_shard
from nanochat.errors import UserError

#: Characters of a document at most.
LONGEST_DOCUMENT = 100_000
#: The word for a separator of documents that is a blank line.
BLANK_LINE = "blank-line"

PLAIN_SUFFIXES = (".txt", ".md")
SUFFIXES = (*PLAIN_SUFFIXES, ".jsonl", ".parquet")

#: Characters read at a time from a plain file, and documents from a parquet file.
_BLOCK = 65_536
_PARQUET_ROWS = 64
#: Documents up to which repeated ones are counted; each costs some 80 bytes of memory.
_COUNT_REPEATED_UP_TO = 5_000_000


@dataclass(frozen=True)
class Reading:
    """How files become documents.

    Attributes:
        split_on: in plain files, the line that separates documents, or :data:`BLANK_LINE`; None: a file is one.
        column: of parquet files, and name of the text in JSON lines.
        longest: characters after which a document is cut into several.
    """

    split_on: str | None = None
    column: str = COLUMN
    longest: int = LONGEST_DOCUMENT


#: Every plain file a document, the column ``text``.
PLAIN = Reading()


@dataclass
class Tally:
    """What has been read so far."""

    #: Bytes of the files.
    file_bytes: int = 0
    documents: int = 0
    #: Documents left out because they were empty or blank.
    empty: int = 0
    #: Documents that were cut into several (which all count as documents).
    cut: int = 0
    #: Documents that had come before, word for word; None when there are too many to tell.
    repeated: int | None = 0
    _hashes: set[int] = field(default_factory=set, repr=False)

    def count(self, digest: int) -> None:
        """Count a document by the hash of its text."""
        self.documents += 1
        if self.repeated is None:
            return
        self.repeated += digest in self._hashes
        self._hashes.add(digest)
        if len(self._hashes) > _COUNT_REPEATED_UP_TO:
            self.repeated = None
            self._hashes.clear()


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files of text that ``paths`` name: themselves, or all in a folder and the folders in it, by name.

    Raises:
        UserError: when a path is absent or of another kind, or a folder holds no text.
    """
    found: list[Path] = []
    for path in paths:
        try:
            path.stat()
        except PermissionError:
            raise UserError(f"{path} cannot be read (no permission): check your rights") from None
        except OSError:
            raise UserError(f"there is no file or folder {path}: check the name") from None
        if path.is_dir():
            inside = [each for each in path.rglob("*") if each.suffix.lower() in SUFFIXES and each.is_file()]
            visible = [each for each in inside if not any(part[0] == "." for part in each.relative_to(path).parts)]
            if not visible:
                raise UserError(f"{path} holds no files of text ({', '.join(SUFFIXES)}): name a folder that does")
            found += sorted(visible)
        elif path.suffix.lower() not in SUFFIXES:
            raise UserError(f"{path} is not one of {', '.join(SUFFIXES)}: convert it, or rename it to what it is")
        else:
            found.append(path)
    return found


def read_documents(files: Iterable[Path], reading: Reading, tally: Tally) -> Iterator[str]:
    """The documents of files, none blank, none longer than ``reading.longest``; ``tally`` counts along.

    Raises:
        UserError: naming file and line (or row) of what is wrong.
    """
    for path in files:
        before = tally.file_bytes
        suffix = path.suffix.lower()
        if suffix in PLAIN_SUFFIXES:
            pieces = _plain(path, reading, tally)
        elif suffix == ".jsonl":
            pieces = _json_lines(path, reading, tally)
        else:
            pieces = _parquet(path, reading, tally)
        for text in pieces:
            if text.strip():
                yield text
            else:
                tally.empty += 1
        tally.file_bytes = before + path.stat().st_size


def _cut(blocks: Iterable[str | None], reading: Reading, tally: Tally) -> Iterator[str]:
    """Documents from blocks of text; None ends one. At most one document of ``longest`` and a block are held."""
    text, was_cut = "", False
    for block in blocks:
        if block is None:
            if text or not was_cut:
                yield text
            text, was_cut = "", False
            continue
        text += block
        while len(text) > reading.longest:
            tally.cut += not was_cut
            was_cut = True
            end = end_of_part(text, 0, reading.longest)
            yield text[:end]
            text = text[end:]


def _plain(path: Path, reading: Reading, tally: Tally) -> Iterator[str]:
    documents = _cut(_plain_blocks(path, reading.split_on, tally), reading, tally)
    return documents if reading.split_on is None else (text.strip("\n") for text in documents)


def _plain_blocks(path: Path, split_on: str | None, tally: Tally) -> Iterator[str | None]:
    """Text of a plain file, line ends as ``\\n``; None where a document ends."""
    before = tally.file_bytes
    lines = 0
    try:
        with path.open("rb") as raw, io.TextIOWrapper(raw, encoding="utf-8-sig") as file:
            begins_line, open_document = True, False
            while block := file.read(_BLOCK) if split_on is None else file.readline(_BLOCK):
                if "\0" in block:
                    number = lines + block[: block.index("\0")].count("\n") + 1
                    raise UserError(f"{path}, line {number} holds a NUL byte: it is not text, or not in UTF-8")
                lines += block.count("\n")
                tally.file_bytes = before + raw.tell()
                if begins_line and _separates(block, split_on):
                    if open_document:
                        yield None
                    open_document = False
                else:
                    open_document = True
                    yield block
                begins_line = block.endswith("\n")
            if open_document or not lines:
                yield None
    except UnicodeDecodeError:
        raise UserError(f"{path}, line {_undecodable_line(path)} is not UTF-8: save the file as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check your rights") from None


def _separates(line: str, split_on: str | None) -> bool:
    if split_on is None:
        return False
    return not line.strip() if split_on == BLANK_LINE else line.strip() == split_on.strip()


def _undecodable_line(path: Path) -> int:
    """Number of the first line that is not UTF-8; a line end is never part of a longer character."""
    with path.open("rb") as file:
        number, begins_line, rest = 1, True, b""
        while block := file.readline(_BLOCK):
            number += begins_line and file.tell() > len(block)
            begins_line = block.endswith(b"\n")
            text = rest + block
            try:
                text.decode("utf-8")
                rest = b""
            except UnicodeDecodeError as error:
                rest = text[error.start :]
                if begins_line or len(rest) > 3:
                    return number
    return number


def _json_lines(path: Path, reading: Reading, tally: Tally) -> Iterator[str]:
    before = tally.file_bytes
    for line in json_lines.read_lines(path):
        value = json_lines.parse(line)
        text = value.get(reading.column) if isinstance(value, dict) else None
        if not isinstance(text, str):
            raise UserError(f"{line.where} {_lacks_text(value, reading.column)}")
        tally.file_bytes = before + line.bytes_read
        yield from _cut((text, None), reading, tally)


def _lacks_text(value: object, column: str) -> str:
    if isinstance(value, list) or (isinstance(value, dict) and "messages" in value and column not in value):
        return "is a conversation, not text: check the file with nanochat dataset check, train on it with nanochat sft"
    if not isinstance(value, dict):
        return f'is not an object: write {{"{column}": "…"}}'
    if column in value:
        return f"has a {column!r} that is no string: write its text as a string"
    return f"has no {column!r} (it has {', '.join(map(str, value)) or 'nothing'}): name the text with --column"


def _parquet(path: Path, reading: Reading, tally: Tally) -> Iterator[str]:
    before, size = tally.file_bytes, path.stat().st_size
    rows = sum(open_shard(path, reading.column).row_groups)
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[reading.column]):
                for value in batch.column(0):
                    row += 1
                    yield from _cut((value.as_py() or "", None), reading, tally)
                tally.file_bytes = before + size * row // max(rows, 1)
    except UnicodeDecodeError:
        raise UserError(f"{path}, row {row} is not UTF-8: write its text as UTF-8 strings") from None
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read after row {row} ({error}): fetch or write the file again") from None
