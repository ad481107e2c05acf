"""Packing ``keep`` loses nothing, lets nobody wait for ever, and continues exactly."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from golden_text import LONG_DATA, golden_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanochat.data import rows as rows_module
from nanochat.data.documents import Reference
from nanochat.data.loader import PretrainLoader
from nanochat.data.packing import plain_best_fit
from nanochat.data.parts import end_of_part
from nanochat.data.rows import REST_DELAY, RowStream
from nanochat.data.sources import DataSet, open_data_set

BOS = 0


class Characters:
    """A tokenizer whose tokens are characters, so that every token of a test's text can be told apart."""

    bos_id = BOS

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[ord(char) for char in text] for text in texts]


def distinct_texts(lengths: Sequence[int]) -> list[str]:
    """Documents of these lengths without any character twice."""
    numbers = itertools.count(0x10000)
    return ["".join(chr(next(numbers)) for _ in range(length)) for length in lengths]


def data_set(folder: Path, texts: Sequence[str], rows_per_group: int = 100) -> DataSet:
    for name, documents in (("a", texts), ("b", ["x"])):
        table = pyarrow.table({"text": pyarrow.array(documents, pyarrow.string())})
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=rows_per_group)
    return open_data_set(folder)


def stream(data: DataSet, state: dict[str, Any] | None = None, buffer: int = 8, fetch: int = 4) -> RowStream:
    return RowStream(data.train, Characters(), 0, 1, "keep", buffer, fetch, state)


def next_row(of: RowStream, row_tokens: int) -> list[int]:
    row = np.full(row_tokens, -1, dtype=np.int64)
    of.fill(row)
    return row.tolist()


def waiting_text(of: RowStream, texts: Sequence[str], rows_per_group: int, longest: int) -> Counter[int]:
    """Tokens that wait, read from the references in the state alone."""
    found: Counter[int] = Counter()
    for _shard, row_group, row, char, offset, _turn in of.state()["waiting"]:
        text = texts[row_group * rows_per_group + row]
        found.update(map(ord, text[char : end_of_part(text, char, longest)][offset:]))
    return found


def fetched_text(of: RowStream, texts: Sequence[str], rows_per_group: int) -> Counter[int]:
    cursor = of.state()["next"]
    rows_before = cursor["row_group"] * rows_per_group + cursor["row"]
    this_epoch = texts[:rows_before] + [text[: cursor["char"]] for text in texts[rows_before : rows_before + 1]]
    return Counter(map(ord, "".join(texts * (cursor["epoch"] - 1) + this_epoch)))


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_token_of_the_text_is_in_a_row_or_waits(tmp_path_factory, data: st.DataObject) -> None:
    texts = distinct_texts(data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)))
    row_tokens, rows_per_group = data.draw(st.integers(2, 12)), data.draw(st.integers(1, 4))
    longest = data.draw(st.integers(1, 50))
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "LONGEST_PART", longest)
        packed = stream(data_set(folder, texts, rows_per_group))
        placed: Counter[int] = Counter()
        num_rows = data.draw(st.integers(1, 40))
        for _ in range(num_rows):
            row = next_row(packed, row_tokens)
            assert row[0] == BOS
            placed.update(token for token in row if token != BOS)
        assert placed + waiting_text(packed, texts, rows_per_group, longest) == fetched_text(
            packed, texts, rows_per_group
        )
        counted = packed.counters
        assert counted.cropped_tokens == 0
        assert counted.tokens + counted.added_tokens == num_rows * row_tokens


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_equal_a_plain_search_and_continue_from_any_state(tmp_path_factory, data: st.DataObject) -> None:
    texts = distinct_texts(data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)))
    row_tokens, rows_per_group = data.draw(st.integers(2, 12)), data.draw(st.integers(1, 4))
    buffer, fetch = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 5))
    opened = data_set(tmp_path_factory.mktemp("data"), texts, rows_per_group)
    packed = stream(opened, None, buffer, fetch)
    plain = plain_rows(texts, rows_per_group, row_tokens, buffer, fetch)
    for stop in data.draw(st.lists(st.booleans(), min_size=20, max_size=20)):
        if stop:
            state = json.dumps(packed.state())
            packed = stream(opened, json.loads(state), buffer, fetch)
            assert json.dumps(packed.state()) == state
        assert next_row(packed, row_tokens) == next(plain)


