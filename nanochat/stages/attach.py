"""``nanochat attach``: follow what a detached run says until it ends. Loads no torch."""

from __future__ import annotations

import sys

from nanochat.context import Context
from nanochat.errors import UserError
from nanochat.watching.configs import AttachConfig
from nanochat.watching.detach import Detached, all_detached, follow


def run(config: AttachConfig, context: Context) -> None:
    """Print a detached run's output, what it said first and what it says until it ends.

    Ctrl-C ends the following and leaves the run alone.

    Raises:
        UserError: when nothing was started under that name, listing what was.
    """
    detached = _find(config.name, context)
    try:
        for text in follow(detached):
            sys.stdout.write(text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        context.terminal.say(
            f"\n{detached.name} goes on (process {detached.pid}); `nanochat attach {detached.name}` follows it again"
        )
        return
    context.terminal.say(f"{detached.name} has ended; its output is kept in {detached.log}")


def _find(name: str | None, context: Context) -> Detached:
    started = all_detached(context.base)
    for detached in started:
        if name in (None, detached.name):
            return detached
    there = ", ".join(f"{each.name} ({'running' if each.is_running() else 'ended'})" for each in started)
    if not there:
        raise UserError(f"nothing was started with --detach in {context.base}: `nanochat status` tells of other runs")
    raise UserError(f"nothing was started with --detach under the name {name!r}: there are {there}")
