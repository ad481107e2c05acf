"""Saved steps of a run: folders that are either complete or absent.

A saved step is the folder ``<base>/<source>_checkpoints/<tag>/step_000150/`` with

- ``model.safetensors``: every parameter under its public name;
- ``optim_owner<i>.safetensors`` (optional): the optimizer's state by parameter name, one file per owner;
- ``random.safetensors`` (optional): states of the random number generators;
- ``manifest.json``, written last: everything else, and the size and SHA-256 of the other files.

It is written to a temporary folder beside its place, synced to the disk, checked and only then renamed, so that a
process killed at any moment leaves the earlier steps as they were. Loading runs no code from the files.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanochat import atomic
from nanochat.errors import UserError
from nanochat.model.config import ModelConfig
from nanochat.paths import CHECKPOINT_FOLDERS, Source, base_folder, checkpoints_folder

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
MODEL_NAME = "model.safetensors"
RANDOM_NAME = "random.safetensors"

#: Room on the disk asked for beyond the tensors themselves: headers, manifest, file system.
SPARE_BYTES = 1 << 20

_STEP_FOLDER = re.compile(r"step_(\d{6,})")
_DEPTH_TAG = re.compile(r"d(\d+)")


@dataclass(frozen=True)
class TokenizerReference:
    """Which tokenizer a model speaks."""

    #: SHA-256 of the tokenizer's pattern, merges and special tokens.
    fingerprint: str
    #: Its folder, relative to the base folder, with forward slashes: ``tokenizer``, ``tokenizers/1a2b3c4d``.
    path: str


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """One saved step, in memory. Everything but the tensors must be ready for JSON."""

    stage: Source
    step: int
    model_config: ModelConfig
    #: Every parameter by its public name.
    parameters: Mapping[str, Tensor]
    #: State by ``<parameter name>.<exp_avg|exp_avg_sq|momentum_buffer|second_momentum_buffer>``;
    #: None when it was not saved, or not asked for in :func:`load`.
    optimizer: Mapping[str, Tensor] | None = None
    #: How many updates the optimizer's state has seen.
    optimizer_step_count: int = 0
    tokenizer: TokenizerReference | None = None
    #: The resolved config of the run.
    config: Mapping[str, Any] = field(default_factory=dict)
    #: State of the data loader, as it gave it.
    loader: Mapping[str, Any] | None = None
    #: State of the training loop, as it gave it.
    loop: Mapping[str, Any] = field(default_factory=dict)
    #: Figures measured at this step, such as ``val_bpb``.
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    #: What an imported checkpoint's own metadata said; None for our own.
    family: Mapping[str, Any] | None = None
    #: Which text the run reads: its name and fingerprint.
    data: Mapping[str, Any] | None = None
    #: The checkpoint that the run started from: source, tag, step.
    parent: Mapping[str, Any] | None = None
    #: Names the run apart from an earlier one of the same tag.
    run_id: str | None = None
    #: A recovery save is kept only until the next save of its run.
    recovery: bool = False
    #: States of the random number generators, as tensors of bytes; like the optimizer's in :func:`load`.
    random: Mapping[str, Tensor] | None = None


def step_folder(run_folder: Path, step: int) -> Path:
    """Place of a saved step: ``<run folder>/step_000150``."""
    return run_folder / f"step_{step:06d}"


def save(run_folder: Path, checkpoint: Checkpoint) -> Path:
    """Write ``checkpoint`` to ``<run_folder>/step_<step>`` and return that folder.

    A saved step of the same number is replaced once the new one is complete. Temporary folders that dead processes
    left in ``run_folder`` are removed first.

    Raises:
        UserError: when the disk has too little room, or refuses to be written; earlier steps are untouched then.
    """
    final = step_folder(run_folder, checkpoint.step)
    try:
        run_folder.mkdir(parents=True, exist_ok=True)
        atomic.remove_leftovers(run_folder)
        _check_room(run_folder, checkpoint)
        with atomic.new_folder(final) as temporary:
            _write(temporary, checkpoint)
    except OSError as error:
        raise UserError(
            f"step {checkpoint.step} cannot be saved in {run_folder} ({error.strerror}): free some space there, or"
            " check that the folder can be written"
        ) from error
    return final


def load(folder: Path, *, optimizer: bool = False, device: str | torch.device = "cpu") -> Checkpoint:
    """Read the saved step in ``folder`` (a ``step_…`` folder), checking sizes and hashes.

    Args:
        optimizer: also read the optimizer's state and the random states, when they were saved.
        device: where the tensors go.

    Raises:
        UserError: when the folder is absent, cut short or damaged, or of a newer version of this program.
    """
    manifest = read_manifest(folder)
    names = [name for name in manifest["files"] if name.startswith("optim_owner")]
    resumable = optimizer and RANDOM_NAME in manifest["files"]
    wanted = [MODEL_NAME, *(names if optimizer else []), *([RANDOM_NAME] if resumable else [])]
    for name in wanted:
        _check_hash(folder, name, manifest["files"].get(name))
    state: dict[str, Tensor] | None = None
    if optimizer and names:
        state = {}
        for name in names:
            state |= _read_tensors(folder / name, device)
    random = _read_tensors(folder / RANDOM_NAME, "cpu") if resumable else None
    try:
        tokenizer = manifest["tokenizer"]
        return Checkpoint(
            stage=manifest["stage"],
            step=manifest["step"],
            model_config=ModelConfig.from_dict(manifest["model_config"]),
            parameters=_read_tensors(folder / MODEL_NAME, device),
            optimizer=state,
            optimizer_step_count=manifest["optimizer_step_count"],
            tokenizer=TokenizerReference(**tokenizer) if tokenizer else None,
            config=manifest["config"],
            loader=manifest["loader"],
            loop=manifest["loop"],
            metrics=manifest["metrics"],
            family=manifest["family"],
            data=manifest.get("data"),
            parent=manifest.get("parent"),
            run_id=manifest.get("run_id"),
            recovery=manifest.get("recovery", False),
            random=random,
        )
    except (KeyError, TypeError) as error:
        raise _broken(folder, f"{MANIFEST_NAME} lacks or mistypes {error}") from None


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a saved step whose files are all there at their full size (hashes are not looked at).

    Raises:
        UserError: when the folder is absent, cut short, or of a newer version of this program.
    """
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        raise UserError(f"there is no checkpoint folder {folder}: check the tag and the step")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, files = manifest["format_version"], dict(manifest["files"])
    except FileNotFoundError:
        raise _broken(folder, f"it has no {MANIFEST_NAME}") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _broken(folder, f"{MANIFEST_NAME} cannot be read ({type(error).__name__})") from None
    if version != FORMAT_VERSION:
        raise UserError(f"{path} has format version {version}, this program reads {FORMAT_VERSION}: update nanochat")
    if MODEL_NAME not in files:
        raise _broken(folder, f"{MANIFEST_NAME} does not list {MODEL_NAME}")
    for name, facts in files.items():
        if Path(name).name != name or not isinstance(facts, dict):
            raise _broken(folder, f"{MANIFEST_NAME} lists the strange file {name!r}")
        try:
            size = (folder / name).stat().st_size
        except OSError:
            raise _broken(folder, f"{name} is missing") from None
        if size != facts.get("bytes"):
            raise _broken(folder, f"{name} has {size} bytes instead of {facts.get('bytes')}")
    return dict(manifest)


