"""``nanochat pretrain``: a base model from text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from nanochat import config as configs
from nanochat.context import Context, Result
from nanochat.data.loader import PretrainLoader
from nanochat.data.sources import DataSet, resolve_data
from nanochat.evaluation.validation import Validation, plan_validation
from nanochat.hardware import detect
from nanochat.hardware.device import Device, compute_dtype
from nanochat.inference.generate import generate
from nanochat.model.gpt import GPT
from nanochat.model.init import initialize
from nanochat.optim.groups import Rates, parameter_groups
from nanochat.optim.optimizer import Optimizer
from nanochat.optim.schedule import PretrainSchedule
from nanochat.plan import Plan, gradient_accumulation, plan
from nanochat.stages.configs import PretrainConfig, plan_inputs
from nanochat.tokenizer import store
from nanochat.tokenizer.bpe import Tokenizer
from nanochat.train.loop import Hook, LoopState, train
from nanochat.train.run import TrainingRun, begin, rows_per_batch
from nanochat.train.step import MicroBatch, StepRates, Trainer
from nanochat.train.watch import sample_hook, save_hook, validate_hook

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


def run(config: PretrainConfig, context: Context) -> Result:
    """Train a base model and save it.

    Raises:
        UserError: for settings, data or tokenizers that cannot be; before anything is written.
    """
    say = context.terminal.say
    device = detect(config.machine.device)
    dtype, reason = compute_dtype(device)
    data_set, notice = resolve_data(config.text.data, context.base)
    if notice:
        say(notice)
    tokenizer, tokenizer_folder = store.open_tokenizer(config.text.tokenizer, context.base)
    planned = _plan(config, tokenizer)
    config = _resolve(config, planned, data_set, device)
    rows, length = config.batch.device_batch_size or 1, config.model.max_seq_len
    accumulation = gradient_accumulation(planned.total_batch_size, rows, length, 1)
    loader = PretrainLoader(
        data_set,
        "train",
        tokenizer,
        rows,
        length,
        buffer_documents=config.text.buffer_size,
        fetch_documents=config.text.tokenizer_batch_size,
    )
    validation = plan_validation(
        data_set,
        tokenizer,
        batch_size=rows,
        sequence_len=length,
        eval_tokens=config.occasions.eval_tokens,
        buffer_documents=config.text.buffer_size,
        fetch_documents=config.text.tokenizer_batch_size,
    )
    model = GPT(planned.model).to(device.torch_device)
    model.set_compute_dtype(dtype)
    initialize(model, config.seed)
    optimizer = _optimizer(config, planned, model, dtype)
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
        facts={"plan": planned.to_dict(), "device": device.name, "dtype": str(dtype).removeprefix("torch.")},
    )
    training.log.say(
        f"base model {training.tag}: {planned.params.total:,} parameters, {planned.num_iterations:,} steps of"
        f" {planned.total_batch_size:,} tokens ({rows} rows of {length} × {accumulation})"
        f" on {device.name} in {str(dtype).removeprefix('torch.')} ({reason})"
    )
    trainer = Trainer(
        model,
        optimizer,
        device.torch_device,
        compile_mode=config.machine.compile,
        obstacle=device.compile_obstacle(),
        say=training.log.say,
    )
    source = PretrainSource(loader, accumulation, _schedule(config, planned))
    measured: list[float | None] = []
    hooks = _hooks(config, training, trainer, loader, validation, tokenizer, measured)
    with context.terminal.progress("pretrain", planned.num_iterations) as progress:
        state = train(
            trainer,
            source,
            state=LoopState(),
            hooks=hooks,
            report=training.log.step_reporter(progress, planned.num_iterations),
            synchronize=device.synchronize,
        )
    return _result(training, state, measured[-1] if measured else None, device)


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


def _resolve(config: PretrainConfig, planned: Plan, data_set: DataSet, device: Device) -> PretrainConfig:
    """The config with everything planned filled in; the only form that is saved."""
    rows = rows_per_batch(config.batch.device_batch_size, planned.total_batch_size, config.model.max_seq_len)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_kv_heads=planned.model.num_kv_heads),
        horizon=dataclasses.replace(config.horizon, num_iterations=planned.num_iterations),
        batch=dataclasses.replace(config.batch, device_batch_size=rows, total_batch_size=planned.total_batch_size),
        text=dataclasses.replace(config.text, data=data_set.name),
        machine=dataclasses.replace(config.machine, device=device.kind),
        model_tag=config.model_tag or f"d{config.model.depth}",
    )


def _schedule(config: PretrainConfig, planned: Plan) -> PretrainSchedule:
    return PretrainSchedule(
        num_iterations=planned.num_iterations,
        warmup_steps=config.rates.warmup_steps,
        warmdown_ratio=config.rates.warmdown_ratio,
        final_lr_frac=config.rates.final_lr_frac,
        weight_decay=planned.weight_decay,
    )


def _optimizer(config: PretrainConfig, planned: Plan, model: GPT, dtype: torch.dtype) -> Optimizer:
    own = config.rates
    rates = Rates(own.embedding_lr, own.unembedding_lr, own.matrix_lr, own.scalar_lr)
    rates = rates.scaled(planned.lr_scale, smear=False)
    parameters = dict(model.named_parameters())
    return Optimizer(parameters, parameter_groups(parameters, rates, planned.model.model_dim), compute_dtype=dtype)


def _hooks(
    config: PretrainConfig,
    training: TrainingRun,
    trainer: Trainer,
    loader: PretrainLoader,
    validation: Validation,
    tokenizer: Tokenizer,
    measured: list[float | None],
) -> list[Hook]:
    """Save, then validate, then sample."""
    occasions = config.occasions

    def measure() -> float | None:
        measured.append(validation.measure(trainer.losses, tokenizer).value)
        return measured[-1]

    def continue_text(prompt: str) -> str:
        ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
        return tokenizer.decode(list(generate(training.model, ids, max_tokens=SAMPLE_TOKENS)))

    return [
        save_hook(lambda occasion: training.save(occasion, loader.state()), occasions.save_every),
        validate_hook(measure, occasions.eval_every, training.log),
        sample_hook(continue_text, occasions.sample_prompts, occasions.sample_every, training.log),
    ]


def _result(training: TrainingRun, state: LoopState, val_bpb: float | None, device: Device) -> Result:
    peak = device.peak_memory_bytes()
    values: dict[str, Any] = {
        "model_tag": training.tag,
        "step": state.step,
        "tokens": state.tokens,
        "val_bpb": val_bpb,
        "best_val_bpb": state.best_val_bpb,
        "smooth_loss": state.smooth_loss,
        "training_seconds": state.training_seconds,
        "tokens_per_second": state.tokens / state.training_seconds if state.training_seconds else None,
        "peak_memory_bytes": peak,
        "folder": str(training.folder),
    }
    shown = "n/a (no validation)" if val_bpb is None else f"{val_bpb:.4f} bits per byte"
    memory = "n/a" if peak is None else f"{peak / 1e9:.2f} GB"
    text = (
        f"base model {training.tag}: {state.step:,} steps, {state.tokens:,} tokens in {state.training_seconds:.0f} s;"
        f" validation {shown}; peak memory {memory}; saved in {training.folder}"
    )
    training.log.records.write("end", **values)
    return Result(values, text, outputs=(training.folder / f"step_{state.step:06d}",))
