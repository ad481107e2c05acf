"""``nanochat generate``: continue a text, or answer one message."""

from __future__ import annotations

from nanochat.context import Context, Result
from nanochat.inference.session import open_session
from nanochat.stages.configs import GenerateConfig


def run(config: GenerateConfig, context: Context) -> Result:
    """Generate once; ``ids`` of the result hold prompt and answer."""
    session = open_session(
        config.model_tag,
        source=config.source,
        step=config.step,
        device=config.device,
        tokenizer=config.tokenizer,
        base=context.base,
    )
    sampling = config.sampling
    made = session.generate(
        config.prompt,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
    )
    shown = config.prompt + made.text if session.source == "base" else made.text
    return Result({"text": made.text, "ids": made.ids, "content": made.content}, shown)
