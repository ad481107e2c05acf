"""What each stage can be told. Their fields are the flags of the subcommand of the same name.

No torch, no work: the command line parses these before anything heavy is loaded. ``None`` means
"planned": the stage resolves it, says how, and saves only resolved values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from nanochat.data.skills import Skill
from nanochat.errors import UserError
from nanochat.paths import Source
from nanochat.stages.settings import (
    BatchSizes,
    Continuation,
    Horizon,
    Lessons,
    Machine,
    ModelShape,
    Occasions,
    PretrainRates,
    Resumption,
    Sampling,
    Saving,
    SftOccasions,
    SftRates,
    TextSource,
    ValidationText,
    alias,
    at_least,
    named,
)


@dataclass(frozen=True)
class PretrainConfig:
    """Train a base model on text."""

    model: ModelShape = field(default_factory=ModelShape)
    horizon: Horizon = field(default_factory=Horizon)
    batch: BatchSizes = field(default_factory=BatchSizes)
    rates: PretrainRates = field(default_factory=PretrainRates)
    occasions: Occasions = field(default_factory=Occasions)
    text: TextSource = field(default_factory=TextSource)
    machine: Machine = field(default_factory=Machine)
    saving: Saving = field(default_factory=Saving)
    continuation: Continuation = field(default_factory=Continuation)
    model_tag: str | None = None
    """Name of the run; d<depth> when not given."""
    seed: int = 42
    """Seed of the initial weights."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        at_least(0, self, "seed")
        named(self)


@dataclass(frozen=True)
class SftConfig:
    """Teach a base model to chat (supervised fine-tuning)."""

    lessons: Lessons = field(default_factory=Lessons)
    rates: SftRates = field(default_factory=SftRates)
    batch: BatchSizes = field(default_factory=BatchSizes)
    occasions: SftOccasions = field(default_factory=SftOccasions)
    machine: Machine = field(default_factory=Machine)
    saving: Saving = field(default_factory=Saving)
    continuation: Resumption = field(default_factory=Resumption)
    model_tag: str | None = None
    """Run to start from, and name of the result."""
    model_step: int | None = None
    """Step of the base run; its newest when not given."""
    load_optimizer: int = 1
    """Carry the optimizer's moments over (1) or start them fresh (0)."""
    num_iterations: int | None = None
    """Optimizer steps; one pass over the conversations when not given."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        if self.load_optimizer not in (0, 1):
            raise UserError(f"--load-optimizer is {self.load_optimizer}: it must be 0 or 1")
        named(self)


@dataclass(frozen=True)
class ImportConfig:
    """Import checkpoints, tokenizer and data of the public nanochat family."""

    folder: tyro.conf.Positional[str]
    """A base folder of the family, or a flat folder as published on the hub."""
    stage: Source | None = None
    """Stage of a flat folder's checkpoints: base, sft or rl; sft when not given."""
    tag: str | None = None
    """Name for a flat folder's model; d<layers> when not given."""
    logit_softcap: float | None = None
    """Soft cap of the logits, where the file cannot tell (20 for models of 2 to 8 March 2026)."""
    overwrite: bool = False
    """Replace a step that is already there and differs."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True)
class TokenizerConfig:
    """Train a tokenizer on a data set's training text."""

    vocab_size: int = 32_768
    """Number of tokens, the nine special ones included."""
    data: str | None = None
    """Name or folder of a data set; what lies in the base folder when not given."""
    name: str | None = None
    """Name to keep it under; the base folder's own tokenizer when not given."""
    max_chars: int = 2_000_000_000
    """Characters to train on at most."""
    doc_cap: int = 10_000
    """Characters of one document at most."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        at_least(1, self, "max_chars", "doc_cap")
        if self.vocab_size > 2**27:
            raise UserError(f"--vocab-size is {self.vocab_size}: it must be at most {2**27:,}")


@dataclass(frozen=True)
class SkillQuestions:
    """What a model is asked when its skills are graded, and what it was taught with."""

    num_items: int = 200
    """Questions of each skill at most."""
    part: Literal["val", "test"] = "test"
    """Which held-out items: val to choose settings with, test for figures to report."""
    max_tokens: Annotated[int, alias("-m")] = 160
    """Tokens of an answer at most."""
    show_wrong: int = 0
    """Wrong answers of each skill to show."""
    conversations: tuple[str, ...] | None = None
    """Sources whose words are spelled and counted in; those the run was taught with when not given."""
    name: str | None = None
    """Who the model should say it is; the name the run was taught when not given."""

    def __post_init__(self) -> None:
        at_least(1, self, "num_items", "max_tokens")
        at_least(0, self, "show_wrong")


@dataclass(frozen=True)
class EvaluateConfig:
    """Measure a model."""

    bpb: bool = False
    """Bits per byte on the validation text."""
    skills: tuple[Skill, ...] | None = None
    """Share of right answers to held-out questions: name, spelling, counting, sums; all of them when none is named."""
    questions: SkillQuestions = field(default_factory=SkillQuestions)
    source: Annotated[Source | None, alias("-i")] = None
    """Which checkpoints: base, sft or rl; sft for skills and base for bits per byte alone, when not given."""
    model_tag: Annotated[str | None, alias("-g")] = None
    """Run to measure; the deepest, else the newest, when not given."""
    step: Annotated[str | None, alias("-s")] = None
    """Saved step, or all for a curve over every saved step; the newest when not given."""
    device_batch_size: int | None = None
    """Rows per forward pass; the run's own when not given."""
    text: ValidationText = field(default_factory=ValidationText)
    device: str | None = None
    """cpu, cuda or mps; the best there is when not given."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        at_least(1, self, "device_batch_size")
        named(self)


@dataclass(frozen=True)
class GenerateConfig:
    """Continue a text (base) or answer one message (sft, rl)."""

    prompt: Annotated[str, alias("-p")]
    """The text to continue, or the message to answer."""
    source: Annotated[Source, alias("-i")] = "base"
    """Which checkpoints: base, sft or rl."""
    model_tag: Annotated[str | None, alias("-g")] = None
    """Run to use; the deepest, else the newest, when not given."""
    step: Annotated[int | None, alias("-s")] = None
    """Saved step; the newest when not given."""
    sampling: Sampling = field(default_factory=Sampling)
    tokenizer: str | None = None
    """Name or folder of the tokenizer; the one the run was trained with when not given."""
    device: str | None = None
    """cpu, cuda or mps; the best there is when not given."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        named(self)


