"""Rows of tokens for pretraining, packed by best fit, continued exactly from a saved state.

The state holds references to documents, never tokens: after a stop the waiting documents are read and tokenised again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanochat.data.documents import Cursor, DocumentStream, Reference
from nanochat.data.packing import BestFitBuffer
from nanochat.data.sources import DataSet, Split
from nanochat.errors import UserError
from nanochat.tokenizer.bpe import Tokenizer

STATE_VERSION = 1


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of text.

    Attributes:
        inputs: (B, T) token ids.
        targets: (B, T) the token that follows each of them.
        position: of the last fetch, by the family's names: file ``pq_idx`` and row group ``rg_idx`` from 0, ``epoch``
            from 1.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    position: dict[str, int]


@dataclass
class Counters:
    """What a loader has put into rows so far."""

    documents: int = 0
    #: Tokens of those documents, their bos and the cropped ones included.
    tokens: int = 0
    #: Tokens lost where a document was cropped to fill a row.
    cropped_tokens: int = 0


@dataclass(frozen=True, eq=False)
class _Document:
    reference: Reference
    ids: NDArray[np.int32]


class PretrainLoader:
    """Endless batches of one stream's text; ``state()`` at any batch boundary continues it exactly.

    A row takes T + 1 tokens: of the waiting documents, each with a bos in front, always the longest that still fits;
    when none fits, the shortest, cropped to fill the row.

    Args:
        split: ``train`` or ``val``.
        batch_size: rows B of a batch.
        sequence_len: T.
        stream, num_streams: which share of the row groups to read, see :class:`DocumentStream`.
        buffer_documents: how many documents wait to be packed, at least.
        fetch_documents: how many are read and tokenised at a time, at most.
        state: of :meth:`state`, to go on from there.

    Raises:
        UserError: when this stream has no text, or ``state`` does not belong to it.
    """

    def __init__(
        self,
        data_set: DataSet,
        split: Split,
        tokenizer: Tokenizer,
        batch_size: int,
        sequence_len: int,
        stream: int = 0,
        num_streams: int = 1,
        buffer_documents: int = 1000,
        fetch_documents: int = 128,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        assert min(batch_size, sequence_len, buffer_documents, fetch_documents) >= 1
        self._tokenizer = tokenizer
        self._shape = batch_size, sequence_len + 1
        self._buffer_documents, self._fetch_documents = buffer_documents, fetch_documents
        self._identity = {"split": split, "stream": stream, "num_streams": num_streams}
        self._buffer: BestFitBuffer[_Document] = BestFitBuffer()
        self._position = {"pq_idx": 0, "rg_idx": 0, "epoch": 1}
        self.counters = Counters()
        shards = data_set.shards(split)
        if state is None:
            self._documents = DocumentStream(shards, stream, num_streams)
            self._refill()  # at once, so that a text without words is refused before anything is written
            return
        saved = _checked(state, self._identity)
        self._documents = DocumentStream(shards, stream, num_streams, Cursor(**saved["next"]))
        self._position = dict(saved["position"])
        self.counters = Counters(**saved["counters"])
        references = [Reference(*reference) for reference in saved["waiting"]]
        self._add(references, list(self._documents.texts_of(references)))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        rows = np.empty(self._shape, dtype=np.int64)
        for row in rows:
            self._fill(row)
        return Batch(rows[:, :-1], rows[:, 1:], dict(self._position))

    def state(self) -> dict[str, Any]:
        """Everything needed to go on from here, ready for JSON."""
        return {
            "version": STATE_VERSION,
            **self._identity,
            "next": dataclasses.asdict(self._documents.cursor),
            "position": dict(self._position),
            "counters": dataclasses.asdict(self.counters),
            "waiting": [list(document.reference) for document in self._buffer.waiting()],
        }

    def _fill(self, row: NDArray[np.int64]) -> None:
        filled = 0
        while filled < len(row):
            self._refill()
            space = len(row) - filled
            document = self._buffer.take_best_fit(space) or self._buffer.take_shortest()
            ids = document.ids[:space]
            row[filled : filled + len(ids)] = ids
            filled += len(ids)
            self.counters.documents += 1
            self.counters.tokens += len(document.ids)
            self.counters.cropped_tokens += len(document.ids) - len(ids)

    def _refill(self) -> None:
        while len(self._buffer) < self._buffer_documents:
            fetched = self._documents.fetch(self._fetch_documents)
            cursor = self._documents.cursor
            self._position = {"pq_idx": cursor.shard, "rg_idx": cursor.row_group, "epoch": cursor.epoch}
            self._add([reference for reference, _ in fetched], [text for _, text in fetched])

    def _add(self, references: list[Reference], texts: list[str]) -> None:
        bos = self._tokenizer.bos_id
        for reference, ids in zip(references, self._tokenizer.encode_batch(texts), strict=True):
            document = _Document(reference, np.array([bos, *ids], dtype=np.int32))
            self._buffer.add(len(document.ids), document)


def _checked(state: Mapping[str, Any], identity: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state, if it is one of this version and of the same stream."""
    if state.get("version") != STATE_VERSION:
        raise UserError(f"the saved data position has version {state.get('version')!r}: update nanochat to continue it")
    for key, value in identity.items():
        if state.get(key) != value:
            raise UserError(f"the saved data position has {key} {state.get(key)!r}, not {value!r}: continue with that")
    return state
