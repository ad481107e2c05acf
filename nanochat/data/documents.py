"""One stream's share of a split, document by document, for ever; every document has a reference."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nanochat.data.parts import end_of_part
from nanochat.data.sources import Shard, read_texts
from nanochat.errors import UserError


class Reference(NamedTuple):
    """Where a document, or a part of a long one, begins; counted from 0."""

    shard: int
    row_group: int
    row: int
    char: int = 0


@dataclass(frozen=True)
class Cursor:
    """Where the next fetch starts. Epochs count from 1; ``row`` may be one past the last of its row group."""

    epoch: int
    shard: int
    row_group: int
    row: int
    char: int = 0


class DocumentStream:
    """Reads every S-th row group of each file, files in order, round and round.

    Args:
        shards: the files of a split.
        stream: which of the S streams this is, from 0; it has row groups ``stream``, ``stream + S``, … of each file.
        num_streams: S.
        cursor: where to go on; at the beginning when not given.
        longest: characters after which a document is given in parts, each fetched like a document; None never cuts.

    Raises:
        UserError: when no file has a row group for this stream, or ``cursor`` lies outside the files.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        stream: int,
        num_streams: int,
        cursor: Cursor | None = None,
        longest: int | None = None,
    ) -> None:
        assert 0 <= stream < num_streams
        self._shards = shards
        self._longest = longest
        self._places = [
            (index, row_group)
            for index, shard in enumerate(shards)
            for row_group in range(stream, len(shard.row_groups), num_streams)
            if shard.row_groups[row_group]
        ]
        if not self._places:
            raise UserError(
                f"no file in {shards[0].path.parent} has a row group for stream {stream + 1} of {num_streams}:"
                " use fewer streams, or write the files in smaller row groups"
            )
        #: Place of the last fetch; None before the first one.
        self._place: int | None = None
        self._epoch, self._row, self._char = 1, 0, 0
        # An epoch joined halfway may have had its text before.
        self._epoch_has_text = cursor is not None
        self._texts: list[str] = []
        if cursor is not None:
            self._go_to(cursor)

    @property
    def cursor(self) -> Cursor:
        """Where the next fetch starts."""
        shard, row_group = self._places[self._place or 0]
        return Cursor(self._epoch, shard, row_group, self._row, self._char)

    @property
    def num_documents(self) -> int:
        """Documents of one epoch of this stream."""
        return sum(self._shards[shard].row_groups[row_group] for shard, row_group in self._places)

    def fetch(self, num_documents: int, max_chars: int | None = None) -> list[tuple[Reference, str]]:
        """The next documents, up to ``num_documents`` but never beyond a row group; at least one.

        No further one is fetched once they hold ``max_chars`` characters.

        Raises:
            UserError: when a whole epoch holds only empty documents, or a file cannot be read.
        """
        if self._place is None or self._row >= len(self._texts):
            self._next_row_group()
        assert self._place is not None
        shard, row_group = self._places[self._place]
        fetched: list[tuple[Reference, str]] = []
        chars = 0
        while len(fetched) < num_documents and self._row < len(self._texts) and (not max_chars or chars < max_chars):
            text, end = self._part(self._texts[self._row], self._char)
            fetched.append((Reference(shard, row_group, self._row, self._char), text))
            self._row, self._char = (self._row, end) if end < len(self._texts[self._row]) else (self._row + 1, 0)
            chars += len(text)
        self._epoch_has_text = self._epoch_has_text or chars > 0
        return fetched

    def texts_of(self, references: Sequence[Reference]) -> list[str]:
        """The documents or parts that ``references`` point at; every row group is read once.

        Raises:
            UserError: when there is no such document.
        """
        found = [""] * len(references)
        by_group = sorted(range(len(references)), key=lambda index: references[index][:2])
        for (shard, row_group), indices in itertools.groupby(by_group, key=lambda index: references[index][:2]):
            if not (0 <= shard < len(self._shards) and 0 <= row_group < len(self._shards[shard].row_groups)):
                raise self._changed()
            texts = read_texts(self._shards[shard], row_group)
            for index in indices:
                _, _, row, char = references[index]
                if not (0 <= row < len(texts) and 0 <= char <= len(texts[row])):
                    raise self._changed()
                found[index] = self._part(texts[row], char)[0]
        return found

    def _part(self, text: str, start: int) -> tuple[str, int]:
        """The part of a document that begins at ``start``, and where it ends."""
        if self._longest is None:
            return text[start:], len(text)
        end = end_of_part(text, start, self._longest)
        return text[start:end], end

    def _next_row_group(self) -> None:
        place = 0 if self._place is None else self._place + 1
        if place == len(self._places):
            if not self._epoch_has_text:
                folder = self._shards[0].path.parent
                raise UserError(f"all documents of this stream in {folder} are empty: check the column with the text")
            place, self._epoch, self._epoch_has_text = 0, self._epoch + 1, False
        self._enter(place)

    def _enter(self, place: int) -> None:
        shard, row_group = self._places[place]
        self._place, self._row, self._char = place, 0, 0
        self._texts = read_texts(self._shards[shard], row_group)

    def _go_to(self, cursor: Cursor) -> None:
        try:
            self._enter(self._places.index((cursor.shard, cursor.row_group)))
        except ValueError:
            raise self._changed() from None
        if cursor.epoch < 1 or not 0 <= cursor.row <= len(self._texts):
            raise self._changed()
        if cursor.char and not (cursor.row < len(self._texts) and 0 < cursor.char < len(self._texts[cursor.row])):
            raise self._changed()
        self._epoch, self._row, self._char = cursor.epoch, cursor.row, cursor.char

    def _changed(self) -> UserError:
        folder = self._shards[0].path.parent
        return UserError(f"the text in {folder} is not the one this run read so far: put the earlier files back")
