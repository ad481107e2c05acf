"""Going on with a run exactly where it was saved, and only as the same run.

A run that goes on with other text, tokenizer or settings is another run: its figures do not compare
with the earlier ones. So differences are refused, by name, unless they are allowed by a flag; what
does not change the training (how often to save, which device) may differ freely.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanochat import checkpoint, records
from nanochat.checkpoint import Checkpoint
from nanochat.errors import UserError
from nanochat.paths import CHECKPOINT_FOLDERS, Source, checkpoints_folder

#: Settings that do not change what is computed, or only where.
FREE = frozenset(
    {
        *("eval_every", "eval_tokens", "sample_every", "save_every", "sample_prompts", "keep_last", "recovery_minutes"),
        *("device", "compile", "json", "resume", "allow_changes", "start_from", "keep_moments", "model_tag", "given"),
    }
)


def find(stage: Source, tag: str | None, resume: str | None, base: Path) -> tuple[Path | None, list[str]]:
    """The saved step to go on from.

    Args:
        tag: the run; when None the one of that stage that was saved last.
        resume: None starts anew; a number names a step; ``latest`` takes the newest complete one;
            ``auto`` does too, or starts anew when there is none.

    Returns:
        Its folder (None to start anew), and a sentence for each damaged step that was passed over.

    Raises:
        UserError: when there is no such step.
    """
    if resume is None:
        return None, []
    notices: list[str] = []
    if resume.isdigit():
        return checkpoint.find(stage, tag, int(resume), base, notices.append), notices
    if resume not in ("latest", "auto"):
        raise UserError(f"--resume {resume!r} is neither a step nor auto: give a number, auto, or nothing")
    run_folder = checkpoints_folder(stage, tag, base) if tag else _last_saved(stage, base)
    own = _own_steps(run_folder) if run_folder is not None else []
    if not own:
        if resume == "auto":
            return None, []
        where = f"run {tag}" if tag else f"{stage} run"
        earlier = checkpoint.steps(run_folder) if run_folder is not None else []
        hint = (
            f"its newest start saved nothing yet; an earlier run's steps are {', '.join(map(str, earlier))},"
            f" resume one with --resume {earlier[-1]}"
            if earlier
            else "start one without --resume"
        )
        raise UserError(f"there is no {where} in {base} to resume: {hint}")
    assert run_folder is not None
    newest = checkpoint.step_folder(run_folder, own[-1])
    notices += [problem for step, problem in checkpoint.survey(run_folder) if problem is not None and step > own[-1]]
    return newest, notices


def _own_steps(run_folder: Path) -> list[int]:
    """Complete steps that the run of ours in a folder saved, ascending.

    Not those that were imported, which have no position in the data, nor those of an earlier run, which
    lie there until a new one has saved for the first time.
    """
    begun = [record.get("run_id") for record in records.read(run_folder, "start")]
    found = []
    for step in checkpoint.steps(run_folder):
        manifest = checkpoint.read_manifest(checkpoint.step_folder(run_folder, step))
        same_run = not begun or begun[-1] is None or manifest.get("run_id") in (None, begun[-1])
        if manifest.get("family") is None and same_run:
            found.append(step)
    return found


def _last_saved(stage: Source, base: Path) -> Path | None:
    """The run of that stage whose newest save is the youngest."""
    youngest: tuple[float, Path] | None = None
    folder = base / CHECKPOINT_FOLDERS[stage]
    for run_folder in sorted(folder.iterdir()) if folder.is_dir() else []:
        for step in _own_steps(run_folder):
            saved = (checkpoint.step_folder(run_folder, step) / checkpoint.MANIFEST_NAME).stat().st_mtime
            if youngest is None or saved > youngest[0]:
                youngest = saved, run_folder
    return youngest[1] if youngest else None


def differences(
    saved: Mapping[str, Any],
    wanted: Mapping[str, Any],
    defaults: Mapping[str, Any],
    given: frozenset[str] = frozenset(),
) -> dict[str, str]:
    """What a resume asks to be different: name → ``saved → wanted``, nested names joined by dots.

    A setting left at its default asks for nothing, unless it is among those that were ``given``.
    """
    found: dict[str, str] = {}
    for name, value in wanted.items():
        before, default = saved.get(name), defaults.get(name)
        if isinstance(value, Mapping):
            inner = differences(before or {}, value, default or {}, given)
            found |= {f"{name}.{key}": text for key, text in inner.items()}
        elif name not in FREE and _asked(name, value, default, given) and _plain(value) != _plain(before):
            found[name] = f"{_shown(before)} → {_shown(value)}"
    return found


def merged(
    saved: Mapping[str, Any],
    wanted: Mapping[str, Any],
    defaults: Mapping[str, Any],
    given: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """The config to go on with: the saved one, with the free settings (and allowed changes) that were asked for."""
    result: dict[str, Any] = {}
    for name, value in wanted.items():
        before, default = saved.get(name), defaults.get(name)
        if isinstance(value, Mapping):
            result[name] = merged(before or {}, value, default or {}, given)
        elif _asked(name, value, default, given):
            result[name] = value
        else:
            result[name] = before if name in saved else value
    return result


def refuse(changes: Mapping[str, str], folder: Path) -> None:
    """Raise :class:`UserError` naming every difference, when there is one."""
    if changes:
        listed = "; ".join(f"{name} {text}" for name, text in changes.items())
        raise UserError(
            f"{folder} cannot be resumed with other settings ({listed}): leave them away, start a new run with --from,"
            " or allow them with --allow-changes (figures before and after will not compare)"
        )


def check_state(saved: Checkpoint, folder: Path) -> None:
    """Raise :class:`UserError` unless the checkpoint holds everything that an exact resume needs."""
    lacking = [name for name in ("optimizer", "loader", "random") if getattr(saved, name) is None]
    if lacking:
        raise UserError(
            f"{folder} holds no {' and no '.join(lacking)} state, so it cannot be resumed exactly: start a new run from"
            " it with --from"
        )


def _asked(name: str, value: Any, default: Any, given: frozenset[str]) -> bool:
    return name in given or _plain(value) != _plain(default)


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
