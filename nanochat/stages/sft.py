"""``nanochat sft``: teach a base model to chat on conversations."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from nanochat import config as configs
from nanochat.context import Context, Result
from nanochat.data.conversation import render_for_completion
from nanochat.data.mixture import fingerprint
from nanochat.data.sft import SftLoader
from nanochat.evaluation.bits_per_byte import bits_per_byte
from nanochat.hardware.device import dtype_name
from nanochat.inference.generate import generate
from nanochat.inference.session import build_model
from nanochat.inference.tools import PythonTool, pieces, shown
from nanochat.model.cost import flops_per_token, parameter_counts
from nanochat.model.gpt import GPT
from nanochat.optim.groups import Rates, parameter_groups
from nanochat.optim.optimizer import Optimizer
from nanochat.stages.configs import SftConfig
from nanochat.stages.sft_preparation import Prepared, prepare
from nanochat.train.interrupt import Interruption
from nanochat.train.loop import Hook
from nanochat.train.run import TrainingRun, begin
from nanochat.train.session import Outcome, Progress, already_finished, run_to_the_end
from nanochat.train.step import MicroBatch, Trainer
from nanochat.train.watch import guarded, health_hook, sample_hook, validate_hook

SCALAR_LR = 0.5
SMEAR_LR = 0.2
#: Tokens of a sample answer at most.
SAMPLE_TOKENS = 64


def run(config: SftConfig, context: Context) -> Result:
    """Fine-tune a base model on conversations and save it, or go on with doing so.

    Raises:
        UserError: for settings, conversations or checkpoints that cannot be, before anything is written;
            or when training diverges.
    """
    made = prepare(config, context)
    origin, config = made.origin, made.config
    if origin.resumed and made.source.finished(origin.saved.step):
        return already_finished(origin.folder, origin.saved)
    model = build_model(origin.saved, made.device, made.dtype)
    assert origin.saved.tokenizer is not None
    training = begin(
        "sft",
        config.model_tag or "",
        base=context.base,
        terminal=context.terminal,
        model=model,
        optimizer=_optimizer(made, model),
        tokenizer=made.tokenizer,
        tokenizer_folder=context.base / origin.saved.tokenizer.path,
        config=configs.to_dict(config),
        data=made.data,
        parent=origin.parent,
        going_on=origin.going_on,
        facts=_facts(made, model),
    )
    _announce(training, made)
    loader = made.source.loader
    total = config.num_iterations or len(made.train_set)
    outcome = run_to_the_end(
        training,
        made.source,
        device=made.device,
        terminal=context.terminal,
        compile_mode=config.machine.compile,
        compile_cache=context.base / "compile_cache",
        going_on=origin.going_on,
        loader_state=loader.state,
        policy=config.saving.policy,
        hooks=lambda trainer, interruption: _hooks(made, training, trainer, interruption),
        progress=Progress(
            config.num_iterations,
            total,
            lambda step: step if config.num_iterations else min(total, round(loader.progress * total)),
        ),
    )
    return _result(training, outcome)


def _facts(made: Prepared, model: GPT) -> dict[str, Any]:
    """What a start records besides its config."""
    shape = model.config
    return {
        "num_iterations": made.config.num_iterations,
        "model": {
            "n_layer": shape.num_layers,
            "n_head": shape.num_heads,
            "n_kv_head": shape.num_kv_heads,
            "n_embd": shape.model_dim,
        },
        "num_parameters": parameter_counts(shape).total,
        "flops_per_token": flops_per_token(shape),
        "peak_flops": None,
        "device": made.device.name,
        "dtype": dtype_name(made.dtype),
        "compile": made.config.machine.compile,
        "packing": "whole conversations",
        "changes": made.changes,
    }


def _known(value: float | None) -> float:
    assert value is not None, "resolved configs have no gaps"
    return value


def _optimizer(made: Prepared, model: GPT) -> Optimizer:
    """The optimizer as the run begins or goes on."""
    own, saved = made.config.rates, made.origin.saved
    rates = Rates(
        embedding=_known(own.embedding_lr),
        unembedding=_known(own.unembedding_lr),
        matrix=_known(own.matrix_lr),
        scalar=SCALAR_LR,
        smear=SMEAR_LR,
    ).scaled(own.init_lr_frac, smear=True)
    parameters = dict(model.named_parameters())
    groups = parameter_groups(parameters, rates, model.config.model_dim)
    optimizer = Optimizer(parameters, groups, compute_dtype=made.dtype)
    if saved.optimizer is not None:
        optimizer.load_state_tensors(saved.optimizer, saved.optimizer_step_count)
    return optimizer


def _announce(training: TrainingRun, made: Prepared) -> None:
    origin, loader = made.origin, made.source.loader
    where = f"resumed from {origin.folder}" if origin.resumed else f"from base step {origin.saved.step}"
    batch_tokens = made.rows * made.length * made.source.accumulation
    training.log.say(
        f"chat model {training.tag} {where}: {len(made.train_set):,} conversations,"
        f" {len(made.held_out):,} held out, steps of {batch_tokens:,} tokens"
    )
    if loader.truncated or loader.dropped:
        training.log.say(
            f"{loader.truncated:,} conversations are longer than a row and end at their last whole turn that fits;"
            f" {loader.dropped:,} have none that fits and are left out"
        )


def _hooks(made: Prepared, training: TrainingRun, trainer: Trainer, interruption: Interruption) -> list[Hook]:
    """Validate, then sample; a failure of either is told and does not end the run."""
    occasions, log, tokenizer = made.config.occasions, training.log, made.tokenizer
    rows, length = made.rows, made.length
    stop_ids = frozenset({tokenizer.bos_id, tokenizer.special_id("<|assistant_end|>")})

    def validation_batches() -> Iterator[MicroBatch]:
        batches = SftLoader(made.held_out, tokenizer, rows, length)
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
    if made.held_out:
        text = fingerprint(made.held_out)
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
