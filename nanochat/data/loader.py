"""Batches for pretraining: rows of one or several data sets, continued exactly from a saved state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanochat.data.blend import Blend, next_source
from nanochat.data.packing import Packing
from nanochat.data.rows import Counters, RowStream
from nanochat.data.sources import DataSet, Split
from nanochat.errors import UserError
from nanochat.tokenizer.bpe import Tokenizer

STATE_VERSION = 2


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of text.

    Attributes:
        inputs: (B, T) token ids.
        targets: (B, T) the token that follows each of them.
        position: of the last fetch, by the family's names: file ``pq_idx`` and row group ``rg_idx`` from 0, ``epoch``
            from 1. Of a blend: of the source that has been read most often.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    position: dict[str, int]


class PretrainLoader:
    """Endless batches of one stream's text; ``state()`` at any batch boundary continues it exactly.

    Every row (T + 1 tokens) is of one source of the blend, the one that is furthest behind its share; so shares are of
    tokens, and the order follows from them alone.

    Args:
        data: a blend, or the one data set to read.
        split: training or validation text.
        batch_size: rows B of a batch.
        sequence_len: T.
        stream, num_streams, buffer_documents, fetch_documents: see :class:`nanochat.data.rows.RowStream`.
        packing: see :mod:`nanochat.data.packing`.
        state: of :meth:`state`, to go on from there.

    Raises:
        UserError: when there is no text for this stream, or ``state`` does not belong here.
    """

    def __init__(
        self,
        data: Blend | DataSet,
        split: Split,
        tokenizer: Tokenizer,
        batch_size: int,
        sequence_len: int,
        stream: int = 0,
        num_streams: int = 1,
        buffer_documents: int = 1000,
        fetch_documents: int = 128,
        packing: Packing = "bestfit",
        state: Mapping[str, Any] | None = None,
    ) -> None:
        assert min(batch_size, sequence_len) >= 1
        blend = data if isinstance(data, Blend) else Blend.of(data)
        self._names, self._shares = blend.names, blend.shares
        self._shape = batch_size, sequence_len + 1
        self._identity: dict[str, Any] = {
            "split": split,
            "stream": stream,
            "num_streams": num_streams,
            "packing": packing,
            "shares": list(self._shares),
        }
        states: list[Any] = [None] * len(self._names) if state is None else self._checked(state)["sources"]
        #: Rows of each source so far.
        self._rows: list[int] = [0] * len(self._names) if state is None else list(state["rows"])
        self._streams = [
            RowStream(
                source.data_set.shards(split),
                tokenizer,
                stream,
                num_streams,
                packing,
                buffer_documents,
                fetch_documents,
                saved,
            )
            for source, saved in zip(blend.sources, states, strict=True)
        ]

    @property
    def counters(self) -> Counters:
        """What has been put into rows so far, of all sources together."""
        return sum((stream.counters for stream in self._streams), Counters())

    @property
    def position(self) -> dict[str, int]:
        """Where the source was last read that has been read most often; the first among equals."""
        return dict(max((stream.position for stream in self._streams), key=lambda position: position["epoch"]))

    @property
    def positions(self) -> dict[str, dict[str, int]]:
        """Where each source was last read, by name."""
        return {name: dict(stream.position) for name, stream in zip(self._names, self._streams, strict=True)}

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        rows = np.empty(self._shape, dtype=np.int64)
        for row in rows:
            source = next_source(self._rows, self._shares)
            self._streams[source].fill(row)
            self._rows[source] += 1
        return Batch(rows[:, :-1], rows[:, 1:], self.position)

    def state(self) -> dict[str, Any]:
        """Everything needed to go on from here, ready for JSON."""
        return {
            "version": STATE_VERSION,
            **self._identity,
            "rows": list(self._rows),
            "sources": [stream.state() for stream in self._streams],
        }

    def _checked(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The state, if it is one of this version, the same stream and the same blend."""
        if state.get("version") != STATE_VERSION:
            raise UserError(
                f"the saved data position has version {state.get('version')!r}, not {STATE_VERSION}:"
                " continue it with the nanochat that saved it"
            )
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise UserError(
                    f"the saved data position has {key} {state.get(key)!r}, not {value!r}: continue with that"
                )
        return state
