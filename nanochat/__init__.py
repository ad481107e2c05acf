"""Train your own small ChatGPT: tokenizer, pretraining, chat training, evaluation, generation.

Importing this loads nothing heavy. ``nanochat.load(tag).chat("…")`` talks to a trained model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanochat.inference.session import Session

__version__ = "0.1.0"


def load(
    tag: str | None = None, *, source: str | None = None, step: int | None = None, device: str | None = None
) -> Session:
    """Load a model by its tag, ready to generate and chat.

    Args:
        tag: the run; when None the deepest ``d<depth>``, else the newest.
        source: ``base``, ``sft`` or ``rl``; when None the last stage that is there.
        step: saved step; the newest when None.
        device: ``cpu``, ``cuda`` or ``mps``; the best there is when None.

    Raises:
        nanochat.errors.UserError: when there is no such model, or it is damaged.
    """
    from nanochat.inference.session import open_session

    return open_session(tag, source=source, step=step, device=device)
