"""Own text as a data set: files of text, split by document into training and validation text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from nanochat.data.manifest import Manifest
from nanochat.data.sources import DataSet, Split, open_shard
from nanochat.data.text_files import BLANK_LINE, PLAIN, Reading, Tally, find_files, read_documents
from nanochat.data.writing import SplitWriter, write_documents
from nanochat.errors import UserError
from nanochat.tokenizer.bpe import Tokenizer

#: Share of the documents that validate, when nobody says.
VAL_SHARE = 0.02


def import_text(
    paths: Sequence[Path],
    folder: Path,
    *,
    name: str,
    reading: Reading = PLAIN,
    val_share: float = VAL_SHARE,
    tokenizer: Tokenizer | None = None,
    report: Callable[[Tally], None] = lambda tally: None,
) -> tuple[Manifest, Tally]:
    """Make a data set of files of text.

    Which documents validate follows from the hash of their text, so it stays the same when files are added, and copies
    of a document are on one side; there is at least one.

    Args:
        val_share: share of the documents that validate, above 0 and at most 0.5.
        tokenizer: with one, tokens are counted too.
        report: told of the tally after every document.

    Raises:
        UserError: for files that cannot be read, too few documents, or a disk that refuses; nothing is left behind.
    """
    if not 0 < val_share <= 0.5:
        raise UserError(f"--val-share {val_share:g} is not a share of the documents: give one above 0, up to 0.5")
    if reading.longest < 1:
        raise UserError(f"--longest-document {reading.longest} leaves no text: give 1 or more characters")
    files = find_files(paths)
    tally = Tally()
    source = "imported from " + ", ".join(str(path.resolve()) for path in paths)
    documents = _assign(read_documents(files, reading, tally), val_share, name, tally, report)
    return write_documents(folder, documents, name=name, source=source, tokenizer=tokenizer), tally


def open_as_validation(path: Path, folder: Path, reading: Reading = PLAIN) -> DataSet:
    """The whole of a file (or folder) of text as validation text; ``folder``, which is there, holds its shards.

    Raises:
        UserError: for a file that cannot be read, or without text.
    """
    tally = Tally()
    with SplitWriter(folder, "val") as writer:
        for text in read_documents(find_files([path]), reading, tally):
            writer.add(text)
        writer.finish()
    if not writer.entries:
        raise UserError(f"{path} holds no text: name a file that does")
    shards = tuple(open_shard(folder / entry.name) for entry in writer.entries)
    return DataSet(str(path), folder, (), shards, Manifest(str(path), str(path), tuple(writer.entries)))


def _assign(
    documents: Iterable[str], val_share: float, name: str, tally: Tally, report: Callable[[Tally], None]
) -> Iterator[tuple[Split, str]]:
    """Every document with its split.

    The one of the lowest hash so far is held back, and validates in the end: if any document does, it does.
    """
    threshold = int(val_share * 2**64)
    held: tuple[int, str] | None = None
    trains = False
    for document in documents:
        digest, text = int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big"), document
        tally.count(digest)
        report(tally)
        if held is None or digest < held[0]:
            previous, held = held, (digest, text)
            if previous is None:
                continue
            digest, text = previous
        validates = digest < threshold
        trains = trains or not validates
        yield "val" if validates else "train", text
    if held is None:
        raise UserError(f"data set {name} would have no documents: all that was read is empty")
    if not trains:
        raise UserError(_too_few(tally.documents, val_share))
    yield "val", held[1]


def _too_few(documents: int, val_share: float) -> str:
    if documents == 1:
        return (
            "the text is one document, and at least two are needed, one to train on and one to validate on:"
            f" say where documents end with --split-on (such as {BLANK_LINE}), or add more text"
        )
    return (
        f"all {documents} documents fall into the validation part: lower --val-share (now {val_share:g}),"
        " or add more text"
    )
