"""``nanochat status``: how a run stands, while it runs and after. Loads no torch."""

from __future__ import annotations

import sys

from nanochat.context import Context, Result
from nanochat.watching.configs import StatusConfig
from nanochat.watching.history import find_run, read_history
from nanochat.watching.render import render_status
from nanochat.watching.status import describe


def run(config: StatusConfig, context: Context) -> Result:
    """Tell how a run stands.

    Raises:
        UserError: when there is no such run, listing what there is.
    """
    place = find_run(context.base, config.run, config.source)
    status = describe(read_history(place.folder))
    return Result(status.values, render_status(status, colours=sys.stdout.isatty()))
