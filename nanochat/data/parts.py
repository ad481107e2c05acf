"""Where a long text is cut into parts: at a paragraph, else a line, else a word."""

from __future__ import annotations

#: In order of preference: what a part ends with or the next one begins with, and whether it belongs to the part.
_BORDERS = (("\n\n", True), ("\n", True), (" ", False))


def end_of_part(text: str, start: int, longest: int) -> int:
    """Where the part of ``text`` that begins at ``start`` ends, at most ``longest`` characters on.

    It ends at the last blank line of its second half, else the last line end there, else before the last space, else at
    ``longest``. A piece of the tokenizer's split pattern does not cross a single line end or begin before a single
    space, so as a rule cutting there changes no token.
    """
    assert longest >= 1
    limit = start + longest
    if limit >= len(text):
        return len(text)
    for border, belongs in _BORDERS:
        place = text.rfind(border, start + longest // 2 + 1, limit)
        if place > start:
            return place + len(border) if belongs else place
    return limit
