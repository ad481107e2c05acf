"""Reads the family's tokenizer files, and finds them a place beside the tokenizers that are there."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from nanochat.checkpoint import TokenizerReference
from nanochat.errors import UserError
from nanochat.interop.pickles import read_encoding
from nanochat.interop.torch_archive import read_torch
from nanochat.tokenizer import store
from nanochat.tokenizer.bpe import FILE_NAME, Tokenizer

IntArray = npt.NDArray[np.int64]

PICKLE_NAME = "tokenizer.pkl"
BYTES_NAME = "token_bytes.pt"

#: A bit of everything that a split pattern has to deal with.
_SAMPLE = "Hello, wörld! It's 12345 ¼ → 你好 🦊\r\n\n  \tdon't(x_y)=0;   "


@dataclass(frozen=True, eq=False)
class PlannedTokenizer:
    """A tokenizer of the family that was read and checked, and the place it gets."""

    tokenizer: Tokenizer
    #: Where its files lie.
    source: Path
    #: Where it goes, or is already.
    folder: Path
    reference: TokenizerReference

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def write(self) -> None:
        """Put it in its place; does nothing when it is there already."""
        if not (self.folder / FILE_NAME).exists():
            self.tokenizer.save(self.folder)


def plan_import(source: Path, base: Path, report: Callable[[str], None]) -> PlannedTokenizer:
    """Read the tokenizer in ``source`` and choose its place: the base folder's own, unless another one is there.

    The byte lengths of its file are kept, since published figures were measured with them; a tokenizer that differs
    in nothing else counts as another one.

    Raises:
        UserError: when a file is damaged or refused, or the two files do not belong together.
    """
    tokenizer = _read(source, report)
    for folder in _places(tokenizer, base):
        if (folder / FILE_NAME).exists():
            present = Tokenizer.load(folder)
            if present.fingerprint != tokenizer.fingerprint or not np.array_equal(
                present.token_bytes, tokenizer.token_bytes
            ):
                continue
        reference = TokenizerReference(tokenizer.fingerprint, folder.relative_to(base).as_posix())
        return PlannedTokenizer(tokenizer, source, folder, reference)
    raise AssertionError("places never end")


def _read(source: Path, report: Callable[[str], None]) -> Tokenizer:
    path = source / PICKLE_NAME
    data = read_encoding(path)
    ids = sorted([*data.mergeable_ranks.values(), *data.special_tokens.values()])
    if ids != list(range(len(ids))) or any(bytes([byte]) not in data.mergeable_ranks for byte in range(256)):
        raise UserError(f"{path} lacks the token of a byte or of an id: is it the family's tokenizer.pkl?")
    byte_lengths = _read_byte_lengths(source / BYTES_NAME, len(ids), report)
    try:
        tokenizer = Tokenizer(data.pattern, data.mergeable_ranks, data.special_tokens, byte_lengths)
    except (UserError, ValueError) as error:
        raise UserError(f"{path} holds a tokenizer that cannot be used ({error}): copy it again") from None
    if not _works(tokenizer):
        raise UserError(
            f"{path} holds a tokenizer that cannot be used (its split pattern {data.pattern[:60]!r} loses text):"
            " copy it again"
        )
    return tokenizer


def _works(tokenizer: Tokenizer) -> bool:
    """Whether a sample survives it; tiktoken takes some patterns that it fails with only when they are used."""
    if not tokenizer.pattern:  # known to fail, and loudly: tiktoken prints where it gave up
        return False
    try:
        return tokenizer.decode(tokenizer.encode(_SAMPLE)) == _SAMPLE
    except BaseException as error:
        # What Rust code raises when it gives up has no public name and is no Exception.
        if type(error).__module__ != "pyo3_runtime":
            raise
        return False


def _read_byte_lengths(path: Path, vocab_size: int, report: Callable[[str], None]) -> IntArray | None:
    """The byte length of each token id; None when there is no such file (a broken link counts as one)."""
    if not os.path.lexists(path):
        report(f"{path} is missing: bits per byte use the true length of each token")
        return None
    lengths = read_torch(path)
    if not isinstance(lengths, torch.Tensor) or lengths.is_floating_point() or lengths.shape != (vocab_size,):
        raise UserError(f"{path} does not hold {vocab_size} byte lengths: is it of another tokenizer?")
    if (lengths < 0).any():
        raise UserError(f"{path} holds negative byte lengths: copy it again")
    return lengths.to(torch.int64).numpy()


def _places(tokenizer: Tokenizer, base: Path) -> Iterator[Path]:
    yield store.folder(None, base)
    name = tokenizer.fingerprint[:8]
    yield store.folder(name, base)
    yield from (store.folder(f"{name}-{number}", base) for number in itertools.count(2))