def steps(run_folder: Path) -> list[int]:
    """The complete saved steps of a run, ascending; empty when there is no such folder."""
    return [step for step, problem in survey(run_folder) if problem is None]


def latest(run_folder: Path) -> tuple[int, list[str]]:
    """The newest complete step of a run, and a sentence for each broken one.

    Raises:
        UserError: when there is no complete step.
    """
    surveyed = list(survey(run_folder))
    notices = [problem for _, problem in surveyed if problem is not None]
    complete = [step for step, problem in surveyed if problem is None]
    if not complete:
        hint = "import it with `nanochat import`" if any(run_folder.glob("model_*.pt")) else "train or import one first"
        raise UserError("; ".join([f"{run_folder} holds no complete checkpoint: {hint}", *notices]))
    return complete[-1], notices


def find(
    source: Source,
    tag: str | None = None,
    step: int | None = None,
    base: Path | None = None,
    report: Callable[[str], None] = lambda notice: None,
) -> Path:
    """Folder of the saved step that is meant.

    Args:
        tag: name of the run; None picks the largest ``d<depth>``, else the run written last.
        step: None picks the newest complete one; ``report`` gets a sentence for each broken one.
        base: the base folder; None for the configured one.

    Raises:
        UserError: when there is none, listing what there is.
    """
    base = base or base_folder()
    if tag is None:
        tag = _default_tag(source, base)
    run_folder = checkpoints_folder(source, tag, base)
    if not run_folder.is_dir():
        there = ", ".join(_tags(source, base)) or "none"
        raise UserError(f"there is no {source} checkpoint with tag {tag!r} in {base}: there are {there}")
    if step is None:
        step, notices = latest(run_folder)
        for notice in notices:
            report(notice)
    elif not step_folder(run_folder, step).is_dir():
        there = ", ".join(map(str, steps(run_folder))) or "none"
        raise UserError(f"there is no step {step} in {run_folder}: there are {there}")
    return step_folder(run_folder, step)


