"""``nanochat report``: one page and a picture about a run, into its folder. Loads no torch."""

from __future__ import annotations

from nanochat.context import Context, Result
from nanochat.watching.configs import ReportConfig
from nanochat.watching.history import find_run
from nanochat.watching.report import write


def run(config: ReportConfig, context: Context) -> Result:
    """Write ``report.md`` and ``loss.png``.

    Raises:
        UserError: when there is no such run, or its folder cannot be written.
    """
    place = find_run(context.base, config.run, config.source)
    written = write(place.folder)
    values = {"report": str(written.page), "picture": str(written.picture) if written.picture else None}
    picture = f" and {written.picture}" if written.picture else f" (no picture: {written.obstacle})"
    return Result(values, f"wrote {written.page}{picture}", outputs=(written.page,))
