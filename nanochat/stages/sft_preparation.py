"""A chat model's run before its first step: everything opened, checked and resolved."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from nanochat.context import Context
from nanochat.data.mixture import Conversation, fingerprint, load_mixture
from nanochat.data.sft import SftLoader
from nanochat.errors import UserError
from nanochat.hardware import detect
from nanochat.hardware.device import Device, compute_dtype, dtype_name
from nanochat.inference.session import setting_of, tokenizer_of
from nanochat.optim.schedule import SftSchedule
from nanochat.plan import gradient_accumulation
from nanochat.stages.configs import SftConfig
from nanochat.stages.origin import Origin, find_sft_origin
from nanochat.tokenizer.bpe import Tokenizer
from nanochat.train import resume
from nanochat.train.run import rows_per_batch
from nanochat.train.step import MicroBatch, StepRates

#: Rates of a base run that does not record its own.
FALLBACK_RATES = {"embedding_lr": 0.3, "unembedding_lr": 0.004, "matrix_lr": 0.02}


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


@dataclass(frozen=True)
class Prepared:
    """A run before it begins or goes on.

    Attributes:
        config: with everything inherited filled in.
        changes: what was asked to differ from the run that is gone on with.
        data: what is recorded of the conversations.
    """

    config: SftConfig
    origin: Origin
    changes: Mapping[str, str]
    device: Device
    dtype: torch.dtype
    tokenizer: Tokenizer
    train_set: Sequence[Conversation]
    held_out: Sequence[Conversation]
    data: Mapping[str, Any]
    source: SftSource

    @property
    def rows(self) -> int:
        return self.config.batch.device_batch_size or 1

    @property
    def length(self) -> int:
        return self.config.lessons.max_seq_len or 1


def prepare(config: SftConfig, context: Context) -> Prepared:
    """Open and check everything, and resolve the config."""
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
    return Prepared(config, origin, changes, device, dtype, tokenizer, train_set, held_out, data, source)


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
