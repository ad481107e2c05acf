"""The groups of settings that configs are made of, and the checks they share.

A group's fields are flags without a prefix. Whatever cannot be, whoever says it, is refused when a
group is made: on the command line, in a recipe, from Python, and in a saved config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from nanochat.errors import UserError
from nanochat.paths import check_name
from nanochat.plan import PlanInputs

if TYPE_CHECKING:
    from nanochat.train.saving import SavePolicy

CompileMode = Literal["auto", "on", "off"]


def alias(*names: str) -> object:
    """Short names of a flag, such as ``-p``."""
    return tyro.conf.arg(aliases=list(names))


#: Of a rate, a factor, a number of minutes.
LARGEST_NUMBER = 1e6


def named(config: object) -> None:
    """Raise :class:`UserError` for a model tag (None aside) that cannot name a folder."""
    tag = getattr(config, "model_tag", None)
    if tag is not None:
        check_name(tag, "--model-tag")


def at_least(smallest: int, config: object, *names: str) -> None:
    """Raise :class:`UserError` for a whole number (None aside) that is too small, or too large for any use."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not smallest <= value < 2**63:
            raise UserError(f"--{name.replace('_', '-')} is {value}: it must be at least {smallest}")


def not_negative(config: object, *names: str) -> None:
    """Raise :class:`UserError` for a number (None aside) that is negative, not finite or beyond any use."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 <= value <= LARGEST_NUMBER:
            raise UserError(f"--{name.replace('_', '-')} is {value}: it must be between 0 and {LARGEST_NUMBER:,.0f}")


@dataclass(frozen=True)
class ModelShape:
    """Shape of the model."""

    depth: int = 20
    """Number of layers: the one number that sets everything else."""
    aspect_ratio: int = 64
    """Model dim is depth times this, rounded up to a multiple of the head dim."""
    head_dim: int = 128
    """Width of one attention head."""
    num_kv_heads: int | None = None
    """Key-value heads; as many as query heads when not given."""
    max_seq_len: int = 2048
    """Tokens in a row (T)."""
    window_pattern: str = "SSSL"
    """Attention windows, tiled over the layers: L long, S short; the last layer is always L."""


@dataclass(frozen=True)
class Horizon:
    """How long to train: steps, else FLOPs, else tokens per scaling parameter."""

    num_iterations: int | None = None
    """Optimizer steps."""
    target_flops: float | None = None
    """Total FLOPs to spend."""
    target_param_data_ratio: float = 12.0
    """Training tokens per scaling parameter (Chinchilla: 20)."""


@dataclass(frozen=True)
class BatchSizes:
    """How many tokens at a time."""

    device_batch_size: int | None = None
    """Rows per forward pass; when not given, the most up to 32 that divides the total batch."""
    total_batch_size: int | None = None
    """Tokens per optimizer step; planned from the horizon when not given."""

    def __post_init__(self) -> None:
        at_least(1, self, "device_batch_size")


@dataclass(frozen=True)
class PretrainRates:
    """Learning rates before the batch factor, and their schedule."""

    embedding_lr: float = 0.3
    """Rate of the token embedding; half of it for value embeddings (AdamW)."""
    unembedding_lr: float = 0.008
    """Rate of the output projection (AdamW)."""
    matrix_lr: float = 0.02
    """Rate of the matrices in the blocks (Muon)."""
    scalar_lr: float = 0.5
    """Rate of the residual scalars (AdamW)."""
    weight_decay: float = 0.28
    """Weight decay of the matrices at the reference model and batch; scaled by the plan."""
    warmup_steps: int = 40
    """Steps over which the rates rise."""
    warmdown_ratio: float = 0.65
    """Share of the steps over which the rates fall."""
    final_lr_frac: float = 0.05
    """Where the rates end, as a share of their full value."""

    def __post_init__(self) -> None:
        not_negative(self, "embedding_lr", "unembedding_lr", "matrix_lr", "scalar_lr", "weight_decay")


@dataclass(frozen=True)
class Occasions:
    """What happens beside training, at which steps (and always at the last); 0 switches off."""

    eval_every: int = 250
    """Steps between validations (also before the first step)."""
    eval_tokens: int = 80 * 524_288
    """Validation tokens at most; one pass over the validation text when that is shorter."""
    sample_every: int = 2000
    """Steps between samples of text."""
    sample_prompts: tuple[str, ...] = (
        "The capital of France is",
        "The chemical symbol of gold is",
        "If yesterday was Friday, then tomorrow will be",
        "The opposite of hot is",
        "The planets of the solar system are:",
    )
    """Beginnings that samples continue (greedy, 16 tokens)."""


@dataclass(frozen=True)
class Saving:
    """Which saves are made and kept besides the last."""

    save_every: int | None = None
    """Steps between checkpoints; only at the end when not given."""
    keep_last: int | None = None
    """Regular checkpoints to keep; all when not given."""
    recovery_minutes: float = 15.0
    """Most minutes between saves; the last such recovery save is kept. 0 switches off."""

    def __post_init__(self) -> None:
        at_least(1, self, "keep_last")
        not_negative(self, "recovery_minutes")

    @property
    def policy(self) -> SavePolicy:
        """The same for the training loop."""
        from nanochat.train.saving import SavePolicy

        return SavePolicy(self.save_every, self.keep_last, self.recovery_minutes)


@dataclass(frozen=True)
class Resumption:
    """Going on with a run, exactly."""

    resume: str | None = None
    """Go on: alone from the newest checkpoint, with a number from that step, with auto from the newest or anew."""
    allow_changes: bool = False
    """Go on although text, tokenizer or settings differ; the change is marked, figures do not compare."""
    given: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Names of the settings that were given, filled in by the command line."""


