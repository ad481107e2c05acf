"""``nanochat evaluate``: measure a model."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from nanochat.context import Context, Result
from nanochat.data.sources import resolve_data
from nanochat.errors import UserError
from nanochat.evaluation.validation import plan_validation
from nanochat.inference.session import open_session, setting_of
from nanochat.stages.configs import EvaluateConfig
from nanochat.train.step import to_device


def run(config: EvaluateConfig, context: Context) -> Result:
    """Measure what was asked for."""
    if not config.bpb:
        raise UserError("nothing to measure: ask for bits per byte with --bpb")
    session = open_session(
        config.model_tag,
        source=config.source,
        step=config.step,
        device=config.device,
        tokenizer=config.text.tokenizer,
        base=context.base,
    )
    data_set, notice = resolve_data(config.text.data or setting_of(session.saved, "data"), context.base)
    if notice:
        context.terminal.say(notice)
    validation = plan_validation(
        data_set,
        session.tokenizer,
        batch_size=config.device_batch_size or setting_of(session.saved, "device_batch_size") or 32,
        sequence_len=config.max_seq_len or session.model.config.sequence_len,
        eval_tokens=config.eval_tokens,
        buffer_documents=config.text.buffer_size,
        fetch_documents=config.text.tokenizer_batch_size,
    )
    place = session.device.torch_device
    done = 0

    with context.terminal.progress("validating", validation.num_batches) as progress, torch.inference_mode():

        def losses(inputs: NDArray[np.int64], targets: NDArray[np.int64]) -> torch.Tensor:
            nonlocal done
            done += 1
            progress.update(done)
            return session.model.losses(to_device(inputs, place), to_device(targets, place))

        measured = validation.measure(losses, session.tokenizer)

    run_name = session.folder.parent.name
    values = {
        "val_bpb": measured.value,
        "tokens": measured.num_tokens,
        "bytes": measured.num_bytes,
        "source": session.source,
        "model_tag": run_name,
        "step": session.saved.step,
        "data": data_set.name,
        "dtype": str(session.model.compute_dtype).removeprefix("torch."),
    }
    shown = "n/a (no target stands for a byte)" if measured.value is None else f"{measured.value:.6f}"
    text = (
        f"{session.source} {run_name} step {session.saved.step}: {shown} bits per byte"
        f" on {measured.num_tokens:,} tokens, {measured.num_bytes:,} bytes of {data_set.name}"
    )
    return Result(values, text)
