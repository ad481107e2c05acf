"""Imports folders of the public nanochat family: models of every era, tokenizer, optimizer state and text.

What is imported stands beside our own: checkpoints under the same stage and tag, text in a folder of the same name.
The files of the family are only read. Everything is read and checked before the first write, and each checkpoint
appears whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat import checkpoint
from nanochat.checkpoint import Checkpoint
from nanochat.errors import UserError
from nanochat.interop import eras, layout, shards, tokenizer_files
from nanochat.interop.optimizer_files import UnusableMoments, read_moments
from nanochat.interop.torch_archive import read_torch
from nanochat.paths import Source, checkpoints_folder

Report = Callable[[str], None]

#: What a compiled model puts before the names of its parameters.
COMPILED = "_orig_mod."


@dataclass(frozen=True)
class ImportedCheckpoint:
    """One imported model."""

    source: Source
    tag: str
    step: int
    era: str
    folder: Path
    #: False when it was there already.
    written: bool


@dataclass(frozen=True)
class ImportResult:
    """What an import brought."""

    checkpoints: tuple[ImportedCheckpoint, ...]
    tokenizer: Path | None
    #: Files of text now in the base folder.
    shards: int

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "checkpoints": [{**vars(each), "folder": str(each.folder)} for each in self.checkpoints],
            "tokenizer": str(self.tokenizer) if self.tokenizer else None,
            "shards": self.shards,
        }

    def describe(self) -> str:
        """One line for each checkpoint, one for the tokenizer, one for the text."""
        lines = []
        for each in self.checkpoints:
            what = "imported" if each.written else "already there"
            lines.append(f"{each.source} {each.tag} step {each.step}: {what}, {each.folder}")
        if self.tokenizer:
            lines.append(f"tokenizer: {self.tokenizer}")
        if self.shards:
            lines.append(f"text: {self.shards} files")
        return "\n".join(lines)


@dataclass(frozen=True)
class _PlannedModel:
    """A model that was read and checked, and the place it gets."""

    file: layout.ModelFile
    tokenizer: tokenizer_files.PlannedTokenizer
    logit_softcap: float | None
    result: ImportedCheckpoint

    def write(self) -> None:
        """Save it as one of our checkpoints; does nothing when it is there already."""
        if self.result.written:
            # Read again: all models of a folder together may not fit into memory.
            model, _ = _read(self.file, self.tokenizer, self.logit_softcap, lambda line: None)
            checkpoint.save(self.result.folder.parent, model)


def import_folder(
    source_folder: Path,
    base: Path,
    *,
    stage: Source | None = None,
    tag: str | None = None,
    logit_softcap: float | None = None,
    overwrite: bool = False,
    report: Report = lambda line: None,
) -> ImportResult:
    """Import a base folder of the family, one folder of checkpoints of it, or a flat folder as published on the hub.

    Args:
        source_folder: where the files lie; it may be ``base`` itself.
        base: our base folder.
        stage: of a flat folder's models; None: what the folder's place says, else sft.
        tag: of a flat folder's models; None: what the folder's place says, else ``d<layers>``.
        logit_softcap: 20 for models of 2 to 8 March 2026, whose files look like earlier ones with 15.
        overwrite: replace a step that is there and differs.
        report: gets one line about each model's era and about whatever is left out.

    Raises:
        UserError: when the folder is none of these, a file is damaged, refused or of another model, or a different
            step is there; nothing has been written then.
    """
    source_folder = Path(os.path.abspath(source_folder))  # its name, and its parent's, may say tag and stage
    models = list(layout.find_models(source_folder, stage, tag))
    text = shards.plan_copies(source_folder, base)
    tokenizer_folder = layout.find_tokenizer(source_folder)
    if not models and not text and tokenizer_folder is None:
        raise UserError(
            f"{source_folder} holds nothing of the family: give a folder with base_checkpoints, tokenizer and so on,"
            " or one with model_<step>.pt, meta_<step>.json, tokenizer.pkl and token_bytes.pt"
        )
    if not models:
        report(f"no model was found in {source_folder}: only what else it holds is imported")
    if models and tokenizer_folder is None:
        raise UserError(f"{source_folder} holds models but no tokenizer.pkl: put the one they were trained with there")
    tokenizer = tokenizer_files.plan_import(tokenizer_folder, base, report) if tokenizer_folder else None

    planned = [_plan(model, tokenizer, base, logit_softcap, overwrite, report) for model in models if tokenizer]
    if tokenizer is not None:
        tokenizer.write()
    for model in planned:
        model.write()
    for shard in text:
        shard.write()
    return ImportResult(
        tuple(model.result for model in planned), tokenizer.folder if tokenizer is not None else None, len(text)
    )


def _read(
    file: layout.ModelFile,
    tokenizer: tokenizer_files.PlannedTokenizer,
    logit_softcap: float | None,
    report: Report,
) -> tuple[Checkpoint, eras.Era]:
    """A model with all that was saved beside it, checked, as one of our checkpoints."""
    meta = _read_meta(file.path.with_name(f"meta_{file.path.stem.removeprefix('model_')}.json"))
    parameters = _read_parameters(file.path)
    config, era = eras.model_config(parameters, meta.get("model_config"), str(file.path), logit_softcap)
    report(f"{file.path}: {era.describe(config)}")
    if era.softcap_unsure and logit_softcap is None:
        report(f"{file.path}: its soft cap may also be 20 (2 – 8 March 2026): then import with --logit-softcap 20")
    if not era.softcap_unsure and logit_softcap is not None:
        cap = config.constants.logit_softcap
        report(f"{file.path}: --logit-softcap {logit_softcap:g} is ignored, since models of its era have {cap:g}")
    if tokenizer.vocab_size != config.vocab_size:
        raise UserError(
            f"the tokenizer in {tokenizer.source} has {tokenizer.vocab_size} tokens but {file.path} was trained with"
            f" {config.vocab_size}: put the one it was trained with there"
        )
    moments = None
    try:
        moments = read_moments(file.path.parent, file.step, parameters, config.model_dim)
    except UnusableMoments as reason:
        report(f"{reason}: imported without it")
    return Checkpoint(
        stage=file.source,
        step=file.step,
        model_config=config,
        parameters=parameters,
        optimizer=moments.tensors if moments else None,
        optimizer_step_count=moments.step_count if moments else 0,
        tokenizer=tokenizer.reference,
        metrics={"val_bpb": meta.get("val_bpb")},
        family={**{name: value for name, value in meta.items() if name != "model_config"}, "era": era.name},
    ), era


def _plan(
    file: layout.ModelFile,
    tokenizer: tokenizer_files.PlannedTokenizer,
    base: Path,
    logit_softcap: float | None,
    overwrite: bool,
    report: Report,
) -> _PlannedModel:
    model, era = _read(file, tokenizer, logit_softcap, report)
    if broken := _not_finite(model.parameters):
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        report(f"{file.path} holds values that are not finite, in {', '.join(broken[:3])}{more}: imported all the same")
    tag = file.tag or f"d{model.model_config.num_layers}"
    folder = checkpoint.step_folder(checkpoints_folder(file.source, tag, base), file.step)
    written = _must_write(folder, model, overwrite, report)
    result = ImportedCheckpoint(file.source, tag, file.step, era.name, folder, written)
    return _PlannedModel(file, tokenizer, logit_softcap, result)


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: copy it beside its model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}): copy it again") from None
    if not isinstance(meta, dict):
        raise UserError(f"{path} holds no settings: copy it again")
    return meta


def _read_parameters(path: Path) -> dict[str, Tensor]:
    """Parameters by public name, without the prefix that a compiled model gave them."""
    state = read_torch(path)
    floats = (torch.float32, torch.bfloat16, torch.float16)
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) and tensor.dtype in floats
        for name, tensor in state.items()
    ):
        raise UserError(f"{path} holds other things than the parameters of a model: is it the family's model file?")
    parameters = {name.removeprefix(COMPILED): tensor for name, tensor in state.items()}
    if len(parameters) < len(state):
        twice = next(name for name in parameters if name in state and COMPILED + name in state)
        raise UserError(
            f"{path} holds both {twice} and {COMPILED + twice}, and which is meant cannot be told: save the model again"
        )
    return parameters


def _not_finite(parameters: Mapping[str, Tensor]) -> list[str]:
    """Names of the parameters that hold a NaN or an infinity."""
    # The extremes tell (a NaN is both), and need no second copy of a large tensor.
    return [
        name
        for name, tensor in parameters.items()
        if tensor.numel() and not all(extreme.isfinite() for extreme in torch.aminmax(tensor))
    ]


def _must_write(folder: Path, new: Checkpoint, overwrite: bool, report: Report) -> bool:
    """Whether ``new`` is to be written to ``folder``; raises :class:`UserError` when another step is there."""
    if not folder.exists():
        return True
    try:
        present = checkpoint.load(folder, optimizer=True)
    except UserError:
        report(f"{folder} is damaged and is replaced")
        return True
    same = (
        present.model_config == new.model_config
        and present.tokenizer == new.tokenizer
        and present.optimizer_step_count == new.optimizer_step_count
        and _equal(present.parameters, new.parameters)
        and _equal(present.optimizer or {}, new.optimizer or {})
    )
    if same:
        return False
    if not overwrite:
        raise UserError(
            f"{folder} holds a different checkpoint: import with --overwrite to replace it, or move it away"
        )
    return True


def _equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether two sets of tensors agree in every bit (so that NaN equals NaN)."""

    def same(a: Tensor, b: Tensor) -> bool:
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))

    return set(ours) == set(theirs) and all(same(tensor, theirs[name]) for name, tensor in ours.items())
