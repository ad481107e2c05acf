"""Several data sets in one run: shares of tokens, an order that follows from them alone, exact continuation."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_text import LONG_DATA, RUN_DATA, expected, golden_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from nanochat.data.amounts import count_tokens, estimate_cropped, estimate_tokens, text_use
from nanochat.data.blend import Blend, Source, choose_packing, next_source, resolve_blend
from nanochat.data.loader import PretrainLoader
from nanochat.data.sources import open_data_set
from nanochat.data.writing import write_shards
from nanochat.errors import UserError
from nanochat.evaluation.validation import plan_validation


def base_with(tmp_path: Path, *names: str) -> Path:
    """A base folder with data sets whose documents begin with their set's name."""
    for name in names:
        train, val = [f"{name} {i} " * (5 + i % 7) for i in range(30)], [f"{name} v{i} " * 20 for i in range(4)]
        write_shards(tmp_path / "data" / name, train, val, name=name, source=name, rows_per_group=5)
    return tmp_path


def loader(blend: Blend, state: dict[str, Any] | None = None, packing: str = "keep", split: str = "train"):
    return PretrainLoader(blend, split, golden_tokenizer(), 3, 20, 0, 1, 10, 4, packing, state)


def source_of(row: np.ndarray) -> str:
    """Which of the sets A and B a row is of."""
    text = golden_tokenizer().decode(row.tolist())
    assert ("A" in text) != ("B" in text)
    return "A" if "A" in text else "B"


def test_one_set_gives_the_rows_it_gives_alone() -> None:
    blend = Blend.of(open_data_set(RUN_DATA))
    batches = PretrainLoader(blend, "train", golden_tokenizer(), 4, 64, buffer_documents=50, fetch_documents=32)
    for values in expected("run/expected_loader")["train"]:
        batch = next(batches)
        assert batch.inputs.tolist() == values["inputs"]
        assert batch.position == values["state"]


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=5), st.integers(1, 300))
def test_no_source_is_ever_more_than_one_row_ahead_of_its_share(weights: list[float], num_rows: int) -> None:
    shares = [weight / sum(weights) for weight in weights]
    rows = [0] * len(shares)
    for total in range(1, num_rows + 1):
        rows[next_source(rows, shares)] += 1
        assert all(count - share * total <= 1 for count, share in zip(rows, shares, strict=True))
    assert sum(rows) == num_rows


def test_rows_are_of_the_sources_in_their_shares(tmp_path: Path) -> None:
    blend, notices = resolve_blend(["A:0.75", "B:0.25"], base_with(tmp_path, "A", "B"))
    assert notices == ()
    batches = loader(blend)
    sources = [source_of(row) for _ in range(8) for row in next(batches).inputs]
    assert "".join(sources) == "AABA" * 6
    assert set(batches.positions) == {"A", "B"}


@pytest.mark.parametrize("packing", ["bestfit", "keep"])
def test_a_state_at_any_batch_continues_exactly(packing: str, tmp_path: Path) -> None:
    blend, _ = resolve_blend(["A:0.6", "B:0.4"], base_with(tmp_path, "A", "B"))
    uninterrupted = loader(blend, packing=packing)
    states, batches = [], []
    for _ in range(60):
        states.append(json.dumps(uninterrupted.state()))
        batches.append(next(uninterrupted).inputs.tolist())
    for number in range(0, 55, 6):
        resumed = loader(blend, json.loads(states[number]), packing)
        assert [batch.inputs.tolist() for batch in itertools.islice(resumed, 5)] == batches[number : number + 5]
    assert uninterrupted.position["epoch"] > 1


def test_a_state_of_another_blend_is_refused(tmp_path: Path) -> None:
    base = base_with(tmp_path, "A", "B")
    state = loader(resolve_blend(["A:0.6", "B:0.4"], base)[0]).state()
    for specs in (["A:0.5", "B:0.5"], ["A"]):
        with pytest.raises(UserError, match="has shares"):
            loader(resolve_blend(specs, base)[0], state)
    with pytest.raises(UserError, match="has packing 'keep', not 'bestfit'"):
        loader(resolve_blend(["A:0.6", "B:0.4"], base)[0], state, "bestfit")


