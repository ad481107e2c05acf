"""What packing loses over an epoch of the demo text, and what becomes of its documents.

    python benchmarks/packing.py

An epoch is over when as many tokens of text have been taken as the training text has. Placed tokens are counted in the
rows, lost ones as what was fetched, is not in a row, and does not wait either; the loader's own counters only say when
to stop.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanochat.data import chitchat
from nanochat.data.packing import Packing
from nanochat.data.parts import end_of_part
from nanochat.data.rows import LONGEST_PART, RowStream
from nanochat.data.sources import DataSet, iterate_texts, open_data_set
from nanochat.data.writing import write_shards
from nanochat.tokenizer.bpe import Tokenizer
from nanochat.tokenizer.train import train

VOCAB_SIZE = 4096
LENGTHS = (512, 2048)
PACKINGS: tuple[Packing, ...] = ("bestfit", "keep")


#: By shard, row group and row.
Texts = dict[tuple[int, ...], str]
Documents = dict[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Epoch:
    """One epoch as it went into rows."""

    rows: int
    placed_tokens: int
    lost_tokens: int
    #: Share of the placed tokens whose document stands in one piece in a row.
    whole: float
    #: Share of the places in rows that hold a bos.
    bos: float
    #: Rows from a document's fetch to its last piece (or to now), at most.
    longest_wait: int
    seconds: float

    @property
    def lost(self) -> float:
        return self.lost_tokens / (self.lost_tokens + self.placed_tokens)


def measure(data_set: DataSet, tokenizer: Tokenizer, sequence_len: int, packing: Packing) -> Epoch:
    """Pack one epoch of the training text."""
    texts = dict(zip(_places(data_set), iterate_texts(data_set, "train"), strict=True))
    documents = {
        place: tuple(ids) for place, ids in zip(texts, tokenizer.encode_batch(list(texts.values())), strict=True)
    }
    text_tokens = sum(map(len, documents.values()))
    stream = RowStream(data_set.train, tokenizer, 0, 1, packing, buffer_documents=1000, fetch_documents=128)
    rows, seconds, waits = [], 0.0, _Waits()
    while stream.counters.tokens - stream.counters.documents < text_tokens:
        row = np.empty(sequence_len + 1, dtype=np.int64)
        began = time.perf_counter()
        stream.fill(row)
        seconds += time.perf_counter() - began
        rows.append(row)
        waits.observe(stream.state()["waiting"])
    ids = np.concatenate(rows)
    placed = int((ids != tokenizer.bos_id).sum())
    state = stream.state()
    waiting = sum(_waiting(texts, tokenizer, place, packing) for place in state["waiting"])
    return Epoch(
        rows=len(rows),
        placed_tokens=placed,
        lost_tokens=_fetched(documents, state["next"]) - waiting - placed,
        whole=_whole(rows, documents, tokenizer.bos_id) / placed,
        bos=1 - placed / len(ids),
        longest_wait=waits.longest,
        seconds=seconds,
    )


class _Waits:
    """How many rows documents are under way."""

    def __init__(self) -> None:
        self.longest = self._row = 0
        self._since: dict[tuple[int, ...], int] = {}

    def observe(self, waiting: list[list[int]]) -> None:
        """Look at the waiting references after a row."""
        self._row += 1
        now = {tuple(place): self._since.get(tuple(place), self._row) for *place, _offset, _turn in waiting}
        self.longest = max(self.longest, *(self._row - since for since in self._since.values()), 0)
        self._since = now


def _waiting(texts: Texts, tokenizer: Tokenizer, reference: list[int], packing: Packing) -> int:
    """Tokens of text in a waiting piece, from its reference."""
    *place, char, offset, _turn = reference
    text = texts[tuple(place)]
    end = end_of_part(text, char, LONGEST_PART) if packing == "keep" else len(text)
    return len(tokenizer.encode(text[char:end])) - offset


def _places(data_set: DataSet) -> list[tuple[int, ...]]:
    return [
        (index, row_group, row)
        for index, shard in enumerate(data_set.train)
        for row_group, documents in enumerate(shard.row_groups)
        for row in range(documents)
    ]


def _fetched(documents: Documents, cursor: dict[str, Any]) -> int:
    """Tokens of text up to a cursor."""
    before = (cursor["shard"], cursor["row_group"], cursor["row"])
    this_epoch = sum(len(ids) for place, ids in documents.items() if place < before)
    return (cursor["epoch"] - 1) * sum(map(len, documents.values())) + this_epoch


def _whole(rows: list[np.ndarray], documents: Documents, bos: int) -> int:
    """Tokens in rows that belong to documents which stand there in one piece."""
    known = set(documents.values())
    pieces = (tuple(piece[1:].tolist()) for row in rows for piece in np.split(row, np.flatnonzero(row == bos)[1:]))
    return sum(len(piece) for piece in pieces if piece in known)


def main() -> None:
    training, validation = chitchat.split()
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder) / "demo", training, validation, name="demo", source="chitchat")
        data_set = open_data_set(Path(folder) / "demo")
        tokenizer = train(iterate_texts(data_set, "train"), VOCAB_SIZE)
        print(f"demo text, vocabulary {VOCAB_SIZE:,}, one epoch")
        print("    T  packing    rows     lost   whole    bos  longest wait  rows/s")
        for sequence_len in LENGTHS:
            for packing in PACKINGS:
                epoch = measure(data_set, tokenizer, sequence_len, packing)
                print(
                    f"{sequence_len:>5}  {packing:<8} {epoch.rows:>6,} {epoch.lost:>8.2%} {epoch.whole:>7.1%}"
                    f" {epoch.bos:>6.2%} {epoch.longest_wait:>8,} rows {epoch.rows / epoch.seconds:>7,.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
