"""The tokenizer and the values of the golden run, for the tests of text."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from nanochat.tokenizer.bpe import Tokenizer

GOLDEN = Path(__file__).parent / "golden"
RUN_DATA = GOLDEN / "run" / "base_data_climbmix"
LONG_DATA = GOLDEN / "long" / "data"


@functools.cache
def expected(name: str) -> Any:
    """Values of ``golden/<name>.json``; not to be changed."""
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


@functools.cache
def golden_tokenizer() -> Tokenizer:
    values = expected("run/expected_tokenizer")
    ranks = {bytes.fromhex(token): rank for token, rank in values["merges"]}
    return Tokenizer(values["pattern"], ranks, values["special"])
