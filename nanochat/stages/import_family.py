"""``nanochat import``: checkpoints, tokenizer and data of the public nanochat family."""

from __future__ import annotations

from pathlib import Path

from nanochat.context import Context, Result
from nanochat.interop.family import import_folder
from nanochat.stages.configs import ImportConfig


def run(config: ImportConfig, context: Context) -> Result:
    """Import a folder into the base folder."""
    result = import_folder(
        Path(config.folder).expanduser(),
        context.base,
        stage=config.stage,
        tag=config.tag,
        logit_softcap=config.logit_softcap,
        overwrite=config.overwrite,
        report=context.terminal.say,
    )
    return Result(result.to_dict(), result.describe())
