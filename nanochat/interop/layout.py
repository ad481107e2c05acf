"""Which files of the family lie in a folder: a whole base folder, a folder of checkpoints in one, or a flat one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nanochat.errors import UserError
from nanochat.interop.tokenizer_files import PICKLE_NAME
from nanochat.paths import CHECKPOINT_FOLDERS, Source

#: The family's folders of checkpoints. Models of its former "mid" stage know the chat format and stand among the chat
#: models, as ``<tag>-mid`` where the folder also holds a later chat model of that tag.
STAGE_FOLDERS: dict[str, Source] = {
    "mid_checkpoints": "sft",
    **{folder: source for source, folder in CHECKPOINT_FOLDERS.items()},
}

_MODEL_FILE = re.compile(r"model_(\d+)\.pt")
_META_FILE = re.compile(r"meta_(\d+)\.json")
_TAG = re.compile(r"[^/\\.][^/\\]*")


@dataclass(frozen=True)
class ModelFile:
    """A model of the family on disk; a tag of None becomes ``d<layers>``."""

    path: Path
    step: int
    source: Source
    tag: str | None


def find_models(folder: Path, stage: Source | None, tag: str | None) -> Iterator[ModelFile]:
    """Every model in a folder of one of the three kinds, in order of stage, tag and step."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: check the path")
    if tag is not None and not _TAG.fullmatch(tag):
        raise UserError(f"the tag {tag!r} is no plain folder name: use letters, digits and dashes")
    stages = {name: folder / name for name in STAGE_FOLDERS if (folder / name).is_dir()}
    if not stages:
        place = STAGE_FOLDERS.get(folder.parent.name)
        if place is not None:
            tag = tag or folder.name
        yield from _models_of(folder, stage or place or "sft", tag)
        return
    if stage is not None or tag is not None:
        raise UserError(
            f"{folder} is a whole base folder, which says stages and tags itself: leave --stage and --tag out"
        )
    for name, stage_folder in stages.items():
        for tag_folder in sorted(path for path in stage_folder.iterdir() if path.is_dir()):
            tag = tag_folder.name
            if name == "mid_checkpoints" and any((folder / CHECKPOINT_FOLDERS["sft"] / tag).glob("model_*.pt")):
                tag += "-mid"
            yield from _models_of(tag_folder, STAGE_FOLDERS[name], tag)


def _models_of(folder: Path, source: Source, tag: str | None) -> Iterator[ModelFile]:
    names = {path.name for path in folder.iterdir()}
    for name in sorted(names):
        if (match := _META_FILE.fullmatch(name)) and (model := f"model_{match[1]}.pt") not in names:
            raise UserError(f"{folder / name} has no {model} beside it: copy that one too, or move this one away")
    found = [(int(match[1]), folder / name) for name in names if (match := _MODEL_FILE.fullmatch(name))]
    for step, path in sorted(found):
        yield ModelFile(path, step, source, tag)


def find_tokenizer(folder: Path) -> Path | None:
    """Where tokenizer.pkl lies: in a whole folder, a flat one, or the whole one around a folder of checkpoints."""
    around = [folder.parent.parent / "tokenizer"] if folder.parent.name in STAGE_FOLDERS else []
    places = [folder / "tokenizer", folder, *around]
    return next((place for place in places if (place / PICKLE_NAME).is_file()), None)
