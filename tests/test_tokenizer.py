"""Text becomes the family's ids, comes back, and a tokenizer on disk is whole or refused."""

from __future__ import annotations

import json
import random
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from golden_text import RUN_DATA, expected, golden_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from nanochat.data.sources import iterate_texts, open_data_set
from nanochat.errors import UserError
from nanochat.tokenizer import bpe
from nanochat.tokenizer.bpe import Tokenizer
from nanochat.tokenizer.special import SPECIAL_TOKENS, SPLIT_PATTERN
from nanochat.tokenizer.train import BATCH_DOCUMENTS, SMALLEST_VOCAB_SIZE, train

VALUES = expected("run/expected_tokenizer")


@pytest.mark.parametrize("case", VALUES["cases"], ids=lambda case: repr(case["text"][:20]))
def test_ids_equal_the_family_s(case: dict) -> None:
    tokenizer = golden_tokenizer()
    assert tokenizer.encode(case["text"]) == case["ids"]
    assert [tokenizer.bos_id, *tokenizer.encode(case["text"])] == case["with_bos"]
    assert tokenizer.decode(case["ids"]) == case["text"]


def test_training_finds_the_family_s_merges_and_byte_lengths() -> None:
    tokenizer = train(iterate_texts(open_data_set(RUN_DATA), "train"), VALUES["vocab_size"])
    assert tokenizer.mergeable_ranks == {bytes.fromhex(token): rank for token, rank in VALUES["merges"]}
    assert tokenizer.special_tokens == VALUES["special"]
    assert tokenizer.pattern == VALUES["pattern"]
    assert tokenizer.token_bytes.tolist() == VALUES["token_bytes"]
    assert tokenizer.fingerprint == golden_tokenizer().fingerprint


@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    tokenizer = golden_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode()


@given(st.lists(st.text(), max_size=5))
def test_a_batch_is_encoded_as_one_by_one(texts: list[str]) -> None:
    tokenizer = golden_tokenizer()
    assert tokenizer.encode_batch(texts, threads=2) == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("name", SPECIAL_TOKENS)
def test_special_tokens_in_text_are_ordinary_text(name: str) -> None:
    tokenizer = golden_tokenizer()
    ids = tokenizer.encode(f"a {name} b")
    assert not set(ids) & set(tokenizer.special_tokens.values())
    assert tokenizer.decode(ids) == f"a {name} b"


def test_very_long_runs_of_blanks_are_encoded() -> None:
    tokenizer = golden_tokenizer()
    texts = ["a" + " " * 1_000_000 + "b", "\t" * 60_000, "short"]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text) == ids


def test_broken_characters_are_replaced_when_decoded() -> None:
    tokenizer = golden_tokenizer()
    assert tokenizer.decode(tokenizer.encode("世")[:1]) == "�"


def test_special_tokens_count_no_bytes_and_lengths_are_read_only() -> None:
    tokenizer = golden_tokenizer()
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
    assert all(tokenizer.token_bytes[token] == 0 for token in tokenizer.special_tokens.values())
    with pytest.raises(ValueError, match="read-only"):
        tokenizer.token_bytes[0] = 7


def test_saved_tokenizer_loads_as_the_same(tmp_path: Path) -> None:
    own = golden_tokenizer()
    counts = own.token_bytes.copy()
    counts[7] = 3  # as the family's files count some pieces
    Tokenizer(own.pattern, own.mergeable_ranks, own.special_tokens, counts).save(tmp_path / "tokenizer")
    loaded = Tokenizer.load(tmp_path / "tokenizer")
    assert loaded.fingerprint == own.fingerprint
    assert loaded.mergeable_ranks == own.mergeable_ranks
    assert np.array_equal(loaded.token_bytes, counts)
    assert [path.name for path in (tmp_path / "tokenizer").iterdir()] == [bpe.FILE_NAME]


def test_fingerprint_tells_tokenizers_apart() -> None:
    own = golden_tokenizer()
    other_pattern = Tokenizer(r"\s+|\S+", own.mergeable_ranks, own.special_tokens)
    last = own.vocab_size - 1
    swapped = {
        name: 2 * last - 1 - number if number >= last - 1 else number for name, number in VALUES["special"].items()
    }
    other_ids = Tokenizer(own.pattern, own.mergeable_ranks, swapped)
    assert len({own.fingerprint, other_pattern.fingerprint, other_ids.fingerprint}) == 3


def test_absent_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no .*tokenizer\.json: train a tokenizer"):
        Tokenizer.load(tmp_path)


