"""What a run was started with, in words: the model's shape and the settings of its training."""

from __future__ import annotations

from typing import Any

from nanochat.watching.events import Start
from nanochat.watching.words import count


def describe_model(start: Start) -> str:
    """Parameters, shape and FLOPs of a token."""
    parameters = start.number("num_parameters") or start.number("plan", "params", "total")
    shape = start.get("plan", "model") or start.get("model")
    parts = [f"{parameters:,.0f} parameters" if parameters else "parameters n/a (not recorded)"]
    if isinstance(shape, dict):
        parts += _shape(shape)
    vocabulary, length = start.number("tokenizer", "vocab_size"), start.sequence_len
    parts += [f"vocabulary {vocabulary:,.0f}"] if vocabulary else []
    parts += [f"T {length:,.0f}"] if length else []
    token_flops = start.number("flops_per_token") or start.number("plan", "flops_per_token")
    parts += [f"{count(token_flops)} FLOPs a token"] if token_flops else []
    return ", ".join(parts)


def _shape(shape: dict[str, Any]) -> list[str]:
    """Layers, heads and widths, from a plan's names."""
    parts = []
    for name, label in (("n_layer", "layers"), ("n_head", "heads"), ("n_kv_head", "key-value heads")):
        if isinstance(shape.get(name), int):
            parts.append(f"{shape[name]:,} {label}")
    width, heads = shape.get("n_embd"), shape.get("n_head")
    if isinstance(width, int):
        parts.append(f"dim {width:,}")
        if isinstance(heads, int) and heads:
            parts.append(f"head dim {width // heads:,}")
    return parts


def describe_settings(start: Start) -> dict[str, str]:
    """The settings people ask for, by label."""
    return {
        "batch": _batch(start),
        "horizon": _horizon(start),
        "rates": _rates(start),
        "schedule": _schedule(start),
        "computing": _computing(start),
    }


def _batch(start: Start) -> str:
    total, length = start.total_batch_size, start.sequence_len
    rows = start.setting("device_batch_size")
    if total is None:
        return "n/a (not recorded)"
    text = f"{total:,.0f} tokens a step"
    if rows and length:
        text += f" = {rows:,.0f} rows x {length:,.0f} x {total / (rows * length):,.0f} micro-batches"
    return text


def _horizon(start: Start) -> str:
    total, steps = start.total_batch_size, start.num_iterations
    if total is None or steps is None:
        return "n/a (the run ends with its conversations)" if start.get("stage") == "sft" else "n/a (not recorded)"
    tokens = total * steps
    text = f"{count(tokens)} tokens in {steps:,} steps"
    scaling, parameters = start.number("plan", "scaling_params"), start.number("plan", "params", "total")
    if scaling and parameters:
        text += f"; ratio {tokens / scaling:.3g} by scaling parameters, {tokens / parameters:.3g} by all parameters"
    return text


def _rates(start: Start) -> str:
    kinds = {name: start.setting(f"{name}_lr") for name in ("matrix", "embedding", "unembedding", "scalar")}
    text = ", ".join(f"{name} {rate:g}" for name, rate in kinds.items() if rate is not None)
    if not text:
        return "n/a (not recorded)"
    first, factor, decay = (
        start.setting("init_lr_frac"),
        start.number("plan", "lr_scale"),
        start.number("plan", "weight_decay"),
    )
    text += f", times {first:g}" if first is not None else ""
    text += f", times {factor:.4f} for the batch" if factor is not None else ""
    return text + (f"; weight decay {decay:.4f}" if decay is not None else "")


def _schedule(start: Start) -> str:
    steps, rising, falling, last = (
        start.setting(name) for name in ("warmup_steps", "warmup_ratio", "warmdown_ratio", "final_lr_frac")
    )
    parts = [f"warm-up {steps:,.0f} steps"] if steps is not None else []
    parts += [f"warm-up {rising:.0%}"] if rising is not None else []
    parts += [f"warm-down {falling:.0%}"] if falling is not None else []
    parts += [f"down to {last:.0%}"] if last is not None else []
    return ", ".join(parts) or "n/a (not recorded)"


def _computing(start: Start) -> str:
    parts = [str(start.get(name)) for name in ("device", "dtype") if start.get(name)]
    compiled, attention = start.get("compile"), start.get("attention")
    parts += [f"compile {compiled}"] if compiled else []
    parts += [f"attention {attention}"] if attention else []
    return ", ".join(parts) or "n/a (not recorded)"
