"""Recipes: lines of stages as data, in TOML. ``nanochat run demo`` runs ``runs/demo.toml``.

A recipe names its stages in order; whatever else stands in a stage's table is a flag of that
subcommand. A stage is skipped when it was done before with the same settings, after the same
stages, and what it made is still there.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat import __version__
from nanochat.commands import COMMANDS
from nanochat.config import flags_of, parse_flags, to_dict
from nanochat.context import Context, Result
from nanochat.errors import UserError
from nanochat.stages.configs import RunConfig


@dataclass(frozen=True)
class Stage:
    """One stage of a recipe: the subcommand and its config."""

    name: str
    config: Any

    @property
    def always(self) -> bool:
        """Stages that make nothing to keep, and so are done every time."""
        return self.name in ("chat", "generate", "evaluate", "plan")


@dataclass(frozen=True)
class Recipe:
    """A line of stages, and what to tell when it is through."""

    name: str
    description: str
    stages: tuple[Stage, ...]
    next_commands: tuple[str, ...]


def find_recipe(name: str) -> Path:
    """The file of a recipe: a path, or a name in ``runs/`` here or beside the package.

    Raises:
        UserError: when there is none, listing what there is.
    """
    if name.endswith(".toml") and Path(name).is_file():
        return Path(name)
    folders = [Path("runs"), Path(__file__).resolve().parent.parent / "runs"]
    for folder in folders:
        if (folder / f"{name}.toml").is_file():
            return folder / f"{name}.toml"
    present = sorted({path.stem for folder in folders for path in folder.glob("*.toml")})
    raise UserError(f"there is no recipe {name!r}: choose one of {', '.join(present) or 'none'}, or name a .toml file")


def read_recipe(path: Path) -> Recipe:
    """Read a recipe and check every flag in it.

    Raises:
        UserError: when the file is not TOML, or a stage or flag is unknown.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"recipe {path} cannot be read: {error}") from None
    if unknown := sorted(set(data) - {"description", "stages", "next_commands"}):
        raise UserError(f"recipe {path} has unknown entries {', '.join(unknown)}: it holds description and stages")
    tables = data.get("stages")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise UserError(f"recipe {path} has no stages: add [[stages]] tables with a 'stage' entry each")
    stages = tuple(_read_stage(table, f"recipe {path}, stage {number}") for number, table in enumerate(tables, 1))
    return Recipe(path.stem, str(data.get("description", "")), stages, tuple(data.get("next_commands", ())))


def _read_stage(table: Mapping[str, Any], where: str) -> Stage:
    values = dict(table)
    name = values.pop("stage", None)
    if name not in COMMANDS or name == "run":
        known = ", ".join(command for command in COMMANDS if command != "run")
        raise UserError(f"{where} is {name!r}: it must be one of {known}")
    positional = [
        str(values.pop(key)) for key in ("source", "folder") if name in ("dataset", "import") and key in values
    ]
    try:
        config = parse_flags(COMMANDS[name].config_class(), [*positional, *flags_of(values)], f"nanochat {name}")
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return Stage(name, config)


def run(config: RunConfig, context: Context) -> Result:
    """Run a recipe's stages in order, skipping those already done."""
    recipe = read_recipe(find_recipe(config.recipe))
    say = context.terminal.say
    done_folder = context.base / "recipes" / recipe.name
    lines: list[str] = []
    values: list[dict[str, Any]] = []
    line_so_far = __version__
    began = time.perf_counter()
    for number, stage in enumerate(recipe.stages, 1):
        line_so_far = _fingerprint(line_so_far, stage)
        title = f"[{number}/{len(recipe.stages)}] {stage.name}"
        note = done_folder / f"{number:02d}-{stage.name}.json"
        done = None if config.again or stage.always else _read_done(note, line_so_far)
        if done is not None:
            say(f"{title}: already done, {done['text']}")
            lines.append(f"{stage.name:<10} {'reused':>8}  {done['text']}")
            values.append({"stage": stage.name, "seconds": 0.0, "reused": True, **done["values"]})
            continue
        say(title)
        stage_began = time.perf_counter()
        result: Result = COMMANDS[stage.name].stage()(stage.config, context)
        seconds = time.perf_counter() - stage_began
        _write_done(note, line_so_far, result)
        shown = f"\n{result.text}\n" if stage.name in ("chat", "generate") else result.text
        lines.append(f"{stage.name:<10} {seconds:>6.0f} s  {shown}")
        values.append({"stage": stage.name, "seconds": seconds, "reused": False, **result.values})
    total = time.perf_counter() - began
    closing = [f"{recipe.name}: {recipe.description}", "", *lines, f"{'together':<10} {total:>6.0f} s"]
    if recipe.next_commands:
        closing += ["", "Next:", *(f"  {command}" for command in recipe.next_commands)]
    return Result({"recipe": recipe.name, "seconds": total, "stages": values}, "\n".join(closing))


def _fingerprint(before: str, stage: Stage) -> str:
    """Names a stage with its settings and everything that came before it."""
    text = json.dumps([before, stage.name, to_dict(stage.config)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_done(note: Path, fingerprint: str) -> dict[str, Any] | None:
    """What the stage told when it was done, if that still holds."""
    try:
        done: dict[str, Any] = json.loads(note.read_text(encoding="utf-8"))
        same = done["fingerprint"] == fingerprint and all(Path(output).exists() for output in done["outputs"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return done if same else None


def _write_done(note: Path, fingerprint: str, result: Result) -> None:
    note.parent.mkdir(parents=True, exist_ok=True)
    done = {
        "fingerprint": fingerprint,
        "text": result.text,
        "values": result.values,
        "outputs": [str(path) for path in result.outputs],
    }
    beside = note.with_suffix(".tmp")
    beside.write_text(json.dumps(done, ensure_ascii=False), encoding="utf-8")
    os.replace(beside, note)
