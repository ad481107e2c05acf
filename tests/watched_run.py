"""Records of a run as the trainer writes them, made by hand: a long run on a GPU, resumed on other text."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanochat.plan import PlanInputs, plan
from nanochat.records import RECORDS_NAME

#: The published run: depth 12 on an RTX 4070, 87,000 steps of 65,536 tokens.
BATCH = 65_536
STEP_SECONDS = BATCH / 55_660
NUM_STEPS = 87_000
RESUMED_AT = 10_000
STEP = 35_729
#: 4 June 2026, 03:29 UTC.
RESUME_TIME = 1_780_543_740.0
FIRST_TIME = RESUME_TIME - 86_400.0
VALIDATIONS = {0: 3.221, 10_000: 0.935, 20_000: 1.016, 30_000: 1.002}

Record = dict[str, Any]


def write(folder: Path, records: list[Record]) -> Path:
    """Write records of a run into its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORDS_NAME).write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return folder


def start_record(time: float, step: int = 0, **changes: Any) -> Record:
    """A start of the published run; ``changes`` replace top-level entries."""
    planned = plan(
        PlanInputs(
            depth=12, target_param_data_ratio=20, window_pattern="L", total_batch_size=BATCH, num_iterations=NUM_STEPS
        )
    ).to_dict()
    record: Record = {
        "kind": "start",
        "time": time,
        "stage": "base",
        "tag": "rtx4070-d12-chinchilla",
        "pid": os.getpid(),
        "host": platform.node(),
        "config": {
            "model": {"depth": 12, "max_seq_len": 2048, "window_pattern": "L"},
            "batch": {"device_batch_size": 8, "total_batch_size": BATCH},
            "rates": {
                "embedding_lr": 0.3,
                "unembedding_lr": 0.008,
                "matrix_lr": 0.02,
                "scalar_lr": 0.5,
                "warmup_steps": 40,
                "warmdown_ratio": 0.65,
                "final_lr_frac": 0.05,
            },
            "occasions": {"eval_every": 10_000, "eval_tokens": 1_048_576},
            "text": {"data": ["climbmix"]},
        },
        "plan": planned,
        "num_iterations": NUM_STEPS,
        "step": step,
        "resumed": step > 0,
        "parent": None,
        "device": "NVIDIA GeForce RTX 4070",
        "dtype": "bfloat16",
        "compile": "on",
        "flops_per_token": planned["flops_per_token"],
        "num_parameters": planned["params"]["total"],
        "peak_flops": None,
        "data": {
            "name": "climbmix",
            "folder": "/data/climbmix",
            "fingerprint": "c11b" * 16,
            "shards": 177,
            "documents": None,
            "text_bytes": 374_000_000_000,
            "tokens": 142_600_000_000,
            "tokens_exact": False,
        },
        "packing": "bestfit",
        "tokenizer": {"fingerprint": "70ce" * 16, "vocab_size": 32_768, "path": "tokenizer"},
        "provenance": {
            "arguments": ["nanochat", "pretrain", "--depth", "12"],
            "commit": None,
            "versions": {"python": "3.11.9", "torch": "2.9.1"},
            "machine": {"system": "Linux", "host": platform.node()},
        },
    }
    return record | changes


def loss_at(step: int) -> float:
    """A falling loss with scatter, 3.16 to 3.20 at the end; the same at every call."""
    return 3.18 + 6.5 * math.exp(-step / 400) + 0.02 * math.sin(1.7 * step)


def step_record(step: int, time: float, *, seconds: float = STEP_SECONDS, **changes: Any) -> Record:
    """An update; a little slower or faster than the others, by up to half a per cent."""
    record: Record = {
        "kind": "step",
        "time": time,
        "step": step,
        "loss": loss_at(step),
        "smooth_loss": 3.18 + 6.5 * math.exp(-step / 400),
        "lr_multiplier": 1.0,
        "tokens": step * BATCH,
        "seconds": seconds * (1 + 0.005 * math.sin(step)),
        "training_seconds": step * STEP_SECONDS,
        "position": {"pq_idx": 3, "rg_idx": 96, "epoch": 1},
        "tokens_read": None,
        "tokens_lost": None,
        "memory_bytes": 10_400_000_000,
    }
    return record | changes


def validation_record(step: int, time: float, val_bpb: float | None, data: str | None = None) -> Record:
    return {"kind": "validation", "time": time, "step": step, "val_bpb": val_bpb, "tokens": step * BATCH, "data": data}


def published_run(**second_start: Any) -> Iterator[Record]:
    """The published run up to step 35,729; every 50th step, the last 200 one by one."""
    yield start_record(FIRST_TIME, data=start_record(0.0)["data"] | {"name": "fineweb-edu", "fingerprint": "f1e0" * 16})
    origin, shift = FIRST_TIME, 0
    for step in range(STEP + 1):
        now = origin + (step - shift) * STEP_SECONDS
        if step and (step % 50 == 0 or step > STEP - 200):
            yield step_record(step, now)
        if step in VALIDATIONS:
            yield validation_record(step, now, VALIDATIONS[step])
        if step and step % 10_000 == 0:
            yield {"kind": "save", "time": now, "step": step, "folder": f"step_{step:06d}", "bytes": 2_860_000_000}
        if step == RESUMED_AT:
            origin, shift = RESUME_TIME, step
            yield start_record(RESUME_TIME, step, **second_start)


def published_time() -> float:
    """When the last record of the published run was written."""
    return RESUME_TIME + (STEP - RESUMED_AT) * STEP_SECONDS


def write_published(base: Path, **second_start: Any) -> Path:
    """The published run on disk: records, and its three checkpoints."""
    folder = write(base / "base_checkpoints" / "rtx4070-d12-chinchilla", list(published_run(**second_start)))
    for step in (10_000, 20_000, 30_000):
        (folder / f"step_{step:06d}").mkdir()
        (folder / f"step_{step:06d}" / "manifest.json").write_text("{}")
    return folder
