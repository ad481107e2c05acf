"""A run's status for programs: what ``nanochat status --json`` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nanochat.watching import health
from nanochat.watching.figures import State, measure_pace, non_finite_steps, remaining, saved_steps, utilization
from nanochat.watching.history import RunHistory
from nanochat.watching.text_use import passes_begun, text_use


def values_without_start(history: RunHistory, stands: State) -> dict[str, Any]:
    """The status of a run without records: what lies there."""
    return {
        "tag": history.tag,
        "source": history.source,
        "folder": str(history.folder),
        "state": stands.name,
        "state_text": stands.text,
        "checkpoints": saved_steps(history),
    }


def values_of(history: RunHistory, stands: State, now: float) -> dict[str, Any]:
    """The status for programs: numbers in plain units, None for what is not known."""
    start, last, left, pace = history.start, history.last_step, remaining(history), measure_pace(history)
    assert start is not None
    use, mfu, until = text_use(history), utilization(history), now if stands.name == "running" else history.last_time
    values: dict[str, Any] = {
        **values_without_start(history, stands),
        "step": history.step,
        "num_iterations": start.num_iterations,
        "started": history.starts[0].time,
        "started_latest": start.time,
        "resumed_from": start.step if start.resumed else None,
        "wall_seconds": max(0.0, (until or now) - start.time),
        "training_seconds": last.training_seconds if last else 0.0,
        "remaining": vars(left) if left else None,
        "config": start.get("config"),
        "plan": start.get("plan"),
        "device": start.get("device"),
        "dtype": start.get("dtype"),
        "data": start.get("data"),
        "tokens_trained": use.trained,
        "tokens_planned": use.planned,
        "tokens_read": use.read,
        "tokens_lost": use.lost,
        "text_passes": use.passes,
        "text_passes_planned": use.planned_passes,
        "epoch": passes_begun(history),
        "position": last.position if last else None,
        "loss_nats_per_token": last.loss if last else None,
        "smooth_loss_nats_per_token": last.smooth_loss if last else None,
        "lr_multiplier": last.lr_multiplier if last else None,
        "validation": [
            {"step": v.step, "val_bpb": v.val_bpb, "text": v.segment, "fingerprint": v.data}
            for v in history.validations
        ],
        "tokens_per_second": pace.tokens_per_second if pace else None,
        "step_seconds": pace.step_seconds if pace else None,
        "step_seconds_spread": pace.spread if pace else None,
        "flops_per_second": mfu.flops_per_second,
        "peak_flops": start.number("peak_flops"),
        "mfu": mfu.share,
        "memory_bytes": last.memory_bytes if last else None,
        "non_finite_steps": non_finite_steps(history),
        "notices": [vars(notice) for notice in health.notices(history)],
    }
    plain: dict[str, Any] = _plain(values)
    return plain


def _plain(value: Any) -> Any:
    """For JSON, which knows no number that is not finite."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
