"""Best-fit packing: which of the waiting pieces goes next into a row.

Rows that begin with whole documents and are never padded (Ding et al. 2024, "Fewer Truncations Improve Language
Modeling", https://arxiv.org/abs/2404.10830, keeps documents whole by best fit; here what fits nowhere is cropped).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class BestFitBuffer(Generic[Item]):
    """Waiting items with their lengths; the best one is found by bisection.

    :func:`plain_best_fit` and :func:`plain_shortest` say what is taken.
    """

    def __init__(self) -> None:
        self._arrivals = itertools.count()
        #: By arrival, and so in order of arrival.
        self._items: dict[int, Item] = {}
        #: Ascending (length, arrival).
        self._order: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._items)

    def add(self, length: int, item: Item) -> None:
        """Let an item wait."""
        arrival = next(self._arrivals)
        self._items[arrival] = item
        insort(self._order, (length, arrival))

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
        return list(self._items.values())

    def _take(self, index: int) -> Item:
        _, arrival = self._order.pop(index)
        return self._items.pop(arrival)


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
