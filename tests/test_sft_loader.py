"""Rows of conversations equal the family's; long ones are cut at an answer; progress is one number for all."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from golden_text import expected, golden_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.data.conversation import render
from nanochat.data.sft import SftBatch, SftLoader
from nanochat.errors import UserError

RUN = expected("run/expected_sft_batches")
LONG = expected("long/expected_sft_batches")
CONVERSATIONS = RUN["conversations"]


def loader(conversations: Any = CONVERSATIONS, batch_size: int = 3, sequence_len: int = 128, **options) -> SftLoader:
    options = {"buffer_conversations": 20} | options
    return SftLoader(conversations, golden_tokenizer(), batch_size, sequence_len, **options)


def talk(*lengths: int) -> dict:
    """A conversation whose turns have texts of so many tokens."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": "0" * length} for i, length in enumerate(lengths)]}


def assert_same(one: SftBatch, other: SftBatch) -> None:
    assert np.array_equal(one.inputs, other.inputs)
    assert np.array_equal(one.targets, other.targets)


def test_batches_and_progress_equal_the_family_s() -> None:
    batches = loader(batch_size=RUN["batch"], sequence_len=RUN["seq_len"], buffer_conversations=RUN["buffer_size"])
    for values in RUN["batches"]:
        batch = next(batches)
        assert batch.inputs.tolist() == values["inputs"]
        assert batch.targets.tolist() == values["targets"]
        assert batches.progress == values["progress"]
    assert (batches.truncated, batches.dropped) == (0, 0)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 2), (1, 2)])
def test_batches_past_the_end_of_the_set_equal_the_family_s(rank: int, world_size: int) -> None:
    batches = loader(stream=rank, num_streams=world_size, buffer_conversations=LONG["buffer_size"])
    for values in LONG["runs"][f"world_size_{world_size}"][rank]:
        batch = next(batches)
        assert batch.inputs.tolist() == values["inputs"]
        assert batch.targets.tolist() == values["targets"]
        assert (batches.placed * world_size + rank) / len(CONVERSATIONS) == values["progress"]


def test_progress_is_the_same_in_every_stream() -> None:
    streams = [loader(stream=stream, num_streams=3) for stream in range(3)]
    for batches in zip(*streams, strict=True):
        assert len(batches) == 3
        progress = streams[0].progress
        assert all(stream.progress == progress for stream in streams)
        assert progress == sum(stream.placed for stream in streams) / len(CONVERSATIONS)
        if progress > 2:
            break


@pytest.mark.parametrize("num_streams", [1, 2])
def test_a_state_at_any_batch_continues_exactly(num_streams: int) -> None:
    uninterrupted = loader(stream=num_streams - 1, num_streams=num_streams)
    states, batches = [], []
    for _ in range(14):
        states.append(json.dumps(uninterrupted.state()))
        batches.append((next(uninterrupted), uninterrupted.progress))
    for number, state in enumerate(states):
        resumed = loader(stream=num_streams - 1, num_streams=num_streams, state=json.loads(state))
        for batch, progress in batches[number : number + 4]:
            assert_same(next(resumed), batch)
            assert resumed.progress == progress
    assert batches[-1][1] > 1, "the end of the set was crossed"


def test_a_state_of_one_stream_serves_another() -> None:
    first, second = loader(stream=0, num_streams=2), loader(stream=1, num_streams=2)
    next(first), next(second)
    assert first.state() == second.state()
    assert_same(next(loader(stream=1, num_streams=2, state=first.state())), next(second))


def test_long_conversations_end_at_their_last_answer_that_fits() -> None:
    tokenizer = golden_tokenizer()
    limit = len(render(talk(3, 4, 5, 6, 7), tokenizer)[0])  # one more question fits, its answer does not
    batches = loader([talk(3, 4, 5, 6, 7, 8)], batch_size=1, sequence_len=limit)
    assert (batches.truncated, batches.dropped) == (1, 0)
    ids, mask = render(talk(3, 4, 5, 6), tokenizer)
    batch = next(batches)
    assert batch.inputs[0].tolist() == ids + [tokenizer.bos_id] * (limit - len(ids))
    assert (batch.targets[0] >= 0).tolist() == [bit == 1 for bit in mask[1:]] + [False] * (limit + 1 - len(ids))


def test_conversations_of_exactly_a_row_are_kept_and_longer_ones_dropped() -> None:
    tokenizer = golden_tokenizer()
    exact, longer = talk(5, 6), talk(5, 7)
    length = len(render(exact, tokenizer)[0])
    batches = loader([exact, longer], batch_size=1, sequence_len=length)
    assert (batches.truncated, batches.dropped) == (0, 1)
    next(batches)
    assert batches.progress == 1.0, "what is left out does not count"
    assert loader([exact, longer], sequence_len=100, max_tokens=length).dropped == 1


def test_nothing_to_learn_is_a_clear_error() -> None:
    for conversations in ([], [talk(200, 1)], [talk(3)]):
        with pytest.raises(UserError, match="has an answer that fits a row of 128 tokens"):
            loader(conversations)
    with pytest.raises(UserError, match="must speak"):
        loader([{"messages": [{"role": "assistant", "content": "4"}]}])


def test_a_state_of_other_conversations_is_refused() -> None:
    state = loader().state()
    with pytest.raises(UserError, match="continue with the same ones"):
        loader(CONVERSATIONS[:10], state=state)
    with pytest.raises(UserError, match="in 1 streams"):
        loader(num_streams=2, state=state)
    with pytest.raises(UserError, match="version 9"):
        loader(state={**state, "version": 9})


@settings(deadline=None, max_examples=30)
@given(
    turns=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=12),
    sequence_len=st.integers(8, 60),
    buffer_conversations=st.integers(1, 20),
    num_streams=st.integers(1, 3),
)
def test_every_row_begins_a_conversation_and_ends_its_targets_with_an_answer(
    turns: list[list[int]], sequence_len: int, buffer_conversations: int, num_streams: int
) -> None:
    conversations = [talk(*lengths) for lengths in turns]
    try:
        batches = loader(
            conversations,
            sequence_len=sequence_len,
            buffer_conversations=buffer_conversations,
            num_streams=num_streams,
        )
    except UserError:
        return
    bos, end = golden_tokenizer().bos_id, golden_tokenizer().special_id("<|assistant_end|>")
    for _ in range(4):
        batch = next(batches)
        assert (batch.inputs[:, 0] == bos).all()
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
            learned = np.flatnonzero(targets >= 0)
            assert learned.size
            assert targets[learned[-1]] == end
            assert (targets[learned[-1] + 1 :] == -1).all()
            assert (targets[learned] != bos).all()
            assert (targets[:-1][targets[:-1] >= 0] == inputs[1:][targets[:-1] >= 0]).all()
