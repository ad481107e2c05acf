"""What a recipe tells when it is through: its stages and their times, what training brought, and the answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.watching.history import read_history
from nanochat.watching.render import render_table
from nanochat.watching.words import duration

#: Stages that train, and what their bits per byte are measured on.
TRAINING = {"pretrain": "validation text", "sft": "held-out answers"}
#: Stages whose text is an answer, told at the end.
SPEAKING = ("chat", "generate")


@dataclass(frozen=True)
class Done:
    """A stage that is done.

    Attributes:
        text: what it told.
        values: what it told for programs.
        seconds: what it took when it was done; None where that was not noted.
        reused: whether that was in an earlier run of the recipe.
    """

    name: str
    text: str
    values: Mapping[str, Any]
    seconds: float | None
    reused: bool


def before_and_after(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """``val_bpb_before`` and ``val_bpb_after`` of a stage that trained: at step 0 and at its last step.

    Each is None where it was not measured, and the first also where it was measured on other text than the second.
    Nothing for other stages.
    """
    if name not in TRAINING or "folder" not in values:
        return {}
    measured = read_history(Path(values["folder"])).validations
    last = measured[-1] if measured and measured[-1].step == values.get("step") else None
    first = measured[0] if last is not None and measured[0].step == 0 and measured[0].segment == last.segment else None
    return {
        "val_bpb_before": first.val_bpb if first is not None else None,
        "val_bpb_after": last.val_bpb if last is not None else None,
    }


def closing_text(
    title: str, stages: Sequence[Done], seconds: float, next_commands: Sequence[str], *, colours: bool
) -> str:
    """Tables of the stages, of bits per byte and of skills, then the answers and what to type next.

    Args:
        seconds: what this run of the recipe took.
        colours: for a terminal; else plain aligned lines.
    """
    blocks = [
        title,
        _stage_table(stages, seconds, colours=colours),
        _bits_table(stages, colours=colours),
        _skill_table(stages, colours=colours),
        *(_answers(stage) for stage in stages if stage.name in SPEAKING),
    ]
    if next_commands:
        blocks.append("\n".join(["Next:", *(f"  {command}" for command in next_commands)]))
    return "\n\n".join(block for block in blocks if block)


def closing_values(stages: Sequence[Done]) -> dict[str, Any]:
    """The same for programs."""
    return {
        "stages": [
            # A stage's own seconds leave out what it took to load and to save.
            {**stage.values, "stage": stage.name, "seconds": stage.seconds, "reused": stage.reused}
            for stage in stages
        ],
        "bits_per_byte": [
            {"stage": stage.name, "model_tag": stage.values.get("model_tag"), "before": before, "after": after}
            for stage, before, after in _bits(stages)
        ],
        "skills": [
            {"model_tag": stage.values.get("model_tag"), "part": stage.values.get("part"), "skill": skill, **figure}
            for stage, skill, figure in _skills(stages)
        ],
    }


def _stage_table(stages: Sequence[Done], seconds: float, *, colours: bool) -> str:
    rows = [[stage.name, _time(stage), _made(stage)] for stage in stages]
    rows.append(["together", duration(seconds), _spared(stages)])
    return render_table(("stage", "time", "what it made"), rows, colours=colours, right=frozenset({"time"}))


def _time(stage: Done) -> str:
    if stage.seconds is None:
        return "reused"
    return f"reused ({duration(stage.seconds)})" if stage.reused else duration(stage.seconds)


def _made(stage: Done) -> str:
    """What a stage made, in one line; its tables and answers follow."""
    if stage.name in SPEAKING:
        count = len(_told(stage))
        return f"{count} {'answers' if count > 1 else 'answer'}, below"
    return stage.text.partition("\n")[0].removesuffix(":")


def _spared(stages: Sequence[Done]) -> str:
    earlier = [stage.seconds for stage in stages if stage.reused and stage.seconds is not None]
    return f"and {duration(sum(earlier))} earlier" if earlier else ""


def _bits(stages: Sequence[Done]) -> Iterator[tuple[Done, float | None, float | None]]:
    for stage in stages:
        if stage.name in TRAINING:
            yield stage, stage.values.get("val_bpb_before"), stage.values.get("val_bpb_after")


def _bits_table(stages: Sequence[Done], *, colours: bool) -> str:
    rows = [
        [stage.name, TRAINING[stage.name], _bits_shown(before), _bits_shown(after)]
        for stage, before, after in _bits(stages)
    ]
    columns = ("bits per byte", "of", "before", "after")
    return render_table(columns, rows, colours=colours, right=frozenset({"before", "after"})) if rows else ""


def _bits_shown(value: float | None) -> str:
    return "n/a (not measured)" if value is None else f"{value:.4f}"


def _skills(stages: Sequence[Done]) -> Iterator[tuple[Done, str, Mapping[str, Any]]]:
    for stage in stages:
        for skill, figure in (stage.values.get("skills") or {}).items():
            yield stage, skill, {name: figure[name] for name in ("right", "items", "accuracy")}


def _skill_table(stages: Sequence[Done], *, colours: bool) -> str:
    rows = []
    for _, skill, figure in _skills(stages):
        accuracy = "n/a (none answered)" if figure["accuracy"] is None else f"{figure['accuracy']:.1%}"
        rows.append([skill, f"{figure['right']:,}", f"{figure['items']:,}", accuracy])
    columns = ("held-out skill", "right", "items", "accuracy")
    return render_table(columns, rows, colours=colours, right=frozenset(columns[1:])) if rows else ""


def _told(stage: Done) -> Sequence[Mapping[str, Any]]:
    """Prompts and answers of a stage that speaks."""
    answers: Sequence[Mapping[str, Any]] = stage.values.get("answers") or [stage.values]
    return answers


def _answers(stage: Done) -> str:
    told = _told(stage)
    if stage.name == "generate" or any("prompt" not in each for each in told):
        return stage.text
    return "\n\n".join(f"> {each['prompt']}\n{each['text']}" for each in told)
