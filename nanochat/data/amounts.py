"""How many tokens a text has, counted where it is small, else estimated from a sample; and how often it is read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nanochat.data.blend import Blend
from nanochat.data.packing import BestFitBuffer, Packing
from nanochat.data.sources import DataSet, Shard, Split, read_texts
from nanochat.tokenizer.bpe import Tokenizer

#: Documents tokenised at a time.
COUNT_DOCUMENTS = 128
#: Documents that join the buffer at a time when packing is foreseen.
FETCH_DOCUMENTS = 128
#: UTF-8 bytes up to which a text is counted whole.
EXACT_BYTES = 8_000_000
#: Without a manifest: documents up to which it is.
EXACT_DOCUMENTS = 4_000
#: Row groups of a larger text that are sampled, spread evenly over it, and documents of each.
SAMPLE_ROW_GROUPS = 16
SAMPLE_DOCUMENTS = 64


class TokenEstimate(NamedTuple):
    """Tokens, a bos per document included, and whether they were counted."""

    tokens: int
    exact: bool


@dataclass(frozen=True)
class TextUse:
    """How much of one data set a run uses.

    Attributes:
        tokens: trained on.
        available: tokens the training text has.
        cropped: share of the tokens read that packing loses, estimated.
    """

    name: str
    tokens: int
    available: TokenEstimate
    cropped: float

    @property
    def epochs(self) -> float:
        """How often the text is read; infinite when there is none."""
        read = self.tokens / (1 - self.cropped)
        return read / self.available.tokens if self.available.tokens else float("inf")

    def __str__(self) -> str:
        about = "" if self.available.exact else "about "
        lost = f", cropping {self.cropped:.1%} of what is read" if self.cropped else ""
        return (
            f"uses {self.tokens:,} of {about}{self.available.tokens:,} available tokens of {self.name},"
            f" {self.epochs:.2f} epochs{lost}"
        )


def text_use(
    blend: Blend, tokenizer: Tokenizer, tokens: int, packing: Packing, sequence_len: int, buffer_documents: int = 1000
) -> tuple[TextUse, ...]:
    """How much of each source a run of so many training tokens uses, and how often it reads it."""
    return tuple(
        TextUse(
            source.data_set.name,
            round(tokens * source.share),
            estimate_tokens(source.data_set, tokenizer),
            0.0 if packing == "keep" else estimate_cropped(source.data_set, tokenizer, sequence_len, buffer_documents),
        )
        for source in blend.sources
    )


def estimate_cropped(data_set: DataSet, tokenizer: Tokenizer, sequence_len: int, buffer_documents: int = 1000) -> float:
    """Share of the tokens read that ``bestfit`` crops away, by packing the lengths of a sample once."""
    lengths = [1 + len(ids) for texts in _sample(data_set.train) for ids in tokenizer.encode_batch(texts)]
    coming = itertools.cycle(lengths)
    buffer: BestFitBuffer[int] = BestFitBuffer()
    read = cropped = 0
    while read < sum(lengths):
        space = sequence_len + 1
        while space:
            while len(buffer) < buffer_documents:
                for length in itertools.islice(coming, FETCH_DOCUMENTS):
                    buffer.add(length, length)
            length = buffer.take_best_fit(space) or buffer.take_shortest()
            read += length
            cropped += max(0, length - space)
            space -= min(length, space)
    return cropped / read


def count_tokens(data_set: DataSet, split: Split, tokenizer: Tokenizer, at_most: int) -> int:
    """Tokens of a split, a bos per document included; counting stops at ``at_most``, which it then gives."""
    tokens = 0
    for shard in data_set.shards(split):
        for row_group in range(len(shard.row_groups)):
            texts = read_texts(shard, row_group)
            for first in range(0, len(texts), COUNT_DOCUMENTS):
                tokens += _count(texts[first : first + COUNT_DOCUMENTS], tokenizer)
                if tokens >= at_most:
                    return at_most
    return tokens


def estimate_tokens(data: Blend | DataSet, tokenizer: Tokenizer, split: Split = "train") -> TokenEstimate:
    """Tokens of a split, of all sources together, a bos per document included.

    As the manifest has them when it knows this tokenizer; counted when the text is small; else the tokens per byte
    (without a manifest: per document) of a sample times the bytes (documents) of all.
    """
    if isinstance(data, DataSet):
        return _estimate(data, tokenizer, split)
    estimates = [_estimate(source.data_set, tokenizer, split) for source in data.sources]
    return TokenEstimate(sum(each.tokens for each in estimates), all(each.exact for each in estimates))


def _estimate(data_set: DataSet, tokenizer: Tokenizer, split: Split) -> TokenEstimate:
    num_bytes, documents = data_set.text_bytes(split), data_set.documents(split)
    if data_set.manifest is not None and (known := data_set.manifest.tokens.get(tokenizer.fingerprint)):
        return TokenEstimate(known[split], exact=True)
    if num_bytes <= EXACT_BYTES if num_bytes is not None else documents <= EXACT_DOCUMENTS:
        return TokenEstimate(count_tokens(data_set, split, tokenizer, at_most=2**63), exact=True)
    sample = list(_sample(data_set.shards(split)))
    tokens = sum(_count(texts, tokenizer) for texts in sample)
    sample_bytes = sum(len(text.encode()) for texts in sample for text in texts)
    if num_bytes is not None and sample_bytes:
        return TokenEstimate(round(tokens / sample_bytes * num_bytes), exact=False)
    return TokenEstimate(round(tokens / sum(map(len, sample)) * documents), exact=False)


def _sample(shards: Sequence[Shard]) -> Iterator[list[str]]:
    """The first documents of row groups spread evenly over the files."""
    places = [
        (shard, row_group)
        for shard in shards
        for row_group in range(len(shard.row_groups))
        if shard.row_groups[row_group]
    ]
    chosen = min(SAMPLE_ROW_GROUPS, len(places))
    for number in range(chosen):
        shard, row_group = places[number * len(places) // chosen]
        yield read_texts(shard, row_group)[:SAMPLE_DOCUMENTS]


def _count(texts: Sequence[str], tokenizer: Tokenizer) -> int:
    return sum(1 + len(ids) for ids in tokenizer.encode_batch(texts))
