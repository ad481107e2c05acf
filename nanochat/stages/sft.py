"""``nanochat sft``: teach a base model to chat on conversations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from nanochat import checkpoint
from nanochat import config as configs
from nanochat.checkpoint import Checkpoint
from nanochat.context import Context, Result
from nanochat.data.conversation import render_for_completion
from nanochat.data.mixture import Conversation, load_mixture
from nanochat.data.sft import SftLoader
from nanochat.errors import UserError
from nanochat.evaluation.bits_per_byte import bits_per_byte
from nanochat.hardware import detect
from nanochat.hardware.device import Device, compute_dtype
from nanochat.inference.generate import generate
from nanochat.inference.session import build_model, setting_of, tokenizer_of
from nanochat.model.gpt import GPT
from nanochat.optim.groups import Rates, parameter_groups
from nanochat.optim.optimizer import Optimizer
from nanochat.optim.schedule import SftSchedule
from nanochat.plan import gradient_accumulation
from nanochat.stages.configs import SftConfig
from nanochat.tokenizer.bpe import Tokenizer
from nanochat.train.loop import Hook, LoopState, train
from nanochat.train.run import TrainingRun, begin, rows_per_batch
from nanochat.train.step import MicroBatch, StepRates, Trainer
from nanochat.train.watch import sample_hook, save_hook, validate_hook

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


def run(config: SftConfig, context: Context) -> Result:
    """Fine-tune a base model on conversations and save it.

    Raises:
        UserError: for settings, conversations or checkpoints that cannot be; before anything is written.
    """
    device = detect(config.machine.device)
    dtype, _ = compute_dtype(device)
    parent = checkpoint.find("base", config.model_tag, config.model_step, context.base, context.terminal.say)
    saved = checkpoint.load(parent, optimizer=bool(config.load_optimizer))
    tokenizer = tokenizer_of(saved, parent, context.base)
    config = _resolve(config, saved, parent, device)
    rows, length = config.batch.device_batch_size or 1, config.max_seq_len or 1
    accumulation = gradient_accumulation(config.batch.total_batch_size or 1, rows, length, 1)
    train_set, held_out = load_mixture(config.conversations, config.name)
    loader = SftLoader(train_set, tokenizer, rows, length)
    model = build_model(saved, device)
    optimizer = _optimizer(config, model, dtype)
    if saved.optimizer is not None:
        optimizer.load_state_tensors(saved.optimizer, saved.optimizer_step_count)
    assert saved.tokenizer is not None
    training = begin(
        "sft",
        config.model_tag or "",
        base=context.base,
        terminal=context.terminal,
        model=model,
        optimizer=optimizer,
        tokenizer=tokenizer,
        tokenizer_folder=context.base / saved.tokenizer.path,
        config=configs.to_dict(config),
        facts={"parent": str(parent), "device": device.name, "dtype": str(dtype).removeprefix("torch.")},
    )
    _announce(training, loader, train_set, held_out, rows * length * accumulation, saved)
    trainer = Trainer(
        model,
        optimizer,
        device.torch_device,
        compile_mode=config.machine.compile,
        obstacle=device.compile_obstacle(),
        say=training.log.say,
    )
    schedule = SftSchedule(config.rates.warmup_ratio, config.rates.warmdown_ratio, config.rates.final_lr_frac)
    source = SftSource(loader, accumulation, schedule, config.num_iterations)
    hooks = _hooks(config, training, trainer, loader, held_out, tokenizer)
    total = config.num_iterations or len(train_set)
    with context.terminal.progress("sft", total) as progress:
        state = train(
            trainer,
            source,
            state=LoopState(),
            hooks=hooks,
            report=training.log.step_reporter(
                progress,
                config.num_iterations,
                done=lambda step: step if config.num_iterations else min(total, round(loader.progress * total)),
            ),
            synchronize=device.synchronize,
        )
    return _result(training, state)


def _resolve(config: SftConfig, saved: Checkpoint, parent: Path, device: Device) -> SftConfig:
    """The config with everything inherited from the base run filled in."""
    trained_len = saved.model_config.sequence_len
    length = config.max_seq_len or trained_len
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
        machine=dataclasses.replace(config.machine, device=device.kind),
        model_tag=parent.parent.name,
        model_step=saved.step,
        max_seq_len=length,
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
    saved: Checkpoint,
) -> None:
    training.log.say(
        f"chat model {training.tag} from base step {saved.step}: {len(train_set):,} conversations,"
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
    loader: SftLoader,
    held_out: Sequence[Conversation],
    tokenizer: Tokenizer,
) -> list[Hook]:
    """Save, then validate, then sample."""
    occasions = config.occasions
    rows, length = config.batch.device_batch_size or 1, config.max_seq_len or 1
    stop_ids = frozenset({tokenizer.bos_id, tokenizer.special_id("<|assistant_end|>")})

    def validation_batches() -> Iterator[MicroBatch]:
        batches = SftLoader(held_out, tokenizer, rows, length)
        for batch in islice(batches, max(1, occasions.eval_tokens // (rows * length))):
            yield batch
            if batches.progress >= 1.0:
                return

    def measure() -> float | None:
        return bits_per_byte(trainer.losses, validation_batches(), tokenizer.token_bytes).value

    def answer(prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": ""}]
        ids = render_for_completion({"messages": messages}, tokenizer)
        return tokenizer.decode(list(generate(training.model, ids, max_tokens=SAMPLE_TOKENS, stop_ids=stop_ids)))

    hooks = [save_hook(lambda occasion: training.save(occasion, loader.state()), occasions.save_every)]
    if held_out:
        hooks.append(validate_hook(measure, occasions.eval_every, training.log))
    sample_every = occasions.sample_every or None
    return [*hooks, sample_hook(answer, occasions.sample_prompts, sample_every, training.log)]


def _result(training: TrainingRun, state: LoopState) -> Result:
    values: dict[str, Any] = {
        "model_tag": training.tag,
        "step": state.step,
        "tokens": state.tokens,
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
    training.log.records.write("end", **values)
    return Result(values, text, outputs=(training.folder / f"step_{state.step:06d}",))