DAMAGES = {
    "cut short": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "no object": lambda text: "[]",
    "another format": lambda text: text.replace(bpe.FORMAT, "other"),
    "newer": lambda text: text.replace('"version": 1', '"version": 2'),
    "changed merge": lambda text: text.replace('"20": 32, "21": 33', '"20": 33, "21": 32'),
    "double rank": lambda text: text.replace('"20": 32', '"20": 33'),
    "changed pattern": lambda text: text.replace("ll|ve", "ll|vx"),
    "part missing": lambda text: text.replace('"token_bytes"', '"bytes"'),
    "bad hex": lambda text: text.replace('"20": 32', '"2": 32'),
    "short lengths": lambda text: text.replace('"token_bytes": [1, ', '"token_bytes": ['),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused_by_name(damage: str, tmp_path: Path) -> None:
    golden_tokenizer().save(tmp_path)
    path = tmp_path / bpe.FILE_NAME
    text = path.read_text(encoding="utf-8")
    changed = DAMAGES[damage](text)
    assert changed != text
    path.write_text(changed, encoding="utf-8")
    with pytest.raises(UserError, match=str(path)):
        Tokenizer.load(tmp_path)


def test_parts_that_make_no_tokenizer_are_refused() -> None:
    own = golden_tokenizer()
    ranks, special = own.mergeable_ranks, own.special_tokens
    with pytest.raises(UserError, match="ids 0 to"):
        Tokenizer(own.pattern, ranks, {**special, "<|bos|>": 0})
    with pytest.raises(UserError, match="single bytes"):
        Tokenizer(own.pattern, {b"ab" + token: rank for token, rank in ranks.items()}, special)
    with pytest.raises(UserError, match=r"no token <\|bos\|>"):
        Tokenizer(own.pattern, ranks, {name.upper(): number for name, number in special.items()})
    with pytest.raises(UserError, match="not a regular expression"):
        Tokenizer("(", ranks, special)
    with pytest.raises(UserError, match="byte lengths"):
        Tokenizer(own.pattern, ranks, special, [-1] * own.vocab_size)


def test_training_says_what_the_text_can_give() -> None:
    with pytest.raises(UserError, match=f"give --vocab-size {SMALLEST_VOCAB_SIZE} or more"):
        train(iter(["text"]), SMALLEST_VOCAB_SIZE - 1)
    with pytest.raises(UserError, match="every document is empty"):
        train(iter(["", ""]), 300)
    with pytest.raises(UserError, match=r"gives 2 merges .* give --vocab-size 267 at most"):
        train(iter(["abc"]), 1000)
    assert train(iter(["abc"]), 267).vocab_size == 267
    assert train(iter(["abc"]), SMALLEST_VOCAB_SIZE).mergeable_ranks == {bytes([byte]): byte for byte in range(256)}


def test_training_stops_reading_at_its_limits() -> None:
    read = []

    def texts():
        for text in ("abab" * 10, "cdcd" * 10, "efef" * 10):
            read.append(text)
            yield text

    tokenizer = train(texts(), SMALLEST_VOCAB_SIZE + 2, max_chars=6, doc_cap=4)
    assert len(read) <= 3
    assert set(tokenizer.mergeable_ranks) - {bytes([byte]) for byte in range(256)} <= {b"ab", b"abab", b"cd", b"cdcd"}


def random_words(num_documents: int) -> Iterator[str]:
    """Documents in which no word comes twice, so that every one takes memory."""
    generator = random.Random(0)
    for _ in range(num_documents):
        yield " ".join("".join(generator.choices(string.ascii_lowercase, k=8)) for _ in range(500))


def test_training_stops_reading_when_distinct_pieces_take_too_much_memory() -> None:
    read, said = [], []

    def texts() -> Iterator[str]:
        for text in random_words(20 * BATCH_DOCUMENTS):
            read.append(len(text))
            yield text

    tokenizer = train(texts(), SMALLEST_VOCAB_SIZE + 10, max_piece_bytes=8_000_000, say=said.append)
    assert tokenizer.vocab_size == SMALLEST_VOCAB_SIZE + 10
    assert len(read) < 10 * BATCH_DOCUMENTS
    assert len(said) == 1
    assert f"stopped reading after {len(read):,} documents ({sum(read):,} characters)" in said[0]


def test_training_on_text_that_repeats_says_nothing_of_memory() -> None:
    said: list[str] = []
    train(iter(["some words that come again and again"] * 2000), 270, say=said.append)
    assert said == []


#: Ten times the text may take this much more.
MOST_GROWTH_BYTES = 32_000_000


@pytest.mark.soak
def test_ten_times_the_text_takes_hardly_more_memory() -> None:
    code = (
        "import random, sys; from nanochat.tokenizer.train import train;"
        " from nanochat.tokenizer.memory import peak_resident_bytes;"
        " generator = random.Random(0); letters = 'etaoinshrdlu';"
        " words = [''.join(generator.choices(letters, k=generator.randint(2, 9))) for _ in range(30_000)];"
        " weights = [1 / (i + 1) for i in range(len(words))];"
        " documents = [' '.join(generator.choices(words, weights, k=1500)) for _ in range(300)];"
        " size = sum(map(len, documents)) / len(documents);"
        " train((generator.choice(documents) for _ in range(int(int(sys.argv[1]) * 1e6 / size))), 4096);"
        " print(peak_resident_bytes())"
    )
    peaks = []
    for megabytes in ("10", "100"):
        command = [sys.executable, "-c", code, megabytes]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert peaks[1] - peaks[0] < MOST_GROWTH_BYTES


def test_the_pattern_is_the_family_s() -> None:
    assert VALUES["pattern"] == SPLIT_PATTERN
    assert list(VALUES["special"]) == sorted(SPECIAL_TOKENS)
    assert [VALUES["special"][name] for name in SPECIAL_TOKENS] == list(range(512, 521))


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    golden_tokenizer().save(tmp_path)
    data = json.loads((tmp_path / bpe.FILE_NAME).read_text(encoding="utf-8"))
    assert data["special_tokens"] == VALUES["special"]


def test_tokenizer_and_data_load_no_torch() -> None:
    code = "import nanochat.data.loader, nanochat.data.sft, nanochat.data.chitchat, nanochat.tokenizer.train, sys;"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
