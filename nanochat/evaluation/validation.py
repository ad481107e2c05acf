"""The validation of a run: always the same rows of the same text."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from nanochat.data.amounts import count_tokens
from nanochat.data.blend import Blend
from nanochat.data.loader import PretrainLoader
from nanochat.data.sources import DataSet
from nanochat.errors import UserError
from nanochat.evaluation.bits_per_byte import BatchLosses, BitsPerByte, bits_per_byte
from nanochat.tokenizer.bpe import Tokenizer


@dataclass(frozen=True)
class Validation:
    """Which rows of a validation text are measured, packed by best fit however the run packs its training text.

    The rows follow from these values alone, so every measurement of a run (and of any other run
    with the same values and tokenizer) sees the same text. Of a blend, the rows are of each source's validation text
    in turn, for its share.
    """

    blend: Blend
    batch_size: int
    sequence_len: int
    num_batches: int
    buffer_documents: int
    fetch_documents: int

    @property
    def num_tokens(self) -> int:
        return self.num_batches * self.batch_size * self.sequence_len

    def measure(self, losses: BatchLosses, tokenizer: Tokenizer) -> BitsPerByte:
        """Bits per byte of a model; ``losses`` gives token losses (B, T) in nats."""
        loader = PretrainLoader(
            self.blend,
            "val",
            tokenizer,
            self.batch_size,
            self.sequence_len,
            buffer_documents=self.buffer_documents,
            fetch_documents=self.fetch_documents,
        )
        return bits_per_byte(losses, islice(loader, self.num_batches), tokenizer.token_bytes)


def plan_validation(
    data: Blend | DataSet,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    sequence_len: int,
    eval_tokens: int,
    buffer_documents: int = 1000,
    fetch_documents: int = 128,
) -> Validation:
    """Choose how many batches to measure: ``eval_tokens`` in all, but no more than the text holds.

    Of a blend, no more than until the first source has been read once.

    Raises:
        UserError: when ``eval_tokens`` is less than one batch.
    """
    batch_tokens = batch_size * sequence_len
    if eval_tokens < batch_tokens:
        raise UserError(
            f"{eval_tokens:,} validation tokens are less than one batch of {batch_size} rows of {sequence_len}:"
            f" give --eval-tokens {batch_tokens} or more"
        )
    blend = data if isinstance(data, Blend) else Blend.of(data)
    present = min(
        count_tokens(source.data_set, "val", tokenizer, at_most=eval_tokens) / source.share for source in blend.sources
    )
    num_batches = max(1, int(min(eval_tokens, present)) // batch_tokens)
    return Validation(blend, batch_size, sequence_len, num_batches, buffer_documents, fetch_documents)
