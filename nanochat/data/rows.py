"""Rows of tokens from one data set, continued exactly from a saved state.

The state holds references to documents, never tokens: after a stop the waiting pieces are read and tokenised again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanochat.data.documents import Cursor, DocumentStream, Reference
from nanochat.data.packing import Packing, TurnBuffer
from nanochat.data.sources import Shard
from nanochat.tokenizer.bpe import Tokenizer

#: With ``keep``, a longer document is read and tokenised in parts of at most this many characters.
LONGEST_PART = 65_536
#: With ``keep``, nothing more is fetched while this many tokens wait.
BUFFER_TOKENS = 4 * 2**20
#: With ``keep``, the rest of a document that filled a row queues behind this many others: long documents go on soon,
#: and yet neighbouring rows are of different ones.
REST_DELAY = 16
#: With ``keep``, one fetch ends once it holds this many characters.
FETCH_CHARS = 2**20


@dataclass
class Counters:
    """What has been put into rows so far. Rows hold ``tokens - cropped_tokens + added_tokens`` tokens."""

    #: Documents begun (with ``keep``: parts begun, of those too long to be read in one).
    documents: int = 0
    #: Tokens of documents, a bos each included; with ``bestfit`` also the cropped ones.
    tokens: int = 0
    #: Tokens lost where a document was cropped to fill a row.
    cropped_tokens: int = 0
    #: A bos before the rest of a document that was cut, or in the last place of a row that nothing else fits.
    added_tokens: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


@dataclass(frozen=True, eq=False)
class _Piece:
    """A document, or what is left of it.

    Attributes:
        offset: tokens of the text before this piece.
        ids: begin with bos.
    """

    reference: Reference
    offset: int
    ids: NDArray[np.int32]

    def rest(self, taken: int) -> _Piece:
        """What is left once the first ``taken`` of ``ids`` are in a row: bos and the others."""
        ids = self.ids[taken - 1 :].copy()
        ids[0] = self.ids[0]
        return _Piece(self.reference, self.offset + taken - 1, ids)


class RowStream:
    """Endless rows of one stream of a split; ``state()`` between any two rows continues it exactly.

    Args:
        shards: the files of the split.
        stream, num_streams: stream s of S has row groups s, s + S, … of each file, files in order, for ever.
        packing: see :mod:`nanochat.data.packing`.
        buffer_documents: before each pick documents are fetched while fewer than this wait. With ``keep`` never more
            than an epoch has, so that small texts are read evenly, and none while :data:`BUFFER_TOKENS` tokens wait.
        fetch_documents: how many at a time, cut within a row group.
        state: of :meth:`state`, to go on from there.

    With ``keep``, every row begins with the piece whose turn it is, and so takes T tokens of what comes before the
    others, or the last of a document. Nothing that comes later goes before what waits; so none waits for more rows than
    the tokens that wait with it ÷ T, plus the pieces that wait with it.

    Raises:
        UserError: when there is no text for this stream, or ``state`` does not belong to these files.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        tokenizer: Tokenizer,
        stream: int,
        num_streams: int,
        packing: Packing,
        buffer_documents: int,
        fetch_documents: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        assert min(buffer_documents, fetch_documents) >= 1
        self._tokenizer = tokenizer
        self._bos = np.array([tokenizer.bos_id], dtype=np.int32)
        self._keep = packing == "keep"
        self._buffer: TurnBuffer[_Piece] = TurnBuffer()
        self._waiting_tokens = 0
        cursor = None if state is None else Cursor(**state["next"])
        self._documents = DocumentStream(shards, stream, num_streams, cursor, LONGEST_PART if self._keep else None)
        self._buffer_documents, self._fetch_documents = buffer_documents, fetch_documents
        if self._keep:
            self._buffer_documents = min(buffer_documents, self._documents.num_documents)
            self._fetch_documents = min(fetch_documents, max(1, self._buffer_documents // 4))
        #: Of the last fetch, by the family's names: file and row group from 0, epoch from 1.
        self.position = {"pq_idx": 0, "rg_idx": 0, "epoch": 1}
        self.counters = Counters()
        #: Documents fetched so far: the turn of the next one.
        self._fetched = 0
        if state is None:
            self._refill()  # at once, so that a text without words is refused before anything is written
            return
        self.position = dict(state["position"])
        self.counters = Counters(**state["counters"])
        self._fetched = int(state["fetched"])
        waiting = [(Reference(*place), offset, turn) for *place, offset, turn in state["waiting"]]
        texts = self._documents.texts_of([reference for reference, _, _ in waiting])
        for (reference, offset, turn), ids in zip(waiting, tokenizer.encode_batch(texts), strict=True):
            self._add(reference, offset, turn, ids)

    def fill(self, row: NDArray[np.int64]) -> None:
        """Write the next row into ``row``, an array of its length."""
        filled = 0
        while filled < len(row):
            self._refill()
            space = len(row) - filled
            ids = self._take_keeping(space, filled == 0) if self._keep else self._take_cropping(space)
            row[filled : filled + len(ids)] = ids
            filled += len(ids)

    def state(self) -> dict[str, Any]:
        """Everything needed to go on from here, ready for JSON."""
        return {
            "next": dataclasses.asdict(self._documents.cursor),
            "position": dict(self.position),
            "counters": dataclasses.asdict(self.counters),
            "fetched": self._fetched,
            "waiting": [[*piece.reference, piece.offset, turn] for piece, turn in self._buffer.waiting_in_turn()],
        }

    def _take_cropping(self, space: int) -> NDArray[np.int32]:
        """The longest piece that fits, else the shortest, cropped."""
        piece = self._buffer.take_best_fit(space) or self._buffer.take_shortest()
        ids = piece.ids[:space]
        self.counters.documents += 1
        self.counters.tokens += len(piece.ids)
        self.counters.cropped_tokens += len(piece.ids) - len(ids)
        return ids

    def _take_keeping(self, space: int, first: bool) -> NDArray[np.int32]:
        """A row begins with the piece whose turn it is; then the longest that fits, else a part of the longest one."""
        fitting = self._buffer.take_next() if first else self._buffer.take_best_fit(space)
        if fitting is None and space == 1:  # room for a bos alone, which ends the document before
            self.counters.added_tokens += 1
            return self._bos
        piece = fitting or self._buffer.longest()
        ids = piece.ids[:space]
        if len(piece.ids) > space:
            rest = piece.rest(space)
            if fitting is None:
                self._buffer.shorten_longest(len(rest.ids), rest)
            else:
                self._buffer.add_behind(len(rest.ids), rest, REST_DELAY)
        self._waiting_tokens -= len(ids) - (len(ids) < len(piece.ids))
        begins = piece.offset == 0
        self.counters.documents += begins
        self.counters.tokens += len(ids) - (not begins)
        self.counters.added_tokens += not begins
        return ids

    def _refill(self) -> None:
        while len(self._buffer) < self._buffer_documents and not self._has_enough_tokens():
            fetched = self._documents.fetch(self._fetch_documents, FETCH_CHARS if self._keep else None)
            cursor = self._documents.cursor
            self.position = {"pq_idx": cursor.shard, "rg_idx": cursor.row_group, "epoch": cursor.epoch}
            all_ids = self._tokenizer.encode_batch([text for _, text in fetched])
            for (reference, _), ids in zip(fetched, all_ids, strict=True):
                self._add(reference, 0, self._fetched, ids)
                self._fetched += 1

    def _has_enough_tokens(self) -> bool:
        return self._keep and self._waiting_tokens >= BUFFER_TOKENS

    def _add(self, reference: Reference, offset: int, turn: int, ids: Sequence[int]) -> None:
        """Let a document wait whose text has the tokens ``ids``."""
        piece = _Piece(reference, offset, np.concatenate([self._bos, np.array(ids[offset:], dtype=np.int32)]))
        self._buffer.add_in_turn(len(piece.ids), piece, turn)
        self._waiting_tokens += len(piece.ids)
