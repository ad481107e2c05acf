"""Byte-level byte-pair encoding (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909), done by tiktoken.

On disk a tokenizer is one JSON file that anyone can read; no pickle.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from numpy.typing import ArrayLike, NDArray

from nanochat.errors import UserError
from nanochat.tokenizer.special import BOS

FILE_NAME = "tokenizer.json"
FORMAT = "nanochat-tokenizer"
FORMAT_VERSION = 1

#: tiktoken's pattern matcher overflows its stack on some hundred thousand blanks in a row; such runs are cut.
LONGEST_BLANK = 50_000
_LONG_BLANK = re.compile(rf"\s{{{LONGEST_BLANK}}}")


class Tokenizer:
    """Turns text into token ids and back.

    Special tokens are never made from text: what looks like one in a document or a message is ordinary text.

    Args:
        pattern: regular expression that splits text into the pieces within which bytes are merged.
        mergeable_ranks: every token's bytes and its id, which is also its merge's priority; all 256 bytes are there.
        special_tokens: the others, by name, ``<|bos|>`` among them. All ids together are 0 … V-1.
        token_bytes: (V,) bytes that each token counts for in bits per byte. When not given: the length of the token's
            own bytes, and 0 for special ones.

    Raises:
        UserError: when the parts do not make a tokenizer.
    """

    def __init__(
        self,
        pattern: str,
        mergeable_ranks: Mapping[bytes, int],
        special_tokens: Mapping[str, int],
        token_bytes: ArrayLike | None = None,
    ) -> None:
        _check_vocabulary(mergeable_ranks, special_tokens)
        self.pattern = pattern
        self.mergeable_ranks = dict(sorted(mergeable_ranks.items(), key=lambda item: item[1]))
        self.special_tokens = dict(sorted(special_tokens.items(), key=lambda item: item[1]))
        self.bos_id = self.special_id(BOS)
        self.token_bytes = self._lengths() if token_bytes is None else _checked_lengths(token_bytes, self.vocab_size)
        try:
            self._encoding = tiktoken.Encoding(
                "nanochat", pat_str=pattern, mergeable_ranks=self.mergeable_ranks, special_tokens=self.special_tokens
            )
        except ValueError as error:
            raise UserError(f"the tokenizer's split pattern is not a regular expression: {error}") from None

    @property
    def vocab_size(self) -> int:
        """Number of tokens V, the special ones included."""
        return len(self.mergeable_ranks) + len(self.special_tokens)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of pattern, ranks and special tokens: equal when every text gets equal ids."""
        ranks = [(token.hex(), rank) for token, rank in self.mergeable_ranks.items()]
        canonical = json.dumps([self.pattern, ranks, list(self.special_tokens.items())], separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def special_id(self, name: str) -> int:
        """Id of a special token, e.g. ``<|bos|>``; raises :class:`UserError` when this tokenizer has none."""
        try:
            return self.special_tokens[name]
        except KeyError:
            raise UserError(
                f"the tokenizer has no token {name}: it was not made for chat models of this kind"
            ) from None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without bos."""
        if len(text) < LONGEST_BLANK:
            return self._encoding.encode_ordinary(text)
        return [token for piece in _cut_blanks(text) for token in self._encoding.encode_ordinary(piece)]

    def encode_batch(self, texts: Sequence[str], threads: int = 4) -> list[list[int]]:
        """Token ids of each text; the same as :meth:`encode` one by one."""
        pieces = [_cut_blanks(text) if len(text) >= LONGEST_BLANK else [text] for text in texts]
        encoded = iter(self._encoding.encode_ordinary_batch(list(itertools.chain(*pieces)), num_threads=threads))
        return [list(itertools.chain(*itertools.islice(encoded, len(of_text)))) for of_text in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return self._encoding.decode(ids, errors="replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Bytes of token ids; a special token gives its name."""
        return self._encoding.decode_bytes(ids)

    def save(self, folder: Path) -> None:
        """Write ``<folder>/tokenizer.json``, whole or not at all; raises :class:`UserError` when the disk refuses."""
        data = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "fingerprint": self.fingerprint,
            "pattern": self.pattern,
            "special_tokens": self.special_tokens,
            "token_bytes": self.token_bytes.tolist(),
            "mergeable_ranks": {token.hex(): rank for token, rank in self.mergeable_ranks.items()},
        }
        temporary = folder / f".{FILE_NAME}.tmp-{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(data, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, folder / FILE_NAME)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UserError(
                f"the tokenizer cannot be written to {folder} ({error.strerror}): check that the folder can be written"
            ) from error

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read ``<folder>/tokenizer.json``; raises :class:`UserError` when it is absent or damaged."""
        path = folder / FILE_NAME
        advice = "train it again with nanochat tokenizer, or copy it anew"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"there is no {path}: train a tokenizer with nanochat tokenizer") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}): {advice}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise UserError(f"{path} is not a tokenizer of nanochat: {advice}")
        if data.get("version") != FORMAT_VERSION:
            raise UserError(f"{path} has format version {data.get('version')!r}: update nanochat to read it")
        try:
            tokenizer = cls._from_dict(data)
        except UserError as error:
            raise UserError(f"{path} is damaged ({error}): {advice}") from None
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UserError(f"{path} is damaged (parts are missing or malformed): {advice}") from None
        if tokenizer.fingerprint != data["fingerprint"]:
            raise UserError(f"{path} is damaged (it does not match its fingerprint): {advice}")
        return tokenizer

    @classmethod
    def _from_dict(cls, data: dict[str, Any]) -> Tokenizer:
        ranks = {bytes.fromhex(token): rank for token, rank in data["mergeable_ranks"].items()}
        return cls(data["pattern"], ranks, data["special_tokens"], data["token_bytes"])

    def _lengths(self) -> NDArray[np.int64]:
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, rank in self.mergeable_ranks.items():
            lengths[rank] = len(token)
        lengths.setflags(write=False)
        return lengths


def _check_vocabulary(mergeable_ranks: Mapping[bytes, int], special_tokens: Mapping[str, int]) -> None:
    ids = [*mergeable_ranks.values(), *special_tokens.values()]
    if any(type(number) is not int for number in ids) or sorted(ids) != list(range(len(ids))):
        raise UserError(f"the tokenizer's {len(ids)} tokens do not have the ids 0 to {len(ids) - 1}")
    missing = sum(bytes([byte]) not in mergeable_ranks for byte in range(256))
    if missing:
        raise UserError(f"the tokenizer lacks {missing} of the 256 single bytes")


def _checked_lengths(token_bytes: ArrayLike, vocab_size: int) -> NDArray[np.int64]:
    lengths = np.array(token_bytes)
    if lengths.shape != (vocab_size,) or lengths.dtype.kind not in "iu" or (lengths < 0).any():
        raise UserError(f"the tokenizer's byte lengths are not {vocab_size} whole numbers of at least 0")
    lengths = lengths.astype(np.int64)
    lengths.setflags(write=False)
    return lengths


def _cut_blanks(text: str) -> list[str]:
    """The text in pieces, none with more than :data:`LONGEST_BLANK` blanks in a row."""
    cuts = [match.end() for match in _LONG_BLANK.finditer(text)]
    return [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