def _default_tag(source: Source, base: Path) -> str:
    tags = _tags(source, base)
    if not tags:
        folder = base / CHECKPOINT_FOLDERS[source]
        broken = [problem for path in _run_folders(folder) for _, problem in survey(path) if problem is not None]
        raise UserError("; ".join([f"there is no {source} checkpoint in {folder}: train or import one", *broken]))
    depths = {int(match[1]): tag for tag in tags if (match := _DEPTH_TAG.fullmatch(tag))}
    if depths:
        return depths[max(depths)]

    def written(tag: str) -> float:
        run_folder = checkpoints_folder(source, tag, base)
        return max((step_folder(run_folder, step) / MANIFEST_NAME).stat().st_mtime for step in steps(run_folder))

    return max(tags, key=written)


def _tags(source: Source, base: Path) -> list[str]:
    """Tags with at least one complete step."""
    return [path.name for path in _run_folders(base / CHECKPOINT_FOLDERS[source]) if steps(path)]


def _run_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def survey(run_folder: Path) -> Iterator[tuple[int, str | None]]:
    """Each step folder, ascending, with what is wrong with it (None: complete)."""
    found = run_folder.iterdir() if run_folder.is_dir() else ()
    numbered = [(int(match[1]), path) for path in found if (match := _STEP_FOLDER.fullmatch(path.name))]
    for step, path in sorted(numbered):
        try:
            read_manifest(path)
            yield step, None
        except UserError as error:
            yield step, str(error)


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    """Fill ``folder``, the manifest last."""
    files = {MODEL_NAME: _write_tensors(folder / MODEL_NAME, checkpoint.parameters)}
    if checkpoint.optimizer is not None:
        name = "optim_owner0.safetensors"
        files[name] = _write_tensors(folder / name, checkpoint.optimizer)
    if checkpoint.random is not None:
        files[RANDOM_NAME] = _write_tensors(folder / RANDOM_NAME, checkpoint.random)
    manifest = {
        "format_version": FORMAT_VERSION,
        "stage": checkpoint.stage,
        "step": checkpoint.step,
        "model_config": checkpoint.model_config.to_dict(),
        "tokenizer": vars(checkpoint.tokenizer) if checkpoint.tokenizer else None,
        "metrics": checkpoint.metrics,
        "config": checkpoint.config,
        "loop": checkpoint.loop,
        "loader": checkpoint.loader,
        "optimizer_step_count": checkpoint.optimizer_step_count,
        "family": checkpoint.family,
        "data": checkpoint.data,
        "parent": checkpoint.parent,
        "run_id": checkpoint.run_id,
        "recovery": checkpoint.recovery,
        "written_by": {name: importlib.metadata.version(name) for name in ("nanochat", "torch")},
        "files": files,
    }
    path = folder / MANIFEST_NAME
    path.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write one safetensors file, read its index back, and return its facts for the manifest."""
    on_host = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    try:
        save_file(on_host, path, metadata={"format": "pt"})
    except SafetensorError as error:  # how the library reports a failed write
        raise OSError(errno.EIO, str(error)) from error
    with safe_open(path, framework="pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert written == {name: tuple(tensor.shape) for name, tensor in on_host.items()}
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _read_tensors(path: Path, device: str | torch.device) -> dict[str, Tensor]:
    try:
        return load_file(path, device=str(device))
    except (SafetensorError, OSError) as error:
        raise _broken(path.parent, f"{path.name} cannot be read ({error})") from None


def _check_hash(folder: Path, name: str, facts: Mapping[str, Any] | None) -> None:
    if facts is None or _sha256(folder / name) != facts.get("sha256"):
        raise _broken(folder, f"{name} is not what was written: its SHA-256 differs")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _broken(folder: Path, what: str) -> UserError:
    return UserError(f"checkpoint {folder} is damaged: {what}; use another step, or delete that folder")


def _check_room(run_folder: Path, checkpoint: Checkpoint) -> None:
    tensors = [*checkpoint.parameters.values(), *(checkpoint.optimizer or {}).values()]
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors) + SPARE_BYTES
    free = shutil.disk_usage(run_folder).free
    if free < needed:
        raise UserError(
            f"step {checkpoint.step} needs {needed / 1e9:.2f} GB but {run_folder} has {free / 1e9:.2f} GB free:"
            " free some space or delete older steps"
        )
