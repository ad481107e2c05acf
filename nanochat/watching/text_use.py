"""How much of its text a run has read and will, and in which pass over it it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nanochat.watching.events import Step, number
from nanochat.watching.history import RunHistory

#: How far the number of tokens of a text may be off where it was estimated.
ESTIMATE_SHARE = 0.05


@dataclass(frozen=True)
class TextUse:
    """How much a run was trained, and how much of its present text it has read and will."""

    #: Tokens of the training text; None when unknown.
    available: float | None
    #: Tokens trained on so far, on whatever text, and at the end.
    trained: float | None
    planned: float | None
    #: Tokens taken from the present text so far, and those of them that packing threw away.
    read: float | None
    lost: float | None
    #: Tokens trained on before the text was changed to the present one.
    trained_before: float = 0.0

    @property
    def lost_share(self) -> float | None:
        return _ratio(self.lost, self.read)

    @property
    def passes(self) -> float | None:
        """How often the present text was read: reading counts where it was recorded, else training."""
        trained = None if self.trained is None else self.trained - self.trained_before
        return _ratio(self.read if self.read is not None else trained, self.available)

    @property
    def planned_passes(self) -> float | None:
        """How often it will have been read at the end, with packing losing what it lost so far."""
        if self.planned is None or self.trained is None:
            return None
        planned, trained = self.planned - self.trained_before, self.trained - self.trained_before
        overhead = self.read / trained if self.read and trained else 1.0
        return _ratio(planned * max(1.0, overhead), self.available)


def text_use(history: RunHistory) -> TextUse:
    """See :class:`TextUse`; what was read before the text changed does not count for the present one."""
    start, last = history.start, history.last_step
    available = start.number("data", "tokens") if start else None
    batch, total = (start.total_batch_size, start.num_iterations) if start else (None, None)
    planned = batch * total if batch is not None and total is not None else None
    if start is None or last is None:
        return TextUse(available, 0.0 if start else None, planned, None, None)
    before, first = _change_of_text(history)
    read, lost = last.tokens_read, last.tokens_lost
    earlier, later = (before.tokens_read, first.tokens_read) if before and first else (None, None)
    if read is not None and earlier is not None and later is not None and later >= earlier:  # counting went on
        read -= earlier
        lost = None if lost is None or before is None else lost - (before.tokens_lost or 0.0)
    return TextUse(available, last.tokens, planned, read, lost, before.tokens or 0.0 if before else 0.0)


def _change_of_text(history: RunHistory) -> tuple[Step | None, Step | None]:
    """The last step on another text and the first on the present one; None for both when there was but one."""
    present = history.starts[-1].segment
    if present == history.starts[0].segment:
        return None, None
    for before, first in zip(reversed(history.steps[:-1]), reversed(history.steps), strict=False):
        if history.starts[before.start].segment != present:
            return before, first
    last = history.last_step
    if last is not None and history.starts[last.start].segment != present:  # not a step on the present one yet
        return last, None
    return None, None


def epoch(history: RunHistory) -> int | None:
    """Which pass over the text the loader's last fetch was in, from 1; None when that was not recorded."""
    position = history.last_step.position if history.last_step else None
    found = number(position.get("epoch")) if isinstance(position, Mapping) else None
    return None if found is None else int(found)


def passes_begun(history: RunHistory) -> int | None:
    """Which pass over the text training is in, from 1; None when that cannot be told.

    By the tokens read, where they were recorded: documents are fetched long before they are trained on.
    """
    use, start = text_use(history), history.start
    if use.read is None or use.passes is None or start is None:
        return epoch(history)
    doubt = 0.0 if start.get("data", "tokens_exact") else ESTIMATE_SHARE
    return 1 + int(use.passes / (1 + doubt))


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
