"""``nanochat sft``: teach a base model to chat on conversations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from nanochat import config as configs
from nanochat.context import Context, Result
from nanochat.data.conversation import render_for_completion
from nanochat.data.mixture import Conversation, fingerprint, load_mixture
from nanochat.data.sft import SftLoader
from nanochat.errors import UserError
from nanochat.evaluation.bits_per_byte import bits_per_byte
from nanochat.hardware import detect
from nanochat.hardware.device import Device, compute_dtype, dtype_name
from nanochat.inference.generate import generate
from nanochat.inference.session import build_model, setting_of, tokenizer_of
from nanochat.inference.tools import PythonTool, pieces, shown
from nanochat.model.cost import flops_per_token, parameter_counts
from nanochat.model.gpt import GPT
from nanochat.optim.groups import Rates, parameter_groups
from nanochat.optim.optimizer import Optimizer
from nanochat.optim.schedule import SftSchedule
from nanochat.plan import gradient_accumulation
from nanochat.stages.configs import SftConfig
from nanochat.stages.origin import Origin, find_sft_origin
from nanochat.tokenizer.bpe import Tokenizer
from nanochat.train import resume
from nanochat.train.interrupt import Interruption
from nanochat.train.loop import Hook
from nanochat.train.run import TrainingRun, begin, rows_per_batch
from nanochat.train.session import Outcome, Progress, already_finished, run_to_the_end
from nanochat.train.step import MicroBatch, StepRates, Trainer
from nanochat.train.watch import guarded, health_hook, sample_hook, validate_hook

#: Rates of a base run that does not record its own.
FALLBACK_RATES = {"embedding_lr": 0.3, "unembedding_lr": 0.004, "matrix_lr": 0.02}
SCALAR_LR = 0.5
SMEAR_LR = 0.2
#: Tokens of a sample answer at most.
SAMPLE_TOKENS = 64


@dataclass
class SftSource:
    """Each step's micro-batches of packed conversations, and its schedule.

    The schedule follows the progress: the share of the steps, when their number was chosen, else
    the share of the conversations that lie in the rows of earlier steps.
    """

    loader: SftLoader
    accumulation: int
    schedule: SftSchedule
    num_iterations: int | None

    def finished(self, step: int) -> bool:
        return step >= self.num_iterations if self.num_iterations is not None else self.loader.progress >= 1.0

    def rates(self, step: int) -> StepRates:
        progress = step / self.num_iterations if self.num_iterations is not None else self.loader.progress
        schedule = self.schedule
        return StepRates(schedule.lr_multiplier(progress), schedule.muon_momentum(step), 0.0)

    def next_step(self) -> Sequence[MicroBatch]:
        return list(islice(self.loader, self.accumulation))

    def where(self) -> str:
        return f"{self.loader.progress:.2%} of the conversations"


def run(config: SftConfig, context: Context) -> Result:
    """Fine-tune a base model on conversations and save it, or go on with doing so.

    Raises:
        UserError: for settings, conversations or checkpoints that cannot be, before anything is written;
            or when training diverges.
    """
    config, origin, changes = find_sft_origin(config, context)
    device = detect(config.machine.device)
    dtype, _ = compute_dtype(device, config.machine.dtype)
    tokenizer = tokenizer_of(origin.saved, origin.folder, context.base)
    if not origin.resumed:
        config = _resolve(config, origin, device, dtype)
    rows, length = config.batch.device_batch_size or 1, config.lessons.max_seq_len or 1
    accumulation = gradient_accumulation(config.batch.total_batch_size or 1, rows, length, 1)
    train_set, held_out = load_mixture(config.lessons.conversations, config.lessons.name)
    data = {
        "name": " + ".join(config.lessons.conversations),
        "fingerprint": fingerprint(train_set),
        "documents": len(train_set),
    }
    before = origin.saved.data or {}
    same_data = not origin.resumed or before.get("fingerprint") == data["fingerprint"]
    if not same_data:
        changes["conversations"] = f"{before.get('name')} → {data['name']}, or their content"
        if not config.continuation.allow_changes:
            resume.refuse(changes, origin.folder)
    schedule = SftSchedule(config.rates.warmup_ratio, config.rates.warmdown_ratio, config.rates.final_lr_frac)
    state = origin.saved.loader if origin.resumed and same_data else None
    loader = SftLoader(train_set, tokenizer, rows, length, state=state)
    source = SftSource(loader, accumulation, schedule, config.num_iterations)
    if origin.resumed and source.finished(origin.saved.step):
        return already_finished(origin.folder, origin.saved)
    model = build_model(origin.saved, device, dtype)
    optimizer = _optimizer(config, model, dtype)
    if origin.saved.optimizer is not None:
        optimizer.load_state_tensors(origin.saved.optimizer, origin.saved.optimizer_step_count)
    assert origin.saved.tokenizer is not None
    training = begin(
        "sft",
        config.model_tag or "",
        base=context.base,
        terminal=context.terminal,
        model=model,
        optimizer=optimizer,
        tokenizer=tokenizer,
        tokenizer_folder=context.base / origin.saved.tokenizer.path,
        config=configs.to_dict(config),
        data=data,
        parent=origin.parent,
        going_on=origin.going_on,
        facts={
            "num_iterations": config.num_iterations,
            "model": {
                "n_layer": model.config.num_layers,
                "n_head": model.config.num_heads,
                "n_kv_head": model.config.num_kv_heads,
                "n_embd": model.config.model_dim,
            },
            "num_parameters": parameter_counts(model.config).total,
            "flops_per_token": flops_per_token(model.config),
            "peak_flops": None,
            "device": device.name,
            "dtype": dtype_name(dtype),
            "compile": config.machine.compile,
            "packing": "whole conversations",
            "changes": changes,
        },
    )
    _announce(training, loader, train_set, held_out, rows * length * accumulation, origin)
    total = config.num_iterations or len(train_set)
    outcome = run_to_the_end(
        training,
        source,
        device=device,
        terminal=context.terminal,
        compile_mode=config.machine.compile,
        compile_cache=context.base / "compile_cache",
        going_on=origin.going_on,
        loader_state=loader.state,
        policy=config.saving.policy,
        hooks=lambda trainer, interruption: _hooks(config, training, trainer, held_out, tokenizer, interruption),
        progress=Progress(
            config.num_iterations,
            total,
            lambda step: step if config.num_iterations else min(total, round(loader.progress * total)),
        ),
    )
    return _result(training, outcome)


def _resolve(config: SftConfig, origin: Origin, device: Device, dtype: torch.dtype) -> SftConfig:
    """The config with everything inherited from the base run filled in."""
    saved, parent = origin.saved, origin.folder
    trained_len = saved.model_config.sequence_len
    length = config.lessons.max_seq_len or trained_len
    if length > saved.model_config.max_text_len:
        raise UserError(
            f"rows of {length} tokens are longer than the model allows ({saved.model_config.max_text_len}):"
            " lower --max-seq-len"
        )
    rows = config.batch.device_batch_size or setting_of(saved, "device_batch_size")
    total = config.batch.total_batch_size or setting_of(saved, "total_batch_size") or (rows or 8) * length
    rates = {
        name: getattr(config.rates, name) or setting_of(saved, name) or FALLBACK_RATES[name] for name in FALLBACK_RATES
    }
    if config.num_iterations is not None and config.num_iterations < 1:
        config = dataclasses.replace(config, num_iterations=None)
    return dataclasses.replace(
        config,
        rates=dataclasses.replace(config.rates, **rates),
        batch=dataclasses.replace(
            config.batch, device_batch_size=rows_per_batch(rows, total, length), total_batch_size=total
        ),
        machine=dataclasses.replace(config.machine, device=device.kind, dtype=dtype_name(dtype)),
        model_tag=parent.parent.name,
        model_step=saved.step,
        lessons=dataclasses.replace(config.lessons, max_seq_len=length),
    )


def _known(value: float | None) -> float:
    assert value is not None, "resolved configs have no gaps"
    return value


def _optimizer(config: SftConfig, model: GPT, dtype: torch.dtype) -> Optimizer:
    own = config.rates
    rates = Rates(
        embedding=_known(own.embedding_lr),
        unembedding=_known(own.unembedding_lr),
        matrix=_known(own.matrix_lr),
        scalar=SCALAR_LR,
        smear=SMEAR_LR,
    ).scaled(own.init_lr_frac, smear=True)
    parameters = dict(model.named_parameters())
    return Optimizer(parameters, parameter_groups(parameters, rates, model.config.model_dim), compute_dtype=dtype)


def _announce(
    training: TrainingRun,
    loader: SftLoader,
    train_set: Sequence[Conversation],
    held_out: Sequence[Conversation],
    batch_tokens: int,
    origin: Origin,
) -> None:
    where = f"resumed from {origin.folder}" if origin.resumed else f"from base step {origin.saved.step}"
    training.log.say(
        f"chat model {training.tag} {where}: {len(train_set):,} conversations,"
        f" {len(held_out):,} held out, steps of {batch_tokens:,} tokens"
    )
    if loader.truncated or loader.dropped:
        training.log.say(
            f"{loader.truncated:,} conversations are longer than a row and end at their last whole turn that fits;"
            f" {loader.dropped:,} have none that fits and are left out"
        )


def _hooks(
    config: SftConfig,
    training: TrainingRun,
    trainer: Trainer,
    held_out: Sequence[Conversation],
    tokenizer: Tokenizer,
    interruption: Interruption,
) -> list[Hook]:
    """Validate, then sample; a failure of either is told and does not end the run."""
    occasions, log = config.occasions, training.log
    rows, length = config.batch.device_batch_size or 1, config.lessons.max_seq_len or 1
    stop_ids = frozenset({tokenizer.bos_id, tokenizer.special_id("<|assistant_end|>")})

    def validation_batches() -> Iterator[MicroBatch]:
        batches = SftLoader(held_out, tokenizer, rows, length)
        for batch in islice(batches, max(1, occasions.eval_tokens // (rows * length))):
            interruption.check()
            yield batch
            if batches.progress >= 1.0:
                return

    def measure() -> float | None:
        return bits_per_byte(trainer.losses, validation_batches(), tokenizer.token_bytes).value

    def answer(prompt: str) -> str:
        interruption.check()
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": ""}]
        ids = render_for_completion({"messages": messages}, tokenizer)
        tool = PythonTool(tokenizer)
        tokens = generate(training.model, ids, max_tokens=SAMPLE_TOKENS, stop_ids=stop_ids, tool=tool)
        return "".join(shown(pieces(tokenizer, tokens)))

    hooks: list[Hook] = []
    if held_out:
        text = fingerprint(held_out)
        hooks.append(guarded("validation", validate_hook(measure, occasions.eval_every, log, text), log))
    sample = sample_hook(answer, occasions.sample_prompts, occasions.sample_every or None, log)
    health = health_hook(occasions.eval_every, log)
    return [*hooks, guarded("health", health, log), guarded("sampling", sample, log)]


def _result(training: TrainingRun, outcome: Outcome) -> Result:
    state = outcome.state
    values: dict[str, Any] = {
        "model_tag": training.tag,
        "step": state.step,
        "finished": outcome.finished,
        "tokens": state.tokens,
        "val_bpb": outcome.val_bpb,
        "best_val_bpb": state.best_val_bpb,
        "smooth_loss": state.smooth_loss,
        "training_seconds": state.training_seconds,
        "folder": str(training.folder),
    }
    best = "n/a" if state.best_val_bpb is None else f"{state.best_val_bpb:.4f} bits per byte of the answers"
    text = (
        f"chat model {training.tag}: {state.step:,} steps in {state.training_seconds:.0f} s;"
        f" best validation {best}; saved in {training.folder}"
    )
    return outcome.result(values, text)
