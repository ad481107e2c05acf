"""Learns a vocabulary from text, with rustbpe, in bounded memory.

rustbpe holds some documents and every distinct piece of text (a word, a number, …) with its count. Pieces of real text
repeat, so ten times the text takes little more memory; text that never repeats would take all there is, and so reading
stops at a limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import rustbpe

from nanochat.errors import UserError
from nanochat.tokenizer.bpe import Tokenizer
from nanochat.tokenizer.memory import resident_bytes
from nanochat.tokenizer.special import SPECIAL_TOKENS, SPLIT_PATTERN

#: All single bytes and the special tokens: a vocabulary without any merge.
SMALLEST_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)


#: Documents that rustbpe takes at a time; after as many the memory is looked at.
BATCH_DOCUMENTS = 256
#: Memory that distinct pieces may take while text is read. Merging then takes about four times as much.
MAX_PIECE_BYTES = 1_000_000_000


def train(
    texts: Iterator[str],
    vocab_size: int,
    max_chars: int = 2_000_000_000,
    doc_cap: int = 10_000,
    max_piece_bytes: int = MAX_PIECE_BYTES,
    say: Callable[[str], None] = lambda text: None,
) -> Tokenizer:
    """Merge the most frequent pair of tokens, again and again, until there are ``vocab_size`` tokens.

    Args:
        texts: documents; read once, one at a time.
        vocab_size: number of tokens, the special ones included; those take the last ids.
        max_chars: no further document is read once this many characters were.
        doc_cap: characters of one document at most, so that no single one decides the merges.
        max_piece_bytes: no further document is read once the process has grown by this much.
        say: told when reading stopped for that reason.

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
    documents = _bounded(_capped(texts, max_chars, doc_cap), max_piece_bytes, say)
    trainer.train_from_iterator(documents, num_mergeable, buffer_size=BATCH_DOCUMENTS, pattern=SPLIT_PATTERN)
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


def _bounded(documents: Iterator[str], max_piece_bytes: int, say: Callable[[str], None]) -> Iterator[str]:
    """The documents until the process has grown too much; after at least one batch."""
    before = resident_bytes()
    read = 0
    for number in itertools.count(1):
        batch = list(itertools.islice(documents, BATCH_DOCUMENTS))
        if not batch:
            return
        read += sum(map(len, batch))
        yield from batch
        now = resident_bytes()
        if before is not None and now is not None and now - before > max_piece_bytes:
            say(
                f"stopped reading after {number * BATCH_DOCUMENTS:,} documents ({read:,} characters): their distinct"
                f" pieces take {(now - before) / 1e9:.2f} GB, and the merges are found from these"
            )
            return