def test_specs_find_the_same_blend_again(tmp_path: Path) -> None:
    base = base_with(tmp_path, "A", "B", "C")
    blend, notices = resolve_blend(["A:2", "B:1", "C:1e-1"], base)
    assert notices == (f"the shares sum to 3.1: taken as {blend.name}",)
    again, no_notices = resolve_blend(blend.specs, base)
    assert again.names == blend.names
    assert again.shares == blend.shares
    assert again.fingerprint() == blend.fingerprint()
    assert no_notices == ()
    alone, _ = resolve_blend(["A:0.3"], base)
    assert (alone.shares, alone.specs, alone.name) == ((1.0,), ("A",), "A")


def test_what_is_no_blend_is_refused(tmp_path: Path) -> None:
    base = base_with(tmp_path, "A", "B")
    for specs in (
        ["A", "B"],
        ["A:0.5", "B"],
        ["A:0.5", "B:0"],
        ["A:0.5", "B:-1"],
        ["A:0.5", "B:nan"],
        ["A:1", "B:inf"],
    ):
        with pytest.raises(UserError, match=r"has no share above 0 among several: write --data A:0\.5 B:0\.5"):
            resolve_blend(specs, base)
    with pytest.raises(UserError, match="data set A is named twice"):
        resolve_blend(["A:0.5", "A:0.5"], base)
    with pytest.raises(UserError, match=r"no data set or folder 'C' .* A, B"):
        resolve_blend(["A:0.5", "C:0.5"], base)
    with pytest.raises(UserError, match=r"no data set or folder 'A:x'"):
        resolve_blend(["A:x"], base)


def test_fingerprints_tell_texts_shares_and_validation_apart(tmp_path: Path) -> None:
    base = base_with(tmp_path, "A", "B")
    blends = [resolve_blend(specs, base)[0] for specs in (["A"], ["B"], ["A:0.5", "B:0.5"], ["A:0.6", "B:0.4"])]
    assert len({blend.fingerprint() for blend in blends}) == 4
    longer = [f"A {i} " * (5 + i % 7) for i in range(31)]
    val = [f"A v{i} " * 20 for i in range(4)]
    write_shards(base / "data" / "A", longer, val, name="A", source="A", rows_per_group=5)
    again = resolve_blend(["A"], base)[0]
    assert again.fingerprint() != blends[0].fingerprint()
    assert again.fingerprint("val") == blends[0].fingerprint("val")
    family = Blend.of(open_data_set(RUN_DATA))
    assert family.fingerprint() == Blend.of(open_data_set(RUN_DATA, "another name")).fingerprint()
    assert family.fingerprint() != Blend.of(open_data_set(LONG_DATA)).fingerprint()


def test_a_blend_describes_itself_for_the_records(tmp_path: Path) -> None:
    blend, _ = resolve_blend(["A:0.75", "B:0.25"], base_with(tmp_path, "A", "B"))
    values = blend.describe()
    assert json.loads(json.dumps(values)) == values
    assert (values["name"], values["shards"], values["documents"]) == ("A:0.75 B:0.25", 2, 60)
    assert values["text_bytes"] == sum(each["text_bytes"] for each in values["sources"])
    assert [each["share"] for each in values["sources"]] == [0.75, 0.25]
    assert Blend.of(open_data_set(RUN_DATA)).describe()["text_bytes"] is None


