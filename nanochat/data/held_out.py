"""Which generated items are learned from and which are kept to measure with: a property of the item alone.

So an item stays held out whatever list of words it came from, in whatever order, and however many items are made.
"""

from __future__ import annotations

import hashlib
import unicodedata
from typing import Literal

#: Items to learn from; to choose settings with; to report figures on, and for nothing else.
Part = Literal["train", "val", "test"]

PER_CENT_OF_TEST = 10
PER_CENT_OF_VAL = 5


def part_of(kind: str, item: str) -> Part:
    """The part of an item; the same whatever the case and Unicode composition of its letters."""
    name = unicodedata.normalize("NFC", item).casefold()
    number = int.from_bytes(hashlib.sha256(f"{kind}:{name}".encode()).digest()[:8], "big") % 100
    if number < PER_CENT_OF_TEST:
        return "test"
    return "val" if number < PER_CENT_OF_TEST + PER_CENT_OF_VAL else "train"
