"""The calculator inside a text: its results are forced in, and a reader can tell them from what the model says.

When the model closes a python part, the expression in it is evaluated and the result follows between output_start and
output_end. Those tokens are never sampled, so what stands between them is always the calculator's.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from nanochat.inference.calculator import calculate
from nanochat.tokenizer.bpe import Tokenizer
from nanochat.tokenizer.special import OUTPUT_END, OUTPUT_START, PYTHON_END, PYTHON_START

PartType = Literal["text", "python", "python_output"]


class Piece(NamedTuple):
    """A stretch of an answer: some of its text, or a whole python part, or a whole result."""

    type: PartType
    text: str


class PythonTool:
    """Follows one text as it grows, and says which tokens must come next.

    Attributes:
        never_sampled: ids that only this tool may write.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._python_start, self._python_end = map(tokenizer.special_id, (PYTHON_START, PYTHON_END))
        self._output_start, self._output_end = map(tokenizer.special_id, (OUTPUT_START, OUTPUT_END))
        self.never_sampled = frozenset({self._output_start, self._output_end})
        self._expression: list[int] | None = None

    def follow(self, token: int) -> list[int]:
        """Take the next sampled token; return the ids that are forced after it, mostly none.

        A python part whose expression has no value forces nothing.
        """
        if token == self._python_start:
            self._expression = []
        elif token != self._python_end:
            if self._expression is not None:
                self._expression.append(token)
        elif self._expression is not None:
            result = calculate(self._tokenizer.decode(self._expression))
            self._expression = None
            if result is not None:
                return [self._output_start, *self._tokenizer.encode(result), self._output_end]
        return []


def pieces(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[Piece]:
    """An answer's tokens as they come: text at once, never cut inside a character; other parts when they end.

    A part that is never closed ends with the answer. A mark that opens or closes nothing is text, by its name.
    """
    ends: dict[int, tuple[int, PartType]] = {
        tokenizer.special_id(PYTHON_START): (tokenizer.special_id(PYTHON_END), "python"),
        tokenizer.special_id(OUTPUT_START): (tokenizer.special_id(OUTPUT_END), "python_output"),
    }
    waiting = iter(tokens)
    text = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in waiting:
        if token not in ends:
            if piece := text.decode(tokenizer.decode_bytes([token])):
                yield Piece("text", piece)
            continue
        if rest := text.decode(b"", final=True):
            yield Piece("text", rest)
        text.reset()
        end, part = ends[token]
        inside: list[int] = []
        for inner in waiting:
            if inner == end:
                break
            inside.append(inner)
        yield Piece(part, tokenizer.decode(inside))
    if rest := text.decode(b"", final=True):
        yield Piece("text", rest)


def shown(stream: Iterable[Piece]) -> Iterator[str]:
    """Pieces as a person reads them: a python part and its result as ``[60+33 = 93]``, without one as ``[60+x]``."""
    expression: str | None = None
    for piece in stream:
        if piece.type == "python_output":
            yield f"[{expression or ''} = {piece.text}]"
            expression = None
            continue
        if expression is not None:
            yield f"[{expression}]"
        expression = piece.text if piece.type == "python" else None
        if piece.type == "text":
            yield piece.text
    if expression is not None:
        yield f"[{expression}]"


def content(stream: Iterable[Piece]) -> str | list[dict[str, Any]]:
    """Pieces as the content of an assistant's message: a string, or a list of parts when the tool was used.

    Rendered again, the message has the tokens it was made of, up to how text splits into them.
    """
    parts: list[dict[str, Any]] = []
    for piece in stream:
        if parts and piece.type == "text" == parts[-1]["type"]:
            parts[-1]["text"] += piece.text
        else:
            parts.append({"type": piece.type, "text": piece.text})
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts
