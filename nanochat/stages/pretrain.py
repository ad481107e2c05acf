"""``nanochat pretrain``: a base model from text, new, resumed, or begun from another run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from nanochat import config as configs
from nanochat.checkpoint import Checkpoint
from nanochat.context import Context, Result
from nanochat.data.amounts import TokenEstimate, estimate_tokens, text_use
from nanochat.data.blend import Blend, choose_packing, resolve_blend
from nanochat.data.loader import PretrainLoader
from nanochat.errors import UserError
from nanochat.evaluation.validation import Validation, plan_validation
from nanochat.hardware import detect
from nanochat.hardware.device import Device, compute_dtype, dtype_name
from nanochat.inference.generate import generate
from nanochat.inference.session import build_model, tokenizer_of
from nanochat.model.gpt import GPT
from nanochat.model.init import initialize
from nanochat.optim.groups import Rates, parameter_groups
from nanochat.optim.optimizer import Optimizer
from nanochat.optim.schedule import PretrainSchedule
from nanochat.plan import Plan, gradient_accumulation, plan
from nanochat.stages.configs import PretrainConfig
from nanochat.stages.origin import Origin, find_pretrain_origin
from nanochat.stages.settings import plan_inputs
from nanochat.tokenizer import store
from nanochat.tokenizer.bpe import Tokenizer
from nanochat.train import resume
from nanochat.train.interrupt import Interruption
from nanochat.train.loop import Hook
from nanochat.train.run import TrainingRun, begin, rows_per_batch
from nanochat.train.session import Outcome, Progress, already_finished, run_to_the_end
from nanochat.train.step import MicroBatch, StepRates, Trainer
from nanochat.train.watch import guarded, health_hook, sample_hook, validate_hook

#: Tokens that a sample adds to its prompt.
SAMPLE_TOKENS = 16


@dataclass(frozen=True)
class PretrainSource:
    """Each step's micro-batches of packed text, and its schedule."""

    loader: PretrainLoader
    accumulation: int
    schedule: PretrainSchedule

    def finished(self, step: int) -> bool:
        return step >= self.schedule.num_iterations

    def rates(self, step: int) -> StepRates:
        schedule = self.schedule
        return StepRates(schedule.lr_multiplier(step), schedule.muon_momentum(step), schedule.muon_weight_decay(step))

    def next_step(self) -> Sequence[MicroBatch]:
        return list(islice(self.loader, self.accumulation))

    def where(self) -> str:
        position = self.loader.position
        return f"shard {position['pq_idx']}, row group {position['rg_idx']}, epoch {position['epoch']}"


@dataclass(frozen=True)
class Prepared:
    """Everything a run needs, checked, before anything is written.

    Attributes:
        config: resolved.
        origin: the checkpoint it comes from; None for a run from nothing.
        changes: what differs from a run that is gone on with: name → ``before → now``.
        notes: what was chosen and why, in sentences.
    """

    config: PretrainConfig
    origin: Origin | None
    changes: Mapping[str, str]
    device: Device
    dtype: torch.dtype
    blend: Blend
    tokenizer: Tokenizer
    tokenizer_folder: Path
    planned: Plan
    num_tokens: TokenEstimate
    source: PretrainSource
    validation: Validation
    notes: tuple[str, ...]

    @property
    def going_on(self) -> Checkpoint | None:
        return self.origin.going_on if self.origin is not None else None


def run(config: PretrainConfig, context: Context) -> Result:
    """Train a base model and save it.

    Raises:
        UserError: for settings, data or tokenizers that cannot be, before anything is written; or when
            training diverges.
    """
    made = _prepare(config, context)
    if made.going_on is not None and made.source.finished(made.going_on.step):
        assert made.origin is not None
        return already_finished(made.origin.folder, made.going_on)
    model, optimizer = _model(made)
    training = begin(
        "base",
        made.config.model_tag or "",
        base=context.base,
        terminal=context.terminal,
        model=model,
        optimizer=optimizer,
        tokenizer=made.tokenizer,
        tokenizer_folder=made.tokenizer_folder,
        config=configs.to_dict(made.config),
        data={**made.blend.describe(), "tokens": made.num_tokens.tokens, "tokens_exact": made.num_tokens.exact},
        parent=made.origin.parent if made.origin is not None else None,
        going_on=made.going_on,
        facts=_facts(made),
    )
    _announce(training, made)
    loader = made.source.loader
    outcome = run_to_the_end(
        training,
        made.source,
        device=made.device,
        terminal=context.terminal,
        compile_mode=made.config.machine.compile,
        compile_cache=context.base / "compile_cache",
        going_on=made.going_on,
        loader_state=loader.state,
        policy=made.config.saving.policy,
        hooks=lambda trainer, interruption: _hooks(made, training, trainer, interruption),
        progress=Progress(
            made.planned.num_iterations,
            data=lambda: {
                "position": loader.position,
                "positions": loader.positions,
                "tokens_read": loader.counters.tokens,
                "tokens_lost": loader.counters.cropped_tokens,
            },
        ),
    )
    return _result(training, outcome, made.device)