def plain_rows(texts: list[str], rows_per_group: int, row_tokens: int, buffer: int, fetch: int) -> Iterator[list[int]]:
    """Rows for ever, as plainly as they can be described."""
    buffer = min(buffer, len(texts))
    size = min(fetch, max(1, buffer // 4))
    groups = [texts[i : i + rows_per_group] for i in range(0, len(texts), rows_per_group)]
    fetches = itertools.cycle([group[i : i + size] for group in groups for i in range(0, len(group), size)])
    waiting: list[tuple[int, list[int]]] = []  # turn and text with its bos, in order of arrival
    arrived = 0
    while True:
        row: list[int] = []
        while len(row) < row_tokens:
            while len(waiting) < buffer:
                for text in next(fetches):
                    waiting.append((arrived, [BOS, *map(ord, text)]))
                    arrived += 1
            space, lengths = row_tokens - len(row), [len(ids) for _, ids in waiting]
            best = plain_best_fit(lengths, space)
            if not row:
                index = min(range(len(waiting)), key=lambda i: waiting[i][0])
            elif best is not None:
                index = best
            elif space == 1:
                row.append(BOS)
                continue
            else:
                index = lengths.index(max(lengths))
            turn, ids = waiting.pop(index)
            rest = [BOS, *ids[space:]]
            if len(ids) > space and row:
                waiting.insert(index, (turn, rest))
            elif len(ids) > space:
                ahead = sorted(turn for turn, _ in waiting)[:REST_DELAY]
                waiting.append((ahead[-1] if ahead else 0, rest))
            row += ids[:space]
        yield row


#: By best fit alone the short ones would never be taken: those of 32 fill rows exactly, and the longest are cut.
STARVING = {
    "short among full rows": [32] * 40 + [5] * 3 + [700, 650] + [32] * 40 + [3],
    "all long": [400 + 10 * i for i in range(30)] + [7],
    "long, then short": [900] * 10 + [10] * 100,
}


@pytest.mark.parametrize("case", STARVING)
def test_no_piece_waits_more_than_a_bounded_number_of_rows(case: str, tmp_path: Path) -> None:
    row_tokens, lengths = 33, STARVING[case]
    packed = stream(data_set(tmp_path, distinct_texts(lengths), rows_per_group=8), None, buffer=16, fetch=4)
    deadlines: dict[tuple[int, ...], int] = {}
    seen = set()
    for number in range(1500):
        next_row(packed, row_tokens)
        now = {tuple(piece): lengths[8 * piece[1] + piece[2]] - piece[4] for piece in packed.state()["waiting"]}
        latest = number + sum(now.values()) // (row_tokens - 1) + len(now)
        deadlines = {piece: deadlines.get(piece, latest) for piece in now}
        assert all(number <= deadline for deadline in deadlines.values())
        seen |= {(row_group, row) for _, row_group, row, *_ in now}
    assert len(seen) == len(lengths), "every document was fetched"


def test_the_rest_of_a_long_document_goes_on_soon_but_not_in_the_next_row(tmp_path: Path) -> None:
    texts = distinct_texts([200, *[40] * 100])
    packed = stream(data_set(tmp_path, texts), None, buffer=50, fetch=10)
    rows = [next_row(packed, 41) for _ in range(120)]
    own = [number for number, row in enumerate(rows) if ord(texts[0][0]) <= row[1] <= ord(texts[0][-1])]
    assert len(own) >= 5
    assert all(2 <= later - earlier <= 2 * REST_DELAY for earlier, later in itertools.pairwise(own[:5]))


def test_a_huge_document_is_read_in_parts_and_never_waits_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest, most, fetch_chars = 100, 1000, 300
    monkeypatch.setattr(rows_module, "LONGEST_PART", longest)
    monkeypatch.setattr(rows_module, "BUFFER_TOKENS", most)
    monkeypatch.setattr(rows_module, "FETCH_CHARS", fetch_chars)
    texts = distinct_texts([20_000, *[10] * 50])
    packed = stream(data_set(tmp_path, texts), None, buffer=50, fetch=40)
    for _ in range(300):
        next_row(packed, 65)
        waiting = waiting_text(packed, texts, 100, longest).total() + len(packed.state()["waiting"])
        assert waiting <= most + fetch_chars + 2 * longest


def test_a_small_text_is_read_evenly(tmp_path: Path) -> None:
    texts = distinct_texts([7] * 10)
    packed = RowStream(data_set(tmp_path, texts).train, Characters(), 0, 1, "keep", 1000, 128)
    counts = Counter(token for _ in range(200) for token in next_row(packed, 9) if token != BOS)
    assert max(counts.values()) - min(counts.values()) <= 2
    assert len(packed.state()["waiting"]) < 2 * len(texts)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 2), (1, 2)])
def test_a_state_at_any_batch_continues_exactly(rank: int, world_size: int) -> None:
    data = open_data_set(LONG_DATA)

    def loader(state: dict[str, Any] | None = None) -> PretrainLoader:
        return PretrainLoader(data, "train", golden_tokenizer(), 2, 48, rank, world_size, 10, 4, "keep", state)

    uninterrupted = loader()
    states, batches = [], []
    for _ in range(40):
        states.append(json.dumps(uninterrupted.state()))
        batches.append(next(uninterrupted))
    for number, state in enumerate(states):
        resumed = loader(json.loads(state))
        assert json.dumps(resumed.state()) == state
        for batch in batches[number : number + 6]:
            continued = next(resumed)
            assert continued.inputs.tolist() == batch.inputs.tolist()
            assert continued.targets.tolist() == batch.targets.tolist()
            assert continued.position == batch.position
    assert batches[-1].position["epoch"] >= 2, "epochs were crossed"


def test_a_state_is_references_and_small(tmp_path: Path) -> None:
    packed = stream(data_set(tmp_path, distinct_texts([5000] * 8)))
    next_row(packed, 33)
    for piece in packed.state()["waiting"]:
        assert len(piece) == len(Reference._fields) + 2


def test_parts_end_at_a_paragraph_else_a_line_else_a_word() -> None:
    assert end_of_part("short", 0, 100) == 5
    assert end_of_part("one two\n\nthree four\nfive six", 0, 12) == len("one two\n\n")
    assert end_of_part("one two three\nfour five six", 0, 20) == len("one two three\n")
    assert end_of_part("one two three four", 0, 12) == len("one two")
    assert end_of_part("x" * 50, 10, 12) == 22


def test_cutting_between_words_and_lines_changes_no_token() -> None:
    tokenizer = golden_tokenizer()
    text = "He said: it's 1234 o'clock.\nThen  (again) 12, and\n\nso on… done!\n" * 5
    whole = tokenizer.encode(text)
    for longest in range(20, 90):
        start, ids = 0, []
        while start < len(text):
            end = end_of_part(text, start, longest)
            ids += tokenizer.encode(text[start:end])
            start = end
        assert ids == whole
