"""``nanochat pretrain``: a base model from text, new, resumed, or begun from another run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from nanochat import checkpoint
from nanochat import config as configs
from nanochat.checkpoint import Checkpoint
from nanochat.context import Context, Result
from nanochat.data.amounts import TextUse, estimate_tokens, text_use
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
from nanochat.stages.configs import ModelShape, PretrainConfig, plan_inputs
from nanochat.tokenizer import store
from nanochat.tokenizer.bpe import Tokenizer
from nanochat.train import resume
from nanochat.train.interrupt import Interruption
from nanochat.train.loop import Hook
from nanochat.train.run import TrainingRun, begin, rows_per_batch
from nanochat.train.saving import Saver
from nanochat.train.session import Outcome, run_to_the_end
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
class Origin:
    """The checkpoint a run goes on from or begins from; without one it begins from nothing."""

    saved: Checkpoint | None = None
    folder: Path | None = None
    resumed: bool = False

    @property
    def resumed_step(self) -> int | None:
        return self.saved.step if self.saved is not None and self.resumed else None

    @property
    def parent(self) -> Mapping[str, Any] | None:
        """What the run began from: for a resumed one, what it began from when it was new."""
        if self.saved is None or self.folder is None:
            return None
        if self.resumed:
            return self.saved.parent
        return {"source": self.saved.stage, "tag": self.folder.parent.name, "step": self.saved.step}


def run(config: PretrainConfig, context: Context) -> Result:
    """Train a base model and save it.

    Raises:
        UserError: for settings, data or tokenizers that cannot be, before anything is written; or when
            training diverges.
    """
    config, origin, changes = _find_origin(config, context)
    device = detect(config.machine.device)
    blend, notices = resolve_blend(config.text.data, context.base)
    for notice in notices:
        context.terminal.say(notice)
    tokenizer, tokenizer_folder = _tokenizer(config, origin, context)
    if origin.saved is not None and origin.resumed:
        changes |= _changed_text(origin.saved, blend, tokenizer)
        if not config.continuation.allow_changes:
            resume.refuse(changes, origin.folder or Path())
    planned = _plan(config, tokenizer)
    dtype, dtype_reason = compute_dtype(device, config.machine.dtype)
    asked_packing = config.text.packing
    config = _resolve(config, planned, blend, device, dtype)
    rows, length = config.batch.device_batch_size or 1, config.model.max_seq_len
    accumulation = gradient_accumulation(planned.total_batch_size, rows, length, 1)
    present, exact = estimate_tokens(blend, tokenizer)
    if exact and present <= blend.documents():
        raise UserError(f"all documents of {blend.describe()['folder']} are empty: check the column with the text")
    loader = _loader(config, blend, tokenizer, origin, same_text="data" not in changes)
    validation = plan_validation(
        blend,
        tokenizer,
        batch_size=rows,
        sequence_len=length,
        eval_tokens=config.occasions.eval_tokens,
        buffer_documents=config.text.buffer_size,
        fetch_documents=config.text.tokenizer_batch_size,
    )
    schedule = _schedule(config, planned)
    model, optimizer = _model(config, planned, origin, device, dtype)
    training = begin(
        "base",
        config.model_tag or "",
        base=context.base,
        terminal=context.terminal,
        model=model,
        optimizer=optimizer,
        tokenizer=tokenizer,
        tokenizer_folder=tokenizer_folder,
        config=configs.to_dict(config),
        data={**blend.describe(), "tokens": present, "tokens_exact": exact},
        parent=origin.parent,
        resumed_step=origin.resumed_step,
        run_id=origin.saved.run_id if origin.saved is not None and origin.resumed else None,
        facts={
            "plan": planned.to_dict(),
            "num_iterations": planned.num_iterations,
            "num_parameters": planned.params.total,
            "flops_per_token": planned.flops_per_token,
            "peak_flops": None,
            "device": device.name,
            "dtype": dtype_name(dtype),
            "compile": config.machine.compile,
            "packing": config.text.packing,
            "changes": changes,
        },
    )
    say = training.log.say
    shown_dtype = f"{str(dtype).removeprefix('torch.')} ({dtype_reason})"
    if asked_packing is None:
        say(f"packing {config.text.packing}: {choose_packing(blend)[1]}")
    say(
        f"base model {training.tag}: {planned.params.total:,} parameters, {planned.num_iterations:,} steps of"
        f" {planned.total_batch_size:,} tokens ({rows} rows of {length} × {accumulation})"
        f" on {device.name} in {shown_dtype}"
    )
    _say_text(
        training,
        text_use(
            blend,
            tokenizer,
            planned.total_tokens,
            config.text.packing or "bestfit",
            config.model.max_seq_len,
            config.text.buffer_size,
        ),
    )
    _say_origin(training, origin, changes)
    trainer = Trainer(
        model,
        optimizer,
        device.torch_device,
        compile_mode=config.machine.compile,
        obstacle=device.compile_obstacle(),
        compile_cache=context.base / "compile_cache",
        say=say,
    )
    interruption = Interruption(say)
    saver = Saver(
        training,
        loader.state,
        config.saving.save_every,
        config.saving.keep_last,
        config.saving.recovery_minutes * 60 or None,
        saved_step=origin.resumed_step,
    )
    outcome = run_to_the_end(
        training,
        trainer,
        PretrainSource(loader, accumulation, schedule),
        saver,
        _hooks(config, training, trainer, validation, tokenizer, interruption, blend.fingerprint("val")),
        interruption,
        device=device,
        terminal=context.terminal,
        saved=origin.saved if origin.resumed else None,
        num_steps=planned.num_iterations,
        data=lambda: {
            "position": loader.position,
            "positions": loader.positions,
            "tokens_read": loader.counters.tokens,
            "tokens_lost": loader.counters.cropped_tokens,
        },
    )
    return _result(training, outcome, device)


def _find_origin(config: PretrainConfig, context: Context) -> tuple[PretrainConfig, Origin, dict[str, str]]:
    """Where the run comes from, the config with what it takes over from there, and what was asked to differ."""
    wanted, continuation = configs.to_dict(config), config.continuation
    defaults = configs.to_dict(PretrainConfig())
    tag = config.model_tag
    if tag is None and (continuation.resume != "latest" or config.model.depth != ModelShape().depth):
        tag = f"d{config.model.depth}"
    folder, notices = resume.find("base", tag, continuation.resume, context.base)
    for notice in notices:
        context.terminal.say(notice)
    if folder is not None:
        saved = checkpoint.load(folder, optimizer=True)
        resume.check_state(saved, folder)
        if asked := os.environ.get("NANOCHAT_DTYPE"):
            wanted["machine"]["dtype"] = asked
        changes = resume.differences(saved.config, wanted, defaults)
        if not continuation.allow_changes:
            resume.refuse(changes, folder)
        values = resume.merged(saved.config, wanted, defaults, take_changes=True)
        values["model_tag"] = folder.parent.name
        return configs.from_dict(PretrainConfig, values, str(folder)), Origin(saved, folder, resumed=True), changes
    if continuation.start_from is None:
        return config, Origin(), {}
    return *_fork(config, context), {}


def _fork(config: PretrainConfig, context: Context) -> tuple[PretrainConfig, Origin]:
    """Begin from another run: its shape and text, unless other text was asked for."""
    tag, _, step = (config.continuation.start_from or "").partition("@")
    if step and not step.isdigit():
        raise UserError(f"--from {config.continuation.start_from!r} names no step: write TAG or TAG@STEP")
    if config.model_tag is None or config.model_tag == tag:
        raise UserError("a run begun with --from needs a name of its own: give another --model-tag")
    folder = checkpoint.find("base", tag, int(step) if step else None, context.base, context.terminal.say)
    saved = checkpoint.load(folder, optimizer=config.continuation.keep_moments)
    if config.continuation.keep_moments and saved.optimizer is None:
        raise UserError(f"{folder} holds no moments: begin without --keep-moments")
    asked = configs.to_dict(config.model)
    default = configs.to_dict(ModelShape())
    of_parent = saved.config.get("model") or _shape_of(saved)
    if changes := resume.differences(of_parent, asked, default):
        listed = "; ".join(f"{name} {text}" for name, text in changes.items())
        raise UserError(f"a run begun from {folder} has its shape ({listed} was asked for): leave that away")
    model = configs.from_dict(ModelShape, of_parent, str(folder))
    text = config.text
    if text.data is None and (of_text := saved.config.get("text", {}).get("data")):
        text = dataclasses.replace(text, data=tuple(of_text))
    return dataclasses.replace(config, model=model, text=text), Origin(saved, folder)


def _shape_of(saved: Checkpoint) -> dict[str, Any]:
    """The shape of an imported model as settings."""
    shape = saved.model_config
    return {
        "depth": shape.num_layers,
        "aspect_ratio": shape.model_dim // shape.num_layers,
        "head_dim": shape.head_dim,
        "num_kv_heads": shape.num_kv_heads,
        "max_seq_len": shape.sequence_len,
        "window_pattern": shape.window_pattern,
    }


def _tokenizer(config: PretrainConfig, origin: Origin, context: Context) -> tuple[Tokenizer, Path]:
    """The tokenizer of the run: that of the checkpoint it comes from, else the one chosen."""
    if origin.saved is None or origin.folder is None:
        return store.open_tokenizer(config.text.tokenizer, context.base)
    named = None if origin.resumed else config.text.tokenizer
    tokenizer = tokenizer_of(origin.saved, origin.folder, context.base, named)
    assert origin.saved.tokenizer is not None
    return tokenizer, context.base / origin.saved.tokenizer.path


def _changed_text(saved: Checkpoint, blend: Blend, tokenizer: Tokenizer) -> dict[str, str]:
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
    config: PretrainConfig, blend: Blend, tokenizer: Tokenizer, origin: Origin, *, same_text: bool
) -> PretrainLoader:
    """The training rows; of a resumed run from where they stood, unless the text is another one."""
    state = origin.saved.loader if origin.saved is not None and origin.resumed and same_text else None
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


def _model(
    config: PretrainConfig, planned: Plan, origin: Origin, device: Device, dtype: torch.dtype
) -> tuple[GPT, Optimizer]:
    """Model and optimizer as the run begins or goes on."""
    if origin.saved is not None:
        model = build_model(origin.saved, device, dtype)
    else:
        model = GPT(planned.model).to(device.torch_device)
        model.set_compute_dtype(dtype)
        initialize(model, config.seed)
    own = config.rates
    rates = Rates(own.embedding_lr, own.unembedding_lr, own.matrix_lr, own.scalar_lr)
    rates = rates.scaled(planned.lr_scale, smear=False)
    parameters = dict(model.named_parameters())
    optimizer = Optimizer(parameters, parameter_groups(parameters, rates, model.config.model_dim), compute_dtype=dtype)
    if origin.saved is not None and origin.saved.optimizer is not None:
        optimizer.load_state_tensors(origin.saved.optimizer, origin.saved.optimizer_step_count)
    return model, optimizer


def _say_text(training: TrainingRun, uses: Sequence[TextUse]) -> None:
    """How much of each text the run will use."""
    for use in uses:
        training.log.say(str(use))


def _say_origin(training: TrainingRun, origin: Origin, changes: Mapping[str, str]) -> None:
    if origin.resumed_step is not None:
        training.log.say(f"resumed from {origin.folder}")
        for name, text in changes.items():
            training.log.notice(
                origin.resumed_step,
                f"changed {name}",
                f"{name} was changed ({text}): figures before and after do not compare",
            )
    elif origin.parent is not None:
        training.log.say(f"begun from {origin.folder}")


def _hooks(
    config: PretrainConfig,
    training: TrainingRun,
    trainer: Trainer,
    validation: Validation,
    tokenizer: Tokenizer,
    interruption: Interruption,
    val_fingerprint: str,
) -> list[Hook]:
    """Validate, then sample; a failure of either is told and does not end the run."""
    occasions, log = config.occasions, training.log

    def losses(inputs: Any, targets: Any) -> torch.Tensor:
        interruption.check()
        return trainer.losses(inputs, targets)

    def measure() -> float | None:
        return validation.measure(losses, tokenizer).value

    def continue_text(prompt: str) -> str:
        interruption.check()
        ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
        return tokenizer.decode(list(generate(training.model, ids, max_tokens=SAMPLE_TOKENS)))

    validate = validate_hook(measure, occasions.eval_every, log, val_fingerprint)
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
