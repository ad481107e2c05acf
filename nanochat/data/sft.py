"""Rows of whole conversations for chat training, with targets only where the assistant learns.

Every process follows the order of all streams, which needs only the conversations' lengths. So the
progress, which sets the learning rate, is one number everywhere, and a saved state serves any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanochat.data.conversation import MAX_TOKENS, Turn, render_turns
from nanochat.data.packing import BestFitBuffer
from nanochat.errors import UserError
from nanochat.tokenizer.bpe import Tokenizer

STATE_VERSION = 1


@dataclass(frozen=True, eq=False)
class SftBatch:
    """Rows of conversations.

    Attributes:
        inputs: (B, T) token ids.
        targets: (B, T) the token that follows each of them, -1 where it is not to be learned.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]


@dataclass(frozen=True)
class _Usable:
    """A conversation to learn from: its index, and its length in tokens and turns as far as it fits."""

    index: int
    tokens: int
    turns: int


class SftLoader:
    """Endless batches of one stream of a mixture; ``state()`` at any batch boundary continues it exactly.

    A row takes T + 1 tokens: always the longest waiting conversation that fits the space left, the earliest among
    equals; when none fits, the rest is bos, never a target. A conversation longer than ``max_tokens`` or T ends at its
    last whole answer that fits; without one it is left out. All are measured at the start.

    Args:
        conversations: the mixture in its order, ``{"messages": [...]}`` each.
        batch_size: rows B of a batch.
        sequence_len: T.
        stream, num_streams: stream s of S takes the conversations s, s + S, … and goes on at the front after the end.
        buffer_conversations: how many wait to be packed.
        state: of :meth:`state`, to go on from there.

    Attributes:
        truncated: how many conversations were cut.
        dropped: how many were left out.

    Raises:
        UserError: when nothing is left to learn from, a conversation is malformed, or ``state`` does not belong here.
    """

    def __init__(
        self,
        conversations: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        batch_size: int,
        sequence_len: int,
        stream: int = 0,
        num_streams: int = 1,
        buffer_conversations: int = 100,
        max_tokens: int = MAX_TOKENS,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        assert min(batch_size, sequence_len, buffer_conversations) >= 1
        assert 0 <= stream < num_streams
        self._conversations, self._tokenizer = conversations, tokenizer
        self._shape = batch_size, sequence_len + 1
        self._stream = stream
        self.truncated = self.dropped = 0
        self._usable = self._measure(min(max_tokens, sequence_len))
        if not self._usable:
            raise UserError(
                f"none of the {len(conversations):,} conversations has an answer that fits a row of {sequence_len}"
                " tokens: raise --max-seq-len, or give others with --conversations"
            )
        lengths = [usable.tokens for usable in self._usable]
        states = [None] * num_streams if state is None else self._checked(state, num_streams)
        self._orders = [
            _StreamOrder(lengths, sequence_len + 1, buffer_conversations, number, num_streams, saved)
            for number, saved in enumerate(states)
        ]

    @property
    def placed(self) -> int:
        """Conversations that this stream has put into rows so far."""
        return self._orders[self._stream].placed

    @property
    def progress(self) -> float:
        """Passes over the mixture: conversations that all streams together have put into rows, ÷ those there are."""
        return sum(order.placed for order in self._orders) / len(self._usable)

    def __iter__(self) -> Iterator[SftBatch]:
        return self

    def __next__(self) -> SftBatch:
        ids = np.full(self._shape, self._tokenizer.bos_id, dtype=np.int64)
        learned = np.zeros(self._shape, dtype=bool)
        for number, order in enumerate(self._orders):
            rows = [order.next_row() for _ in range(self._shape[0])]
            if number == self._stream:
                for row, members in enumerate(rows):
                    self._write(members, ids[row], learned[row])
        return SftBatch(ids[:, :-1], np.where(learned[:, 1:], ids[:, 1:], -1))

    def state(self) -> dict[str, Any]:
        """Everything needed to go on from here, ready for JSON; the same for every stream."""
        return {
            "version": STATE_VERSION,
            "conversations": len(self._usable),
            "streams": [order.state() for order in self._orders],
        }

    def _measure(self, limit: int) -> list[_Usable]:
        found = []
        for index, conversation in enumerate(self._conversations):
            turns = render_turns(conversation, self._tokenizer)
            whole = _whole_turns(turns, limit)
            if not whole:
                self.dropped += 1
                continue
            self.truncated += whole < len(turns)
            found.append(_Usable(index, sum(len(ids) for ids, _ in turns[:whole]), whole))
        return found

    def _write(self, members: Sequence[int], ids: NDArray[np.int64], learned: NDArray[np.bool_]) -> None:
        """Put conversations into a row of bos."""
        filled = 0
        for member in members:
            usable = self._usable[member]
            turns = render_turns(self._conversations[usable.index], self._tokenizer)[: usable.turns]
            for turn_ids, turn_mask in turns:
                end = filled + len(turn_ids)
                ids[filled:end], learned[filled:end] = turn_ids, turn_mask
                filled = end

    def _checked(self, state: Mapping[str, Any], num_streams: int) -> list[Mapping[str, Any]]:
        if state.get("version") != STATE_VERSION:
            raise UserError(
                f"the saved place in the conversations has version {state.get('version')!r}: update nanochat"
            )
        streams = list(state["streams"])
        if state["conversations"] != len(self._usable) or len(streams) != num_streams:
            raise UserError(
                f"the saved place is in {state['conversations']:,} conversations in {len(streams)} streams, and these"
                f" are {len(self._usable):,} in {num_streams}: continue with the same ones"
            )
        return streams


class _StreamOrder:
    """Which conversations share a row in one stream; knows nothing but their lengths."""

    def __init__(
        self,
        lengths: Sequence[int],
        row_tokens: int,
        buffer_conversations: int,
        stream: int,
        num_streams: int,
        state: Mapping[str, Any] | None,
    ) -> None:
        self._lengths, self._row_tokens = lengths, row_tokens
        self._stream, self._num_streams = stream, num_streams
        # More waiting ones than a pass has would be copies, and crowd out those not seen yet.
        self._buffer_conversations = max(1, min(buffer_conversations, len(lengths) // num_streams))
        self._buffer: BestFitBuffer[int] = BestFitBuffer()
        #: Conversations taken from the mixture, and put into rows.
        self._drawn = self.placed = 0
        if state is not None:
            self._drawn, self.placed = int(state["drawn"]), int(state["placed"])
            for member in state["waiting"]:
                self._buffer.add(lengths[member], member)

    def next_row(self) -> list[int]:
        """The conversations of the next row, in order; at least one."""
        row: list[int] = []
        space = self._row_tokens
        while space:
            self._refill()
            member = self._buffer.take_best_fit(space)
            if member is None:
                break
            row.append(member)
            space -= self._lengths[member]
        self.placed += len(row)
        assert row, "every conversation fits an empty row"
        return row

    def state(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "placed": self.placed, "waiting": self._buffer.waiting()}

    def _refill(self) -> None:
        while len(self._buffer) < self._buffer_conversations:
            member = (self._stream + self._drawn * self._num_streams) % len(self._lengths)
            self._buffer.add(self._lengths[member], member)
            self._drawn += 1


def _whole_turns(turns: Sequence[Turn], limit: int) -> int:
    """How many turns fit ``limit`` tokens: all of them, else up to the last answer; 0 when there is none to learn."""
    tokens = answered = 0
    for number, (ids, mask) in enumerate(turns, 1):
        tokens += len(ids)
        if tokens > limit:
            return answered
        if any(mask):
            answered = number
    return len(turns) if answered else 0
