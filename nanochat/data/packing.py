"""Packing: which of the waiting pieces goes next into a row. Rows begin with bos and are never padded.

``bestfit`` (after Ding et al. 2024, "Fewer Truncations Improve Language Modeling", https://arxiv.org/abs/2404.10830):
always the longest piece that fits; when none does, the shortest is cropped to fill the row, and its rest is lost.

``keep`` loses nothing: a row begins with the piece whose turn it is, goes on by best fit, and is filled up with the
beginning of the longest one; the rest of a piece that was cut goes into a later row, with a bos of its own.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

Packing = Literal["bestfit", "keep"]

Item = TypeVar("Item")


class BestFitBuffer(Generic[Item]):
    """Waiting items with their lengths; the best one is found by bisection.

    :func:`plain_best_fit` and :func:`plain_shortest` say what is taken.
    """

    def __init__(self) -> None:
        self._arrivals = itertools.count()
        #: Length and item by arrival, and so in order of arrival.
        self._items: dict[int, tuple[int, Item]] = {}
        #: Ascending (length, arrival).
        self._order: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._items)

    def add(self, length: int, item: Item) -> int:
        """Let an item wait; returns the number of its arrival."""
        arrival = next(self._arrivals)
        self._items[arrival] = (length, item)
        insort(self._order, (length, arrival))
        return arrival

    def take_best_fit(self, space: int) -> Item | None:
        """Take the longest item of at most ``space``, the earliest among equals; None when none fits."""
        fitting = bisect_left(self._order, (space + 1, -1))
        if not fitting:
            return None
        longest = self._order[fitting - 1][0]
        return self._take(bisect_left(self._order, (longest, -1)))

    def take_shortest(self) -> Item:
        """Take the shortest item, the earliest among equals; there must be one."""
        return self._take(0)

    def waiting(self) -> list[Item]:
        """All items, in order of arrival."""
        return [item for _, item in self._items.values()]

    def _take(self, index: int) -> Item:
        _, arrival = self._order.pop(index)
        return self._items.pop(arrival)[1]


class TurnBuffer(BestFitBuffer[Item]):
    """A best-fit buffer whose items also wait for their turn, so that none waits for ever."""

    def __init__(self) -> None:
        super().__init__()
        #: By arrival.
        self._turns: dict[int, int] = {}
        #: Ascending (turn, arrival).
        self._queue: list[tuple[int, int]] = []

    def add_in_turn(self, length: int, item: Item, turn: int) -> None:
        """Let an item wait, behind those that are there with the same or an earlier turn."""
        arrival = self.add(length, item)
        self._turns[arrival] = turn
        insort(self._queue, (turn, arrival))

    def add_behind(self, length: int, item: Item, places: int) -> None:
        """Let an item wait right behind the next ``places`` ones, or behind all when there are fewer."""
        ahead = self._queue[:places]
        self.add_in_turn(length, item, ahead[-1][0] if ahead else 0)

    def waiting_in_turn(self) -> list[tuple[Item, int]]:
        """All items with their turns, in order of arrival."""
        return [(item, self._turns[arrival]) for arrival, (_, item) in self._items.items()]

    def take_next(self) -> Item:
        """Take the item whose turn it is; there must be one."""
        _, arrival = self._queue[0]
        return self._take(bisect_left(self._order, (self._items[arrival][0], arrival)))

    def longest(self) -> Item:
        """The longest item, the earliest among equals, which stays; there must be one."""
        return self._items[self._order[self._index_of_longest()][1]][1]

    def shorten_longest(self, length: int, item: Item) -> None:
        """Let ``item`` wait in the place of the longest one."""
        _, arrival = self._order.pop(self._index_of_longest())
        self._items[arrival] = (length, item)
        insort(self._order, (length, arrival))

    def _index_of_longest(self) -> int:
        return bisect_left(self._order, (self._order[-1][0], -1))

    def _take(self, index: int) -> Item:
        arrival = self._order[index][1]
        del self._queue[bisect_left(self._queue, (self._turns.pop(arrival), arrival))]
        return super()._take(index)


def plain_best_fit(lengths: Sequence[int], space: int) -> int | None:
    """Index of the longest of ``lengths`` that is at most ``space``, the first among equals; None when none is."""
    best: int | None = None
    for index, length in enumerate(lengths):
        if length <= space and (best is None or length > lengths[best]):
            best = index
    return best


def plain_shortest(lengths: Sequence[int]) -> int:
    """Index of the shortest of ``lengths``, the first among equals."""
    return min(range(len(lengths)), key=lambda index: lengths[index])
