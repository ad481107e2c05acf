"""JSON-lines files, a line at a time; what is wrong is said with file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nanochat.errors import UserError

#: Bytes of a line at most: a line is the one thing that must be in memory whole.
LONGEST_LINE = 64_000_000
_MARK = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """One line that is not blank."""

    #: Where it stands, for messages: file and line number.
    where: str
    text: bytes
    #: Bytes of the file up to its end.
    bytes_read: int


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file; a byte-order mark is left out.

    Raises:
        UserError: when the file cannot be read, or a line is longer than :data:`LONGEST_LINE`.
    """
    try:
        with path.open("rb") as file:
            number = bytes_read = 0
            while text := file.readline(LONGEST_LINE + 1):
                number += 1
                bytes_read += len(text)
                where = f"{path}, line {number}"
                if len(text) > LONGEST_LINE:
                    raise UserError(f"{where} is longer than {LONGEST_LINE / 1e6:.0f} MB: split it into several")
                text = text.removeprefix(_MARK) if number == 1 else text
                if text.strip():
                    yield Line(where, text, bytes_read)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check the name and your rights") from None


def parse(line: Line) -> Any:
    """The value of a line.

    Raises:
        UserError: when it is not UTF-8, not JSON, or holds half a surrogate pair, which is no character.
    """
    try:
        text = line.text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{line.where} is not UTF-8 (byte {error.start + 1}): save the file as UTF-8") from None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{line.where} is not JSON ({error}): write one JSON value a line") from None
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{line.where} holds half a surrogate pair (\\ud800 …): write whole characters") from None
    return value
