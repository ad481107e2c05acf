"""What a stage is given besides its config: where to work and how to tell of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanochat.paths import base_folder
from nanochat.terminal import Terminal


@dataclass(frozen=True)
class Context:
    """Surroundings of a stage."""

    base: Path
    terminal: Terminal

    @classmethod
    def create(cls, base: Path | None = None) -> Context:
        return cls(base or base_folder(), Terminal())


@dataclass(frozen=True)
class Result:
    """What a stage brought: values for programs, a text for people."""

    values: dict[str, Any]
    text: str
    #: Files or folders that must still be there for the stage to count as done.
    outputs: tuple[Path, ...] = field(default=())
    #: False for a stage that was stopped and can go on: nothing may be built on it yet.
    finished: bool = True

    def print(self, *, as_json: bool) -> None:
        """Print to stdout, as JSON or as text."""
        print(json.dumps(self.values, ensure_ascii=False) if as_json else self.text, flush=True)