def test_validation_takes_turns_and_ends_with_the_first_source(tmp_path: Path) -> None:
    blend, _ = resolve_blend(["A:0.75", "B:0.25"], base_with(tmp_path, "A", "B"))
    tokenizer = golden_tokenizer()
    validation = plan_validation(blend, tokenizer, batch_size=2, sequence_len=10, eval_tokens=10**6)
    of_a = count_tokens(blend.sources[0].data_set, "val", tokenizer, 10**9)
    assert validation.num_tokens == int(of_a / 0.75) // 20 * 20
    rows = [row for _ in range(4) for row in next(loader(blend, packing="bestfit", split="val")).inputs]
    assert {source_of(row) for row in rows} <= {"A", "B"}


def test_own_text_is_kept_and_published_text_packed_as_published(tmp_path: Path) -> None:
    base = base_with(tmp_path, "A")
    assert choose_packing(resolve_blend(["A"], base)[0])[0] == "keep"
    (tmp_path / "data" / "A").rename(base / "base_data_climbmix")
    blend = resolve_blend(None, base)[0]
    assert choose_packing(blend)[0] == "bestfit"
    assert blend.is_published


def test_tokens_are_counted_when_few_and_estimated_when_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blend, _ = resolve_blend(["A:0.5", "B:0.5"], base_with(tmp_path, "A", "B"))
    tokenizer = golden_tokenizer()
    counted = sum(count_tokens(source.data_set, "train", tokenizer, 10**9) for source in blend.sources)
    assert estimate_tokens(blend, tokenizer) == (counted, True)
    monkeypatch.setattr("nanochat.data.amounts.EXACT_BYTES", 10)
    monkeypatch.setattr("nanochat.data.amounts.SAMPLE_ROW_GROUPS", 3)
    tokens, exact = estimate_tokens(blend, tokenizer)
    assert not exact
    assert abs(tokens - counted) < 0.1 * counted
    monkeypatch.setattr("nanochat.data.amounts.EXACT_DOCUMENTS", 10)
    without_manifest = open_data_set(RUN_DATA)
    tokens, exact = estimate_tokens(without_manifest, tokenizer)
    counted = count_tokens(without_manifest, "train", tokenizer, 10**9)
    assert not exact
    assert abs(tokens - counted) < 0.2 * counted


def test_tokens_counted_when_a_set_was_made_are_not_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = golden_tokenizer()
    write_shards(tmp_path / "A", ["one", "two"], ["three"], name="A", source="A", tokenizer=tokenizer)
    blend = Blend((Source(open_data_set(tmp_path / "A"), 1.0),))
    counted = count_tokens(blend.sources[0].data_set, "train", tokenizer, 10**9)
    monkeypatch.setattr("nanochat.data.amounts.read_texts", None)
    assert estimate_tokens(blend, tokenizer) == (counted, True)


def test_the_share_that_is_cropped_is_foreseen() -> None:
    data_set, tokenizer = open_data_set(RUN_DATA), golden_tokenizer()
    available = estimate_tokens(data_set, tokenizer).tokens
    for sequence_len in (32, 64, 256):
        batches = PretrainLoader(data_set, "train", tokenizer, 1, sequence_len, buffer_documents=50)
        while batches.counters.tokens < available:
            next(batches)
        lost = batches.counters.cropped_tokens / batches.counters.tokens
        assert abs(estimate_cropped(data_set, tokenizer, sequence_len, 50) - lost) < 0.1


def test_use_tells_how_often_each_source_is_read(tmp_path: Path) -> None:
    blend, _ = resolve_blend(["A:0.75", "B:0.25"], base_with(tmp_path, "A", "B"))
    tokenizer = golden_tokenizer()
    use = text_use(blend, tokenizer, 40_000, "keep", 64)
    assert [each.tokens for each in use] == [30_000, 10_000]
    available = count_tokens(blend.sources[0].data_set, "train", tokenizer, 10**9)
    assert use[0].epochs == 30_000 / available
    assert str(use[0]) == f"uses 30,000 of {available:,} available tokens of A, {use[0].epochs:.2f} epochs"
    cropping = text_use(blend, tokenizer, 40_000, "bestfit", 64)
    assert cropping[0].epochs > use[0].epochs
    assert "cropping" in str(cropping[0])
