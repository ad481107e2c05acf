"""What the commands that watch can be told. Their fields are the flags of the subcommands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import tyro

#: The kinds of checkpoint whose training writes records.
WatchedSource = Literal["base", "sft"]


@dataclass(frozen=True)
class StatusConfig:
    """How a run stands, while it runs and after."""

    run: tyro.conf.Positional[str | None] = None
    """Name of the run (its model tag); the one that told of itself last when not given."""
    source: WatchedSource | None = None
    """base or sft; the one of that name that told of itself last when not given."""
    json: bool = False
    """Print the status as JSON."""


@dataclass(frozen=True)
class RunsConfig:
    """Every run in the base folder, the latest first."""

    json: bool = False
    """Print the list as JSON."""


@dataclass(frozen=True)
class ReportConfig:
    """Write report.md and loss.png into a run's folder."""

    run: tyro.conf.Positional[str | None] = None
    """Name of the run (its model tag); the one that told of itself last when not given."""
    source: WatchedSource | None = None
    """base or sft; the one of that name that told of itself last when not given."""
    json: bool = False
    """Print where they lie as JSON."""


@dataclass(frozen=True)
class AttachConfig:
    """Follow the output of a detached run until it ends; Ctrl-C leaves the run alone."""

    name: tyro.conf.Positional[str | None] = None
    """Name it was started under; the one started last when not given."""
