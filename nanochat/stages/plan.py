"""``nanochat plan``: every number that follows from the depth. Loads no torch."""

from __future__ import annotations

from nanochat.context import Context, Result
from nanochat.plan import Plan, plan
from nanochat.stages.configs import PlanConfig
from nanochat.stages.settings import plan_inputs


def run(config: PlanConfig, context: Context) -> Result:
    """Plan; raises :class:`nanochat.errors.UserError` for settings that cannot be."""
    inputs = plan_inputs(
        config.model,
        config.horizon,
        vocab_size=config.vocab_size,
        total_batch_size=config.total_batch_size,
        weight_decay=config.weight_decay,
    )
    planned = plan(inputs)
    return Result(planned.to_dict(), describe(planned))


def describe(planned: Plan) -> str:
    """The plan as lines of name, number and reason."""
    values = planned.to_dict()
    model, params = values.pop("model"), values.pop("params")
    windows = model.pop("window_sizes")
    lines = [
        "model        " + ", ".join(f"{name} {value:,}" for name, value in model.items()),
        f"windows      {' '.join(map(str, windows))}",
        "parameters   " + ", ".join(f"{name} {value:,}" for name, value in params.items()),
    ]
    for name, value in values.items():
        number = f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
        lines.append(f"{name:<20} {number:>26}  {planned.reasons.get(name, '')}".rstrip())
    return "\n".join(lines)
