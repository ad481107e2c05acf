"""Learns a vocabulary from text, with rustbpe."""

from __future__ import annotations

from collections.abc import Iterator

import rustbpe

from nanochat.errors import UserError
from nanochat.tokenizer.bpe import Tokenizer
from nanochat.tokenizer.special import SPECIAL_TOKENS, SPLIT_PATTERN

#: All single bytes and the special tokens: a vocabulary without any merge.
SMALLEST_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)


def train(texts: Iterator[str], vocab_size: int, max_chars: int = 2_000_000_000, doc_cap: int = 10_000) -> Tokenizer:
    """Merge the most frequent pair of tokens, again and again, until there are ``vocab_size`` tokens.

    Args:
        texts: documents; read once, one at a time.
        vocab_size: number of tokens, the special ones included; those take the last ids.
        max_chars: no further document is read once this many characters were.
        doc_cap: characters of one document at most, so that no single one decides the merges.

    Raises:
        UserError: when ``vocab_size`` is too small, or the texts are too small for it.
    """
    if vocab_size < SMALLEST_VOCAB_SIZE:
        raise UserError(
            f"a vocabulary of {vocab_size} tokens has no room for 256 bytes and {len(SPECIAL_TOKENS)} special tokens:"
            f" give --vocab-size {SMALLEST_VOCAB_SIZE} or more"
        )
    if max_chars < 1 or doc_cap < 1:
        raise UserError("a tokenizer cannot be trained on 0 characters: raise --max-chars and --doc-cap")
    trainer = rustbpe.Tokenizer()
    num_mergeable = vocab_size - len(SPECIAL_TOKENS)
    trainer.train_from_iterator(_capped(texts, max_chars, doc_cap), num_mergeable, pattern=SPLIT_PATTERN)
    ranks = {bytes(token): int(rank) for token, rank in trainer.get_mergeable_ranks()}
    if len(ranks) < num_mergeable:
        found = len(ranks) - 256
        raise UserError(
            f"the text gives {found} merges where {vocab_size} tokens need {num_mergeable - 256}:"
            f" give --vocab-size {len(ranks) + len(SPECIAL_TOKENS)} at most, or more text"
        )
    return Tokenizer(SPLIT_PATTERN, ranks, {name: num_mergeable + i for i, name in enumerate(SPECIAL_TOKENS)})


def _capped(texts: Iterator[str], max_chars: int, doc_cap: int) -> Iterator[str]:
    read = 0
    for text in texts:
        if read >= max_chars:
            break
        document = text[:doc_cap]
        read += len(document)
        yield document
    if not read:
        raise UserError("there is no text to train a tokenizer on: every document is empty")
