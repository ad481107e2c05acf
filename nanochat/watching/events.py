"""What a run's records tell of, one class a kind; fields that were not recorded are ``None``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Record = Mapping[str, Any]

#: Changes after which neither losses nor figures compare: another text, another tokenizer.
TEXT_CHANGES = {"data", "tokenizer"}
#: Changes after which bits per byte are measured otherwise.
MEASURE_CHANGES = {"max-seq-len", "eval-tokens"}
#: Settings that say nothing about the numbers, or that are told of as facts.
_SILENT = frozenset(
    {
        *("json", "model_tag", "resume", "allow_changes", "start_from", "keep_moments", "compile", "device", "dtype"),
        *("data", "tokenizer", "packing", "save_every", "keep_last", "recovery_minutes"),
        *("eval_every", "sample_every", "sample_prompts"),
    }
)


@dataclass(frozen=True, slots=True)
class Step:
    """One finished update; ``start`` is the index of the start it belongs to."""

    step: int
    time: float
    start: int
    #: Nats per target token; not finite when training diverged.
    loss: float | None
    smooth_loss: float | None
    lr_multiplier: float | None
    #: Input tokens trained on so far, in all.
    tokens: float | None
    #: Time of this update, and of all updates so far over all starts.
    seconds: float | None
    training_seconds: float | None
    #: Place in the text, under the family's names: pq_idx, rg_idx (from 0) and epoch (from 1).
    position: Record | None
    #: The same by source, of a text that is blended of several.
    positions: Record | None
    tokens_read: float | None
    tokens_lost: float | None
    memory_bytes: float | None


@dataclass(frozen=True, slots=True)
class Validation:
    """One figure on the validation text. Figures of different segments were measured on different text."""

    step: int
    time: float
    start: int
    val_bpb: float | None
    #: Fingerprint of the text it was measured on.
    data: str | None
    segment: int


@dataclass(frozen=True)
class Change:
    """A setting that differs between two starts; ``breaks_curve`` when figures no longer compare."""

    name: str
    before: Any
    after: Any
    breaks_curve: bool

    def __str__(self) -> str:
        return f"{self.name} {_short(self.before)} before, {_short(self.after)} now"


@dataclass(frozen=True)
class Start:
    """A start of the run: what it was given."""

    time: float
    #: Updates done before it.
    step: int
    resumed: bool
    record: Record
    #: What differs from the start before it.
    changes: tuple[Change, ...] = ()
    #: Counts changes of text or tokenizer: losses of different segments do not make one curve.
    segment: int = 0

    def get(self, *path: str) -> Any:
        """A value inside the record; None when any part of the path is absent."""
        return dig(self.record, path)

    def number(self, *path: str) -> float | None:
        """The same for a number."""
        return number(self.get(*path))

    def setting(self, name: str) -> float | None:
        """A number of the config by its name, in whichever group it stands: flags have no prefixes either."""
        found = [value for dotted, value in settings(self.get("config")) if dotted.rsplit(".")[-1] == name]
        return number(found[0]) if found else None

    @property
    def text(self) -> str | None:
        """Name of the text, told apart from another of that name by the beginning of its fingerprint."""
        name, fingerprint = self.get("data", "name"), self.get("data", "fingerprint")
        if name is None:
            chosen = self.get("config", "text", "data")
            return " ".join(map(str, chosen)) if isinstance(chosen, list) else chosen
        return f"{name} ({fingerprint[:8]})" if isinstance(fingerprint, str) else str(name)

    @property
    def sequence_len(self) -> float | None:
        """Tokens in a row."""
        return self.setting("max_seq_len")

    @property
    def total_batch_size(self) -> float | None:
        """Tokens of an update."""
        found = self.number("plan", "total_batch_size")
        return found if found is not None else self.setting("total_batch_size")

    @property
    def num_iterations(self) -> int | None:
        """How many updates the run is to have; None when it ends with its conversations."""
        for found in (self.number("num_iterations"), self.number("plan", "num_iterations")):
            if found is not None:
                return int(found)
        chosen = self.setting("num_iterations")
        return None if chosen is None else int(chosen)


def changes(before: Start, after: Start) -> tuple[Change, ...]:
    """What differs between two starts of a run, what breaks its curves first."""
    found = []
    if differs(before.get("data", "fingerprint"), after.get("data", "fingerprint"), before.text, after.text):
        found.append(Change("data", before.text, after.text, breaks_curve=True))
    for name in ("tokenizer", "device", "dtype", "packing"):
        path = (name, "fingerprint") if name == "tokenizer" else (name,)
        old, new = before.get(*path), after.get(*path)
        if differs(old, new):
            found.append(Change(name, old, new, breaks_curve=name == "tokenizer"))
    old_settings, new_settings = (dict(settings(start.get("config"))) for start in (before, after))
    for setting in sorted(old_settings.keys() & new_settings.keys()):
        field = setting.rsplit(".")[-1]
        name = field.replace("_", "-")
        old, new = old_settings[setting], new_settings[setting]
        if old != new and field not in _SILENT and name not in {change.name for change in found}:
            found.append(Change(name, old, new, breaks_curve=name in MEASURE_CHANGES))
    return tuple(sorted(found, key=lambda change: not change.breaks_curve))


def differs(old: Any, new: Any, old_instead: Any = None, new_instead: Any = None) -> bool:
    """Whether two facts differ; where either is unknown, the other pair is asked."""
    if old is None or new is None:
        return old_instead is not None and new_instead is not None and bool(old_instead != new_instead)
    return bool(old != new)


def settings(config: Any, prefix: str = "") -> Sequence[tuple[str, Any]]:
    """A nested config as pairs of dotted name and value."""
    if not isinstance(config, Mapping):
        return []
    pairs: list[tuple[str, Any]] = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            pairs += settings(value, f"{prefix}{name}.")
        else:
            pairs.append((f"{prefix}{name}", value))
    return pairs


def dig(record: Any, path: Sequence[str]) -> Any:
    """A value inside nested mappings; None when any part of the path is absent."""
    for name in path:
        if not isinstance(record, Mapping):
            return None
        record = record.get(name)
    return record


def number(value: Any) -> float | None:
    """A recorded number; None for anything else."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _short(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text if len(text) <= 24 else f"{text[:8]}…"
