"""The fast picker takes what the plain one takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nanochat.data.packing import BestFitBuffer, plain_best_fit, plain_shortest

#: A length that arrives, or a space to fill.
ACTIONS = st.lists(st.tuples(st.sampled_from(["add", "best", "shortest"]), st.integers(1, 8)), max_size=60)


@given(ACTIONS)
def test_best_fit_equals_a_plain_search(actions: list[tuple[str, int]]) -> None:
    fast: BestFitBuffer[int] = BestFitBuffer()
    plain: list[tuple[int, int]] = []  # length and number, in order of arrival
    for number, (action, size) in enumerate(actions):
        lengths = [length for length, _ in plain]
        if action == "add":
            fast.add(size, number)
            plain.append((size, number))
        elif action == "best":
            index = plain_best_fit(lengths, size)
            assert fast.take_best_fit(size) == (None if index is None else plain.pop(index)[1])
        elif plain:
            assert fast.take_shortest() == plain.pop(plain_shortest(lengths))[1]
        assert len(fast) == len(plain)
        assert fast.waiting() == [waiting for _, waiting in plain]


def test_the_earliest_of_equals_is_taken() -> None:
    assert plain_best_fit([3, 5, 5, 9], 6) == 1
    assert plain_best_fit([7, 8], 6) is None
    assert plain_shortest([9, 4, 4]) == 1


def test_an_item_may_be_anything_falsy() -> None:
    buffer: BestFitBuffer[int] = BestFitBuffer()
    buffer.add(2, 0)
    assert buffer.take_best_fit(1) is None
    assert buffer.take_best_fit(2) == 0