def _prepare(config: PretrainConfig, context: Context) -> Prepared:
    """Open and check everything, and resolve the config."""
    config, origin, changes = find_pretrain_origin(config, context)
    device = detect(config.machine.device)
    blend, notices = resolve_blend(config.text.data, context.base)
    tokenizer, tokenizer_folder = _tokenizer(config, origin, context)
    going_on = origin.going_on if origin is not None else None
    if origin is not None and going_on is not None:
        changes |= _changed_text(going_on, blend)
        if not config.continuation.allow_changes:
            resume.refuse(changes, origin.folder)
    planned = _plan(config, tokenizer)
    dtype, dtype_reason = compute_dtype(device, config.machine.dtype)
    notes = [*notices, f"computing in {dtype_name(dtype)}: {dtype_reason}"]
    if config.text.packing is None:
        notes.append("packing {}: {}".format(*choose_packing(blend)))
    config = _resolve(config, planned, blend, device, dtype)
    rows, length = config.batch.device_batch_size or 1, config.model.max_seq_len
    accumulation = gradient_accumulation(planned.total_batch_size, rows, length, 1)
    num_tokens = estimate_tokens(blend, tokenizer)
    if num_tokens.exact and num_tokens.tokens <= blend.documents():
        raise UserError(f"all documents of {blend.describe()['folder']} are empty: check the column with the text")
    state = going_on.loader if going_on is not None and "data" not in changes else None
    loader = _loader(config, blend, tokenizer, state)
    validation = plan_validation(
        blend,
        tokenizer,
        batch_size=rows,
        sequence_len=length,
        eval_tokens=config.occasions.eval_tokens,
        buffer_documents=config.text.buffer_size,
        fetch_documents=config.text.tokenizer_batch_size,
    )
    return Prepared(
        config,
        origin,
        changes,
        device,
        dtype,
        blend,
        tokenizer,
        tokenizer_folder,
        planned,
        num_tokens,
        PretrainSource(loader, accumulation, _schedule(config, planned)),
        validation,
        tuple(notes),
    )


def _facts(made: Prepared) -> dict[str, Any]:
    """What a start records besides its config."""
    return {
        "plan": made.planned.to_dict(),
        "num_iterations": made.planned.num_iterations,
        "num_parameters": made.planned.params.total,
        "flops_per_token": made.planned.flops_per_token,
        "peak_flops": None,
        "device": made.device.name,
        "dtype": dtype_name(made.dtype),
        "compile": made.config.machine.compile,
        "packing": made.config.text.packing,
        "changes": made.changes,
    }


def _announce(training: TrainingRun, made: Prepared) -> None:
    """What will be trained, on what, where from, and what was chosen."""
    say, planned, config = training.log.say, made.planned, made.config
    say(
        f"base model {training.tag}: {planned.params.total:,} parameters, {planned.num_iterations:,} steps of"
        f" {planned.total_batch_size:,} tokens ({config.batch.device_batch_size} rows of {config.model.max_seq_len} ×"
        f" {made.source.accumulation}) on {made.device.name}"
    )
    for note in made.notes:
        say(note)
    for use in text_use(
        made.blend,
        made.tokenizer,
        planned.total_tokens,
        config.text.packing or "bestfit",
        config.model.max_seq_len,
        config.text.buffer_size,
    ):
        say(str(use))
    if made.origin is None:
        return
    say(f"{'resumed' if made.origin.resumed else 'begun'} from {made.origin.folder}")
    for name, text in made.changes.items():
        warning = f"{name} was changed ({text}): figures before and after do not compare"
        training.log.notice(made.origin.saved.step, f"changed {name}", warning)


def _tokenizer(config: PretrainConfig, origin: Origin | None, context: Context) -> tuple[Tokenizer, Path]:
    """The tokenizer of the run: that of the checkpoint it comes from, else the one chosen."""
    if origin is None:
        return store.open_tokenizer(config.text.tokenizer, context.base)
    named = None if origin.resumed else config.text.tokenizer
    tokenizer = tokenizer_of(origin.saved, origin.folder, context.base, named)
    assert origin.saved.tokenizer is not None
    return tokenizer, context.base / origin.saved.tokenizer.path


def _changed_text(saved: Checkpoint, blend: Blend) -> dict[str, str]:
    before = saved.data or {}
    now = blend.fingerprint()
    if before.get("fingerprint") == now:
        return {}
    return {"data": f"{before.get('name')} ({str(before.get('fingerprint'))[:8]}) → {blend.name} ({now[:8]})"}


def _plan(config: PretrainConfig, tokenizer: Tokenizer) -> Plan:
    return plan(
        plan_inputs(
            config.model,
            config.horizon,
            vocab_size=tokenizer.vocab_size,
            total_batch_size=config.batch.total_batch_size,
            weight_decay=config.rates.weight_decay,
        )
    )


