"""Several data sets read together, each for its share of the tokens."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat.data.packing import Packing
from nanochat.data.sources import FAMILY_FOLDER, OLD_FAMILY_FOLDER, DataSet, Split, resolve_data
from nanochat.errors import UserError


@dataclass(frozen=True)
class Source:
    """A data set of a blend and its share of the tokens; the shares of a blend sum to 1."""

    data_set: DataSet
    share: float


@dataclass(frozen=True)
class Blend:
    """What a run reads; most often one data set alone.

    Training rows are of the sources in turn, by :func:`next_source`. The validation text is each source's own, and its
    rows take turns in the same way, so the validation figure weighs the sources as training does.
    """

    sources: tuple[Source, ...]

    @classmethod
    def of(cls, data_set: DataSet) -> Blend:
        """One data set alone."""
        return cls((Source(data_set, 1.0),))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.data_set.name for source in self.sources)

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple(source.share for source in self.sources)

    @property
    def specs(self) -> tuple[str, ...]:
        """What :func:`resolve_blend` finds this blend by again."""
        if len(self.sources) == 1:
            return self.names
        return tuple(f"{source.data_set.name}:{source.share!r}" for source in self.sources)

    @property
    def name(self) -> str:
        """For people: the data set's name, or ``A:0.8 B:0.2``."""
        if len(self.sources) == 1:
            return self.names[0]
        return " ".join(f"{source.data_set.name}:{source.share:.4g}" for source in self.sources)

    def fingerprint(self, split: Split | None = None) -> str:
        """SHA-256 (hex) that tells another text, order or share apart; of one set alone, that set's own.

        Args:
            split: of this split alone; of both when not given. Figures on another validation text do not compare.
        """
        parts = [(source.data_set.fingerprint(split), source.share) for source in self.sources]
        if len(parts) == 1:
            return parts[0][0]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def is_published(self) -> bool:
        """Whether the family's published text is among the sources."""
        return any(name in (FAMILY_FOLDER, OLD_FAMILY_FOLDER) for name in self.names)

    def documents(self, split: Split = "train") -> int:
        """How many documents a split has, over all sources."""
        return sum(source.data_set.documents(split) for source in self.sources)

    def text_bytes(self, split: Split = "train") -> int | None:
        """UTF-8 bytes of a split's text, over all sources; None when a source has no manifest."""
        found = [source.data_set.text_bytes(split) for source in self.sources]
        return None if None in found else sum(size or 0 for size in found)

    def describe(self) -> dict[str, Any]:
        """What a run records of its training text: name, folder(s), fingerprints, shards, documents, bytes."""
        folders = [str(source.data_set.folder) for source in self.sources]
        values: dict[str, Any] = {
            "name": self.name,
            "folder": folders[0] if len(folders) == 1 else folders,
            "fingerprint": self.fingerprint(),
            "val_fingerprint": self.fingerprint("val"),
            "shards": sum(len(source.data_set.train) for source in self.sources),
            "documents": self.documents(),
            "text_bytes": self.text_bytes(),
        }
        if len(self.sources) > 1:
            values["sources"] = [{"share": each.share, **Blend.of(each.data_set).describe()} for each in self.sources]
        return values


def resolve_blend(specs: Sequence[str] | None, base: Path) -> tuple[Blend, tuple[str, ...]]:
    """The blend that ``--data`` names: one data set, or several as ``NAME:SHARE``; see :func:`resolve_data`.

    Shares that do not sum to 1 count in proportion.

    Returns:
        The blend, and what should be said aloud about the choice.

    Raises:
        UserError: for a set that cannot be opened, is named twice, or lacks a share above 0.
    """
    if not specs:
        data_set, notice = resolve_data(None, base)
        return Blend.of(data_set), (notice,) if notice else ()
    parsed = [_parse(spec, base) for spec in specs]
    data_sets = [resolve_data(name, base)[0] for name, _ in parsed]
    if len(parsed) == 1:
        return Blend.of(data_sets[0]), ()
    weights = []
    for name, weight in parsed:
        if weight is None or not (math.isfinite(weight) and weight > 0):
            example = " ".join(f"{name}:{1 / len(parsed):.2g}" for name, _ in parsed)
            raise UserError(f"data set {name} has no share above 0 among several: write --data {example}")
        weights.append(weight)
    folders = [data_set.folder.resolve() for data_set in data_sets]
    for index, folder in enumerate(folders):
        if folder in folders[:index]:
            raise UserError(f"data set {parsed[index][0]} is named twice in --data: give it one share")
    total = math.fsum(weights)
    # Shares that are meant as such stay as they are, to the last bit, so that a saved blend is found again.
    shares = weights if abs(total - 1) < 1e-6 else [weight / total for weight in weights]
    blend = Blend(tuple(Source(data_set, share) for data_set, share in zip(data_sets, shares, strict=True)))
    notices = () if shares is weights else (f"the shares sum to {total:.4g}: taken as {blend.name}",)
    return blend, notices


def next_source(rows: Sequence[int], shares: Sequence[float]) -> int:
    """Which source the next row is of: the one furthest behind its share, the first among equals.

    Args:
        rows: of each source so far.
        shares: of each source, summing to 1.
    """
    total = sum(rows) + 1
    return max(range(len(rows)), key=lambda source: (shares[source] * total - rows[source], -source))


def choose_packing(blend: Blend) -> tuple[Packing, str]:
    """How a blend is packed when nobody says: as the family does on its published text, without loss on other text.

    Returns:
        The packing and the reason.
    """
    if blend.is_published:
        return "bestfit", "as the family packs its published text, so figures compare"
    return "keep", "own text is seldom plentiful, and this loses none of it"


def _parse(spec: str, base: Path) -> tuple[str, float | None]:
    """Name and share; a name that really holds a colon is taken as it is."""
    name, colon, share = spec.rpartition(":")
    if not colon or not name or (base / "data" / spec).is_dir() or Path(spec).is_dir():
        return spec, None
    try:
        return name, float(share)
    except ValueError:
        return spec, None
