"""Recipes: lines of stages as data, in TOML. ``nanochat run demo`` runs ``runs/demo.toml``.

A recipe names its stages in order; whatever else stands in a stage's table is a flag of that
subcommand. A stage is skipped when it was done before with the same settings, after the same
stages, and what it made is still there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat import __version__
from nanochat.closing import Done, before_and_after, closing_text, closing_values
from nanochat.commands import COMMANDS
from nanochat.config import flags_of, parse_flags, to_dict
from nanochat.context import Context, Result
from nanochat.errors import UserError
from nanochat.stages.configs import RunConfig
from nanochat.watching.detach import start_detached

#: Entries of a stage that its subcommand takes without a flag, in order.
POSITIONAL = {"dataset": ("action", "paths"), "import": ("folder",)}


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
    commands = data.get("next_commands", [])
    if not isinstance(commands, list) or not all(isinstance(command, str) for command in commands):
        raise UserError(f"next_commands of recipe {path} is not a list of texts: write one")
    stages = tuple(_read_stage(table, f"recipe {path}, stage {number}") for number, table in enumerate(tables, 1))
    return Recipe(path.stem, str(data.get("description", "")), stages, tuple(commands))


def _read_stage(table: Mapping[str, Any], where: str) -> Stage:
    values = dict(table)
    name = values.pop("stage", None)
    if name not in COMMANDS or name == "run":
        known = ", ".join(command for command in COMMANDS if command != "run")
        raise UserError(f"{where} is {name!r}: it must be one of {known}")
    positional = [word for key in POSITIONAL.get(name, ()) if key in values for word in _words(values.pop(key))]
    try:
        config = parse_flags(COMMANDS[name].config_class(), [*positional, *flags_of(values)], f"nanochat {name}")
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return Stage(name, config)


def _words(value: Any) -> list[str]:
    return [str(part) for part in value] if isinstance(value, list) else [str(value)]


def run(config: RunConfig, context: Context) -> Result:
    """Run a recipe's stages in order, skipping those already done."""
    path = find_recipe(config.recipe)
    recipe = read_recipe(path)
    if config.detach:
        return _detach(recipe, path, config, context)
    stages: list[Done] = []
    line_so_far = __version__
    began = time.perf_counter()
    for number, stage in enumerate(recipe.stages, 1):
        line_so_far = _fingerprint(line_so_far, stage)
        title = f"[{number}/{len(recipe.stages)}] {stage.name}"
        note = context.base / "recipes" / recipe.name / f"{number:02d}-{stage.name}.json"
        done = None if config.again or stage.always else _read_done(note, line_so_far, stage.name)
        if done is not None:
            context.terminal.say(f"{title}: already done, {done.text}")
            stages.append(done)
            continue
        context.terminal.say(title)
        stage_began = time.perf_counter()
        result: Result = COMMANDS[stage.name].stage()(_going_on(stage, note, line_so_far), context)
        if not result.finished:
            return _stopped(recipe, config, stage, result)
        values = {**result.values, **before_and_after(stage.name, result.values)}
        stages.append(Done(stage.name, result.text, values, time.perf_counter() - stage_began, reused=False))
        _write_done(note, line_so_far, stages[-1], result.outputs)
    total = time.perf_counter() - began
    title = f"{recipe.name}: {recipe.description}"
    text = closing_text(title, stages, total, recipe.next_commands, colours=sys.stdout.isatty())
    return Result({"recipe": recipe.name, "seconds": total, **closing_values(stages)}, text)


def _stopped(recipe: Recipe, config: RunConfig, stage: Stage, result: Result) -> Result:
    """What to tell of a line that was stopped: how to go on, and figures that would be lost with it."""
    text = f"stopped in {stage.name}; go on with: nanochat run {config.recipe}"
    values = {"recipe": recipe.name, "stopped_in": stage.name, "stopped": dict(result.values)}
    return Result(values, f"{result.text}\n\n{text}" if stage.always else text, finished=False)


def _detach(recipe: Recipe, path: Path, config: RunConfig, context: Context) -> Result:
    """Start the same line in the background."""
    words = ["run", str(path.resolve()), *(["--again"] if config.again else [])]
    detached = start_detached(words, context.base, recipe.name)
    text = (
        f"{recipe.name} runs in the background (process {detached.pid}); follow it with: nanochat attach {recipe.name}"
    )
    return Result({"recipe": recipe.name, "pid": detached.pid, "log": str(detached.log)}, text)


def _going_on(stage: Stage, note: Path, fingerprint: str) -> Any:
    """The stage's config; one that was begun with the same settings and stopped goes on where it was saved."""
    continuation = getattr(stage.config, "continuation", None)
    if continuation is None or continuation.resume is not None:
        return stage.config
    begun = note.with_suffix(".begun")
    try:
        was_begun = begun.read_text(encoding="utf-8") == fingerprint
    except OSError:
        was_begun = False
    if was_begun:
        return dataclasses.replace(stage.config, continuation=dataclasses.replace(continuation, resume="auto"))
    begun.parent.mkdir(parents=True, exist_ok=True)
    begun.write_text(fingerprint, encoding="utf-8")
    return stage.config


def _fingerprint(before: str, stage: Stage) -> str:
    """Names a stage with its settings and everything that came before it."""
    text = json.dumps([before, stage.name, to_dict(stage.config)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_done(note: Path, fingerprint: str, name: str) -> Done | None:
    """What the stage told when it was done, if that still holds."""
    try:
        done: dict[str, Any] = json.loads(note.read_text(encoding="utf-8"))
        same = done["fingerprint"] == fingerprint and all(Path(output).exists() for output in done["outputs"])
        found = Done(name, done["text"], dict(done["values"]), done.get("seconds"), reused=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if same else None


def _write_done(note: Path, fingerprint: str, done: Done, outputs: Sequence[Path]) -> None:
    note.parent.mkdir(parents=True, exist_ok=True)
    values = {
        "fingerprint": fingerprint,
        "text": done.text,
        "values": done.values,
        "seconds": done.seconds,
        "outputs": [str(path) for path in outputs],
    }
    beside = note.with_suffix(".tmp")
    beside.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    os.replace(beside, note)
    note.with_suffix(".begun").unlink(missing_ok=True)
