"""Rows as they are trained, for people: where documents begin, and what of a conversation is learned."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanochat.data.blend import Blend
from nanochat.data.loader import PretrainLoader
from nanochat.data.packing import Packing
from nanochat.data.sft import SftLoader
from nanochat.data.sources import Split
from nanochat.tokenizer.bpe import Tokenizer

#: Terminal codes of special tokens, of what is learned, and of none.
_SPECIAL, _LEARNED, _PLAIN = "\x1b[1;36m", "\x1b[32m", "\x1b[0m"
#: Marks of what is learned where there are no colours.
_OPEN, _CLOSE = "[[", "]]"
#: What would command a terminal instead of being shown.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens of one kind and one document, as text."""

    text: str
    special: bool
    learned: bool
    #: Which document or conversation of the row, from 1.
    document: int


@dataclass(frozen=True)
class ShownRow:
    """One row of T + 1 tokens in spans."""

    spans: tuple[Span, ...]
    summary: str

    def marked(self, *, color: bool) -> str:
        """The row as text, each document on a new line: in colours, or with ``[[ … ]]`` around what is learned."""
        parts: list[str] = []
        last = 0
        for (document, learned), spans in itertools.groupby(self.spans, key=lambda span: (span.document, span.learned)):
            if parts and document != last:
                parts.append("\n")
            last = document
            text = "".join(_coloured(span) if color else _visible(span.text) for span in spans)
            parts.append(f"{_OPEN}{text}{_CLOSE}" if learned and not color else text)
        return "".join(parts)

    def to_dict(self) -> dict[str, Any]:
        return {
            "summary": self.summary,
            "spans": [dataclasses.asdict(span) for span in self.spans],
        }


def text_rows(
    blend: Blend, split: Split, tokenizer: Tokenizer, num_rows: int, sequence_len: int, packing: Packing
) -> list[ShownRow]:
    """The first rows of a text; every token but the first is learned, so nothing is marked as such."""
    loader = PretrainLoader(blend, split, tokenizer, 1, sequence_len, packing=packing)
    rows = []
    for batch in itertools.islice(loader, num_rows):
        ids = np.append(batch.inputs[0], batch.targets[0, -1])
        pieces = int((ids == tokenizer.bos_id).sum())
        summary = f"{len(ids):,} tokens, {pieces} documents or parts of one"
        rows.append(ShownRow(_spans(ids, np.zeros(len(ids), dtype=bool), tokenizer), summary))
    return rows


def conversation_rows(
    conversations: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, num_rows: int, sequence_len: int
) -> list[ShownRow]:
    """The first rows of conversations, in the order of the file; what the model learns to say is marked."""
    loader = SftLoader(conversations, tokenizer, 1, sequence_len)
    rows = []
    for batch in itertools.islice(loader, num_rows):
        ids = np.append(batch.inputs[0], max(batch.targets[0, -1], tokenizer.bos_id))
        learned = np.append(False, batch.targets[0] >= 0)
        filled = len(ids) - _trailing(ids, tokenizer.bos_id)
        summary = f"{filled:,} of {len(ids):,} tokens filled, {int(learned.sum()):,} learned"
        rows.append(ShownRow(_spans(ids[:filled], learned[:filled], tokenizer), summary))
    return rows


def _trailing(ids: NDArray[np.int64], token: int) -> int:
    """How many ``token`` end a row."""
    others = np.flatnonzero(ids != token)
    return len(ids) - 1 - int(others[-1]) if len(others) else len(ids)


def _spans(ids: NDArray[np.int64], learned: NDArray[np.bool_], tokenizer: Tokenizer) -> tuple[Span, ...]:
    special = {number: name for name, number in tokenizer.special_tokens.items()}
    documents = np.cumsum(ids == tokenizer.bos_id)
    keys = [
        (int(token) in special, bool(bit), int(document))
        for token, bit, document in zip(ids, learned, documents, strict=True)
    ]
    found: list[Span] = []
    for key, group in itertools.groupby(range(len(ids)), key=lambda index: keys[index]):
        tokens = [int(ids[index]) for index in group]
        text = "".join(special[token] for token in tokens) if key[0] else tokenizer.decode(tokens)
        found.append(Span(text, *key))
    return tuple(found)


def _coloured(span: Span) -> str:
    code = _SPECIAL if span.special else ""
    code += _LEARNED if span.learned else ""
    return f"{code}{_visible(span.text)}{_PLAIN}" if code else _visible(span.text)


def _visible(text: str) -> str:
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