def _resolve(config: PretrainConfig, planned: Plan, blend: Blend, device: Device, dtype: torch.dtype) -> PretrainConfig:
    """The config with everything planned filled in; the only form that is saved."""
    rows = rows_per_batch(config.batch.device_batch_size, planned.total_batch_size, config.model.max_seq_len)
    packing = config.text.packing or choose_packing(blend)[0]
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_kv_heads=planned.model.num_kv_heads),
        horizon=dataclasses.replace(config.horizon, num_iterations=planned.num_iterations),
        batch=dataclasses.replace(config.batch, device_batch_size=rows, total_batch_size=planned.total_batch_size),
        text=dataclasses.replace(config.text, data=blend.specs, packing=packing),
        machine=dataclasses.replace(config.machine, device=device.kind, dtype=dtype_name(dtype)),
        model_tag=config.model_tag or f"d{config.model.depth}",
    )


def _loader(
    config: PretrainConfig, blend: Blend, tokenizer: Tokenizer, state: Mapping[str, Any] | None
) -> PretrainLoader:
    return PretrainLoader(
        blend,
        "train",
        tokenizer,
        config.batch.device_batch_size or 1,
        config.model.max_seq_len,
        buffer_documents=config.text.buffer_size,
        fetch_documents=config.text.tokenizer_batch_size,
        packing=config.text.packing or "bestfit",
        state=state,
    )


def _schedule(config: PretrainConfig, planned: Plan) -> PretrainSchedule:
    return PretrainSchedule(
        num_iterations=planned.num_iterations,
        warmup_steps=config.rates.warmup_steps,
        warmdown_ratio=config.rates.warmdown_ratio,
        final_lr_frac=config.rates.final_lr_frac,
        weight_decay=planned.weight_decay,
    )


def _model(made: Prepared) -> tuple[GPT, Optimizer]:
    """Model and optimizer as the run begins or goes on."""
    config, planned, origin, dtype = made.config, made.planned, made.origin, made.dtype
    if origin is not None:
        model = build_model(origin.saved, made.device, dtype)
    else:
        model = GPT(planned.model).to(made.device.torch_device)
        model.set_compute_dtype(dtype)
        initialize(model, config.seed)
    own = config.rates
    rates = Rates(own.embedding_lr, own.unembedding_lr, own.matrix_lr, own.scalar_lr)
    rates = rates.scaled(planned.lr_scale, smear=False)
    parameters = dict(model.named_parameters())
    optimizer = Optimizer(parameters, parameter_groups(parameters, rates, model.config.model_dim), compute_dtype=dtype)
    if origin is not None and origin.saved.optimizer is not None:
        optimizer.load_state_tensors(origin.saved.optimizer, origin.saved.optimizer_step_count)
    return model, optimizer


def _hooks(made: Prepared, training: TrainingRun, trainer: Trainer, interruption: Interruption) -> list[Hook]:
    """Validate, then look for what is wrong, then sample; a failure of any is told and does not end the run."""
    occasions, log, tokenizer = made.config.occasions, training.log, made.tokenizer

    def losses(inputs: Any, targets: Any) -> torch.Tensor:
        interruption.check()
        return trainer.losses(inputs, targets)

    def measure() -> float | None:
        return made.validation.measure(losses, tokenizer).value

    def continue_text(prompt: str) -> str:
        interruption.check()
        ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
        return tokenizer.decode(list(generate(training.model, ids, max_tokens=SAMPLE_TOKENS)))

    validate = validate_hook(measure, occasions.eval_every, log, made.blend.fingerprint("val"))
    sample = sample_hook(continue_text, occasions.sample_prompts, occasions.sample_every, log)
    health = health_hook(occasions.eval_every, log)
    return [guarded("validation", validate, log), guarded("health", health, log), guarded("sampling", sample, log)]


def _result(training: TrainingRun, outcome: Outcome, device: Device) -> Result:
    state, peak = outcome.state, device.peak_memory_bytes()
    values: dict[str, Any] = {
        "model_tag": training.tag,
        "step": state.step,
        "finished": outcome.finished,
        "tokens": state.tokens,
        "val_bpb": outcome.val_bpb,
        "best_val_bpb": state.best_val_bpb,
        "smooth_loss": state.smooth_loss,
        "training_seconds": state.training_seconds,
        "tokens_per_second": state.tokens / state.training_seconds if state.training_seconds else None,
        "peak_memory_bytes": peak,
        "folder": str(training.folder),
    }
    shown = "n/a (no validation)" if outcome.val_bpb is None else f"{outcome.val_bpb:.4f} bits per byte"
    memory = "n/a" if peak is None else f"{peak / 1e9:.2f} GB"
    text = (
        f"base model {training.tag}: {state.step:,} steps, {state.tokens:,} tokens in {state.training_seconds:.0f} s;"
        f" validation {shown}; peak memory {memory}; saved in {training.folder}"
    )
    return outcome.result(values, text)