@dataclass(frozen=True)
class Continuation:
    """Going on with a run, exactly, or beginning a new one from the weights of another."""

    resume: str | None = None
    """Go on: alone from the newest checkpoint, with a number from that step, with auto from the newest or anew."""
    allow_changes: bool = False
    """Go on although text, tokenizer or settings differ; the change is marked, figures do not compare."""
    start_from: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """Begin a new run from this one: a model tag (newest step) or TAG@STEP."""
    keep_moments: bool = False
    """With --from: carry the optimizer's moments over too."""
    given: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Names of the settings that were given, filled in by the command line."""


@dataclass(frozen=True)
class TextSource:
    """Text and tokenizer."""

    data: tuple[str, ...] | None = None
    """Names or folders of data sets, each with its share as NAME:0.8; what lies in the base folder when not given."""
    packing: Literal["bestfit", "keep"] | None = None
    """bestfit crops what does not fit a row, keep goes on with it in a later one; chosen by the text when not given."""
    tokenizer: str | None = None
    """Name or folder of a tokenizer; the base folder's own when not given."""
    buffer_size: int = 1000
    """Documents waiting to be packed."""
    tokenizer_batch_size: int = 128
    """Documents fetched at a time, never across a row group."""

    def __post_init__(self) -> None:
        at_least(1, self, "buffer_size", "tokenizer_batch_size")


@dataclass(frozen=True)
class Machine:
    """Where and how to compute."""

    device: str | None = None
    """cpu, cuda or mps; the best there is when not given."""
    compile: CompileMode = "auto"
    """Compile the model: auto falls back to uncompiled, on fails instead, off never tries."""
    dtype: str | None = None
    """float32, bfloat16 or float16; NANOCHAT_DTYPE, else what the device computes well, when not given."""


@dataclass(frozen=True)
class SftRates:
    """Learning rates (the base run's when not given) and their schedule."""

    embedding_lr: float | None = None
    """Rate of the token embedding before init-lr-frac."""
    unembedding_lr: float | None = None
    """Rate of the output projection before init-lr-frac."""
    matrix_lr: float | None = None
    """Rate of the matrices before init-lr-frac."""
    init_lr_frac: float = 0.8
    """Every rate is multiplied by this."""
    warmup_ratio: float = 0.0
    """Share of the run over which the rates rise."""
    warmdown_ratio: float = 0.5
    """Share of the run over which the rates fall."""
    final_lr_frac: float = 0.0
    """Where the rates end, as a share of their full value."""

    def __post_init__(self) -> None:
        not_negative(self, "embedding_lr", "unembedding_lr", "matrix_lr", "init_lr_frac")


@dataclass(frozen=True)
class SftOccasions:
    """What happens beside training, at which steps (and always at the last); 0 switches off."""

    eval_every: int = 200
    """Steps between validations (also before the first step)."""
    eval_tokens: int = 40 * 524_288
    """Validation tokens at most; one pass over the held-out conversations when those are fewer."""
    sample_every: int = 0
    """Steps between sample answers, besides the last step."""
    sample_prompts: tuple[str, ...] = ("Hello!", "Who are you?", "What can you do?")
    """User messages that samples answer (greedy, 64 tokens at most)."""


@dataclass(frozen=True)
class Lessons:
    """What a chat model learns from."""

    conversations: tuple[str, ...] = ("chitchat", "identity")
    """chitchat, identity, spelling, counting, sums (each also as NAME:COUNT), or JSON-lines files of conversations."""
    name: str = "nanochat"
    """Who the model says it is."""
    max_seq_len: int | None = None
    """Tokens in a row; the base run's when not given."""

    def __post_init__(self) -> None:
        at_least(1, self, "max_seq_len")
        if not self.name.strip():
            raise UserError("--name is empty: say who the model is")


@dataclass(frozen=True)
class ValidationText:
    """What is measured."""

    data: tuple[str, ...] | None = None
    """Data sets, or a file of text (.txt, .jsonl, .parquet); the run's own validation text when not given."""
    tokenizer: str | None = None
    """Name or folder of the tokenizer; the one the run was trained with when not given."""
    eval_tokens: int = 20 * 524_288
    """Tokens to measure at most; one pass over the text when that is shorter."""
    max_seq_len: int | None = None
    """Tokens in a row; the model's own when not given."""
    buffer_size: int = 1000
    """Documents waiting to be packed."""
    tokenizer_batch_size: int = 128
    """Documents fetched at a time, never across a row group."""

    def __post_init__(self) -> None:
        at_least(1, self, "eval_tokens", "max_seq_len", "buffer_size", "tokenizer_batch_size")


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: Annotated[float, alias("-t")] = 0.6
    """0 takes the likeliest token; higher is freer."""
    top_k: Annotated[int, alias("-k")] = 50
    """Choose among this many likeliest tokens; 0 among all."""
    max_tokens: Annotated[int, alias("-m")] = 256
    """Tokens to add at most."""
    seed: int = 0
    """The same seed gives the same text."""


def plan_inputs(
    model: ModelShape, horizon: Horizon, *, vocab_size: int, total_batch_size: int | None, weight_decay: float
) -> PlanInputs:
    """The plan's inputs from a stage's settings."""
    return PlanInputs(
        depth=model.depth,
        target_param_data_ratio=horizon.target_param_data_ratio,
        aspect_ratio=model.aspect_ratio,
        head_dim=model.head_dim,
        num_kv_heads=model.num_kv_heads,
        max_seq_len=model.max_seq_len,
        vocab_size=vocab_size,
        window_pattern=model.window_pattern,
        total_batch_size=total_batch_size or -1,
        weight_decay=weight_decay,
        num_iterations=horizon.num_iterations or -1,
        target_flops=horizon.target_flops or -1.0,
    )
