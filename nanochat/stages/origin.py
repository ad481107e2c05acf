"""Where a run comes from: nothing, a checkpoint it goes on from, or one it begins from."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nanochat import checkpoint
from nanochat import config as configs
from nanochat.checkpoint import Checkpoint
from nanochat.context import Context
from nanochat.errors import UserError
from nanochat.stages.configs import PretrainConfig, SftConfig
from nanochat.stages.settings import ModelShape
from nanochat.train import resume

TrainingConfig = TypeVar("TrainingConfig", PretrainConfig, SftConfig)


@dataclass(frozen=True)
class Origin:
    """The checkpoint (in ``folder``) that a run goes on from, or that it begins from."""

    saved: Checkpoint
    folder: Path
    #: Whether the run goes on; else a new one begins.
    resumed: bool = False

    @property
    def going_on(self) -> Checkpoint | None:
        """The checkpoint of a run that goes on, whose every state is taken over; None for a new run."""
        return self.saved if self.resumed else None

    @property
    def parent(self) -> Mapping[str, Any] | None:
        """What the run began from: for one that goes on, what it began from when it was new."""
        if self.resumed:
            return self.saved.parent
        return {"source": self.saved.stage, "tag": self.folder.parent.name, "step": self.saved.step}


def find_pretrain_origin(
    config: PretrainConfig, context: Context
) -> tuple[PretrainConfig, Origin | None, dict[str, str]]:
    """Where a base model's run comes from.

    Returns:
        The config with what it takes over from there, the origin (None: nothing), and what was asked to differ from a
        run that is gone on with (name → ``saved → wanted``).

    Raises:
        UserError: when there is no such checkpoint, or what differs is not allowed to.
    """
    continuation, tag = config.continuation, config.model_tag
    if tag is None and (continuation.resume != "latest" or config.model.depth != ModelShape().depth):
        tag = f"d{config.model.depth}"
    folder, notices = resume.find("base", tag, continuation.resume, context.base)
    for notice in notices:
        context.terminal.say(notice)
    if folder is not None:
        return _go_on(config, folder, allow_changes=continuation.allow_changes)
    if continuation.start_from is None:
        return config, None, {}
    return *_fork(config, context), {}


def find_sft_origin(config: SftConfig, context: Context) -> tuple[SftConfig, Origin, dict[str, str]]:
    """Where a chat model's run comes from: its base model's checkpoint, or its own; else as above."""
    tag = config.model_tag
    if config.continuation.resume == "auto" and tag is None:
        tag = checkpoint.find("base", None, None, context.base).parent.name
    folder, notices = resume.find("sft", tag, config.continuation.resume, context.base)
    for notice in notices:
        context.terminal.say(notice)
    if folder is not None:
        return _go_on(config, folder, allow_changes=config.continuation.allow_changes)
    parent = checkpoint.find("base", config.model_tag, config.model_step, context.base, context.terminal.say)
    saved = checkpoint.load(parent, optimizer=bool(config.load_optimizer))
    return config, Origin(saved, parent), {}


def _go_on(
    config: TrainingConfig, folder: Path, *, allow_changes: bool
) -> tuple[TrainingConfig, Origin, dict[str, str]]:
    """Go on with the run that saved ``folder``, by its own config."""
    saved = checkpoint.load(folder, optimizer=True)
    resume.check_state(saved, folder)
    wanted, defaults = configs.to_dict(config), configs.to_dict(type(config)())
    if asked := os.environ.get("NANOCHAT_DTYPE"):
        wanted["machine"]["dtype"] = asked
    given = frozenset(config.continuation.given)
    changes = resume.differences(saved.config, wanted, defaults, given)
    if not allow_changes:
        resume.refuse(changes, folder)
    values = resume.merged(saved.config, wanted, defaults, given)
    values["model_tag"] = folder.parent.name
    return configs.from_dict(type(config), values, str(folder)), Origin(saved, folder, resumed=True), changes


def _fork(config: PretrainConfig, context: Context) -> tuple[PretrainConfig, Origin]:
    """Begin from another run: its shape and text, unless other text was asked for."""
    tag, _, step = (config.continuation.start_from or "").partition("@")
    if step and not step.isdigit():
        raise UserError(f"--from {config.continuation.start_from!r} names no step: write TAG or TAG@STEP")
    if config.model_tag is None or config.model_tag == tag:
        raise UserError("a run begun with --from needs a name of its own: give another --model-tag")
    folder = checkpoint.find("base", tag, int(step) if step else None, context.base, context.terminal.say)
    saved = checkpoint.load(folder, optimizer=config.continuation.keep_moments)
    if config.continuation.keep_moments and saved.optimizer is None:
        raise UserError(f"{folder} holds no moments: begin without --keep-moments")
    asked = configs.to_dict(config.model)
    default = configs.to_dict(ModelShape())
    of_parent = saved.config.get("model") or _shape_of(saved)
    if changes := resume.differences(of_parent, asked, default):
        listed = "; ".join(f"{name} {text}" for name, text in changes.items())
        raise UserError(f"a run begun from {folder} has its shape ({listed} was asked for): leave that away")
    model = configs.from_dict(ModelShape, of_parent, str(folder))
    text = config.text
    if text.data is None and (of_text := saved.config.get("text", {}).get("data")):
        text = dataclasses.replace(text, data=tuple(of_text))
    return dataclasses.replace(config, model=model, text=text), Origin(saved, folder)


def _shape_of(saved: Checkpoint) -> dict[str, Any]:
    """The shape of an imported model as settings."""
    shape = saved.model_config
    return {
        "depth": shape.num_layers,
        "aspect_ratio": shape.model_dim // shape.num_layers,
        "head_dim": shape.head_dim,
        "num_kv_heads": shape.num_kv_heads,
        "max_seq_len": shape.sequence_len,
        "window_pattern": shape.window_pattern,
    }
