"""Rows equal the family's, and a saved position continues exactly."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from golden_text import LONG_DATA, RUN_DATA, expected, golden_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanochat.data.loader import Batch, PretrainLoader
from nanochat.data.packing import plain_best_fit, plain_shortest
from nanochat.data.sources import DataSet, iterate_texts, open_data_set
from nanochat.errors import UserError


def loader(data_set: DataSet, split: str = "train", stream: int = 0, num_streams: int = 1, **sizes) -> PretrainLoader:
    """A loader in the sizes of the ``long`` golden values unless told otherwise."""
    sizes = {"batch_size": 2, "sequence_len": 48, "buffer_documents": 10, "fetch_documents": 4} | sizes
    return PretrainLoader(data_set, split, golden_tokenizer(), stream=stream, num_streams=num_streams, **sizes)


def run_loader(split: str, stream: int = 0, num_streams: int = 1) -> PretrainLoader:
    sizes = {"batch_size": 4, "sequence_len": 64, "buffer_documents": 50, "fetch_documents": 32}
    return loader(open_data_set(RUN_DATA), split, stream, num_streams, **sizes)


def assert_equal(batch: Batch, values: dict) -> None:
    assert batch.inputs.tolist() == values["inputs"]
    assert batch.targets.tolist() == values["targets"]
    if "state" in values:
        assert batch.position == values["state"]


def rows(batch: Batch) -> list[list[int]]:
    return np.concatenate([batch.inputs, batch.targets[:, -1:]], axis=1).tolist()


def write(folder: Path, files: Sequence[Sequence[str | None]], rows_per_group: int = 100) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, texts in enumerate(files):
        table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())})
        pyarrow.parquet.write_table(table, folder / f"shard_{number:05d}.parquet", row_group_size=rows_per_group)
    return folder


@pytest.mark.parametrize("split", ["train", "val"])
def test_batches_equal_the_family_s(split: str) -> None:
    batches = run_loader(split)
    for values in expected("run/expected_loader")[split]:
        assert_equal(next(batches), values)


@pytest.mark.parametrize("rank", [0, 1])
def test_batches_of_two_ranks_equal_the_family_s(rank: int) -> None:
    batches = run_loader("train", rank, 2)
    for values in expected("run/expected_loader_two_ranks")["train_by_rank"][rank]:
        assert_equal(next(batches), values)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 2), (1, 2)])
def test_batches_across_row_groups_files_and_epochs_equal_the_family_s(rank: int, world_size: int) -> None:
    batches = loader(open_data_set(LONG_DATA), stream=rank, num_streams=world_size)
    for values in expected("long/expected_loader")["runs"][f"world_size_{world_size}"][rank]:
        batch = next(batches)
        assert rows(batch) == values["rows"]
        assert batch.position == values["state"]


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 2), (1, 2)])
def test_a_state_at_any_batch_continues_exactly(rank: int, world_size: int) -> None:
    data_set = open_data_set(LONG_DATA)
    uninterrupted = loader(data_set, stream=rank, num_streams=world_size)
    states, batches = [], []
    for _ in range(40):
        states.append(json.dumps(uninterrupted.state()))
        batches.append(next(uninterrupted))
    for number, state in enumerate(states):
        resumed = loader(data_set, stream=rank, num_streams=world_size, state=json.loads(state))
        assert json.dumps(resumed.state()) == state
        for batch in batches[number : number + 6]:
            continued = next(resumed)
            assert rows(continued) == rows(batch)
            assert continued.position == batch.position
    assert batches[-1].position["epoch"] > 2, "epochs were crossed"


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_text_in_any_sizes_is_packed_as_a_plain_search_packs_it(tmp_path_factory, data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.text("ab ", max_size=20), min_size=1, max_size=12).filter(any))
    sizes = {
        "batch_size": data.draw(st.integers(1, 3)),
        "sequence_len": data.draw(st.integers(1, 16)),
        "buffer_documents": data.draw(st.integers(1, 8)),
        "fetch_documents": data.draw(st.integers(1, 5)),
    }
    rows_per_group = data.draw(st.integers(1, 4))
    data_set = open_data_set(write(tmp_path_factory.mktemp("data"), [texts, ["x"]], rows_per_group))
    fast = loader(data_set, **sizes)
    stop = data.draw(st.integers(0, 5))
    plain = plain_rows(texts, rows_per_group, sizes)
    for number in range(8):
        if number == stop:
            fast = loader(data_set, state=fast.state(), **sizes)
        assert rows(next(fast)) == list(itertools.islice(plain, sizes["batch_size"]))


def plain_rows(texts: list[str], rows_per_group: int, sizes: dict):
    """Rows of one file, for ever, as plainly as they can be described."""
    tokenizer = golden_tokenizer()
    groups = [texts[i : i + rows_per_group] for i in range(0, len(texts), rows_per_group)]
    size = sizes["fetch_documents"]
    fetches = itertools.cycle([group[i : i + size] for group in groups for i in range(0, len(group), size)])
    waiting: list[list[int]] = []
    while True:
        row: list[int] = []
        while len(row) <= sizes["sequence_len"]:
            while len(waiting) < sizes["buffer_documents"]:
                waiting += [[tokenizer.bos_id, *tokenizer.encode(text)] for text in next(fetches)]
            lengths, space = [len(document) for document in waiting], sizes["sequence_len"] + 1 - len(row)
            best = plain_best_fit(lengths, space)
            row += waiting.pop(plain_shortest(lengths) if best is None else best)[:space]
        yield row


def test_counters_say_what_was_lost() -> None:
    batches = loader(open_data_set(LONG_DATA))
    placed = sum(next(batches).inputs.shape[0] * 49 for _ in range(30))
    counted = batches.counters
    assert counted.tokens - counted.cropped_tokens == placed
    assert counted.added_tokens == 0
    assert counted.documents > 0
    assert loader(open_data_set(LONG_DATA), state=batches.state()).counters == counted


def test_validation_reads_the_validation_file_only() -> None:
    data_set = open_data_set(LONG_DATA)
    tokenizer = golden_tokenizer()
    texts = {tuple(tokenizer.encode(text)) for text in iterate_texts(data_set, "val")}
    batch = next(loader(data_set, "val", batch_size=1, sequence_len=2000))
    documents = np.split(batch.inputs[0], np.flatnonzero(batch.inputs[0] == tokenizer.bos_id))[1:-1]
    assert documents
    assert {tuple(document[1:].tolist()) for document in documents} <= texts


def test_more_streams_than_row_groups_is_a_clear_error() -> None:
    with pytest.raises(UserError, match="has a row group for stream 5 of 5: use fewer streams"):
        loader(open_data_set(LONG_DATA), stream=4, num_streams=5)


def test_text_that_is_all_empty_is_a_clear_error_and_not_an_endless_loop(tmp_path: Path) -> None:
    data_set = open_data_set(write(tmp_path, [["", None, ""], ["x"]]))
    with pytest.raises(UserError, match=r"all documents of this stream in .* are empty"):
        next(loader(data_set))


def test_empty_documents_among_others_do_no_harm(tmp_path: Path) -> None:
    data_set = open_data_set(write(tmp_path, [["", "hello", None], ["x"]]))
    batch = next(loader(data_set))
    assert batch.inputs.shape == (2, 48)
    assert (batch.inputs[:, 0] == golden_tokenizer().bos_id).all()


def test_a_state_of_other_text_is_refused(tmp_path: Path) -> None:
    batches = loader(open_data_set(LONG_DATA))
    next(batches)
    state = batches.state()
    other = open_data_set(write(tmp_path, [["hello"], ["x"]]))
    with pytest.raises(UserError, match="is not the one this run read so far"):
        loader(other, state=state)
    with pytest.raises(UserError, match="has num_streams 1, not 2"):
        loader(open_data_set(LONG_DATA), num_streams=2, state=state)
    with pytest.raises(UserError, match="version 9"):
        loader(open_data_set(LONG_DATA), state={**state, "version": 9})
