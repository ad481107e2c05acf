"""The calculator a chat model may use: arithmetic, and counting in strings. It parses; it never runs code.

    sum     = product {("+" | "-") product}
    product = signed {("*" | "/") signed}
    signed  = {"+" | "-"} value
    value   = number | "(" sum ")" | string ".count(" string ")"

Numbers may have decimals and thousands commas (``1,234.5``). Strings take either quote, Python's escapes, and any text.
Values are exact fractions, rounded once, when they are written: ``10/2`` is ``5``, ``0.1+0.2`` is ``0.3``. Every step
is bounded by the limits below, so an expression takes milliseconds at most, in any thread, without a clock or a signal.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

#: Characters of an expression, strings included.
MAX_LENGTH = 4_096
#: Parentheses within parentheses.
MAX_NESTING = 32
#: Digits of a number that is written, computed on the way, or said.
MAX_DIGITS = 60

_LARGEST = 10**MAX_DIGITS - 1
_BLANKS = re.compile(r"\s*")
_NUMBER = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+")
_STRING = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"\\": "\\", "'": "'", '"': '"', "n": "\n", "t": "\t", "r": "\r", "\n": ""}


def calculate(expression: str) -> str | None:
    """The value of an expression as text; None for whatever is not one, or goes beyond the limits."""
    if len(expression) > MAX_LENGTH:
        return None
    try:
        return _say(_Parser(expression).parse())
    except _NoValueError:
        return None


class _NoValueError(Exception):
    """The expression has no value that can be said."""


class _Parser:
    """Recursive descent over one expression; each method reads what it is named after and gives its value."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._nesting = 0

    def parse(self) -> Fraction:
        value = self._sum()
        if self._peek():
            raise _NoValueError
        return value

    def _sum(self) -> Fraction:
        value = self._product()
        while operator := self._take_one_of("+-"):
            term = self._product()
            value = _bounded(value + term if operator == "+" else value - term)
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while operator := self._take_one_of("*/"):
            factor = self._signed()
            if operator == "/" and not factor:
                raise _NoValueError
            value = _bounded(value * factor if operator == "*" else value / factor)
        return value

    def _signed(self) -> Fraction:
        negative = False
        while sign := self._take_one_of("+-"):
            negative ^= sign == "-"
        value = self._value()
        return -value if negative else value

    def _value(self) -> Fraction:
        if self._take_one_of("("):
            self._nesting += 1
            if self._nesting > MAX_NESTING:
                raise _NoValueError
            value = self._sum()
            self._nesting -= 1
            self._expect(")")
            return value
        if self._peek() in ("'", '"'):
            return self._count()
        return self._number()

    def _count(self) -> Fraction:
        text = self._string()
        for symbol in (".", "count", "("):
            self._expect(symbol)
        sought = self._string()
        self._expect(")")
        return Fraction(text.count(sought))

    def _number(self) -> Fraction:
        digits = self._match(_NUMBER).group().replace(",", "")
        # What follows a number at once would be part of it: 1,23 or 1e5 or 0x10.
        if len(digits) > MAX_DIGITS or re.match(r"[\w.,]", self._text[self._position : self._position + 1]):
            raise _NoValueError
        return Fraction(Decimal(digits))

    def _string(self) -> str:
        single, double = self._match(_STRING).groups()
        return _ESCAPE.sub(_unescape, double if single is None else single)

    def _peek(self) -> str:
        """The next character that is not blank; empty at the end."""
        blanks = _BLANKS.match(self._text, self._position)
        assert blanks is not None
        self._position = blanks.end()
        return self._text[self._position : self._position + 1]

    def _take_one_of(self, symbols: str) -> str:
        """Read one of these characters; empty when another stands there."""
        found = self._peek()
        if not found or found not in symbols:
            return ""
        self._position += 1
        return found

    def _expect(self, symbol: str) -> None:
        self._peek()
        if not self._text.startswith(symbol, self._position):
            raise _NoValueError
        self._position += len(symbol)

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        self._peek()
        match = pattern.match(self._text, self._position)
        if match is None:
            raise _NoValueError
        self._position = match.end()
        return match


def _unescape(match: re.Match[str]) -> str:
    *codes, other = match.groups()
    code = next((int(code, 16) for code in codes if code), None)
    if code is None:
        if other not in _ESCAPED:
            raise _NoValueError
        return _ESCAPED[other]
    if code > 0x10FFFF:
        raise _NoValueError
    return chr(code)


def _bounded(value: Fraction) -> Fraction:
    if abs(value.numerator) > _LARGEST or value.denominator > _LARGEST:
        raise _NoValueError
    return value


def _say(value: Fraction) -> str:
    """Whole numbers as such, others as the shortest decimal that means the nearest double, without an exponent."""
    if value.denominator == 1:
        return str(value.numerator)
    nearest = float(value)
    if nearest.is_integer():  # so large that its fraction would be lost
        raise _NoValueError
    said = format(Decimal(repr(nearest)), "f")
    if len(said) > MAX_DIGITS:
        raise _NoValueError
    return said