@dataclass(frozen=True)
class ChatConfig:
    """Talk to a chat model."""

    prompt: Annotated[tuple[str, ...], alias("-p")] = ()
    """Messages to answer one by one, each as a new conversation; a dialogue when none is given."""
    source: Annotated[Source, alias("-i")] = "sft"
    """Which checkpoints: sft or rl (or base, which was never taught to chat)."""
    model_tag: Annotated[str | None, alias("-g")] = None
    """Run to talk to; the deepest, else the newest, when not given."""
    step: Annotated[int | None, alias("-s")] = None
    """Saved step; the newest when not given."""
    sampling: Sampling = field(default_factory=Sampling)
    tokenizer: str | None = None
    """Name or folder of the tokenizer; the one the run was trained with when not given."""
    device: str | None = None
    """cpu, cuda or mps; the best there is when not given."""
    json: bool = False
    """Print the answers as JSON."""

    def __post_init__(self) -> None:
        named(self)


@dataclass(frozen=True)
class PlanConfig:
    """Every number that follows from the depth, each with its reason."""

    model: ModelShape = field(default_factory=ModelShape)
    vocab_size: int = 32_768
    """Number of tokens, the nine special ones included."""
    horizon: Horizon = field(default_factory=Horizon)
    total_batch_size: int | None = None
    """Tokens per optimizer step; planned from the horizon when not given."""
    weight_decay: float = 0.28
    """Weight decay of the matrices at the reference model and batch."""
    json: bool = False
    """Print the plan as JSON."""


@dataclass(frozen=True)
class RunConfig:
    """Run a recipe: a line of stages; those already done are skipped."""

    recipe: tyro.conf.Positional[str]
    """Name of a file in runs/, or the path of one."""
    again: bool = False
    """Do every stage again, also those already done."""
    detach: bool = False
    """Run in the background and return at once; nanochat attach follows it."""
    json: bool = False
    """Print the result as JSON."""
