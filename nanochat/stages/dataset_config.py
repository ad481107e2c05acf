"""What ``nanochat dataset`` can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from nanochat.stages.settings import alias

Action = Literal["import", "check", "show", "chitchat"]


@dataclass(frozen=True)
class ImportOptions:
    """For import."""

    name: str | None = None
    """Name of the data set; that of the file or folder when not given."""
    val_share: float = 0.02
    """Share of the documents that validate; at least one does."""
    split_on: str | None = None
    """In .txt and .md files, the line that separates documents, or blank-line; a file is one when not given."""
    column: str = "text"
    """Column of parquet files and name in JSON lines that holds the text."""
    longest_document: int = 100_000
    """Characters after which a document is cut into several, at a paragraph where there is one."""


@dataclass(frozen=True)
class ShowOptions:
    """For show."""

    rows: Annotated[int, alias("-n")] = 2
    """Rows to show."""
    max_seq_len: int = 2048
    """Tokens in a row (T)."""
    packing: Literal["bestfit", "keep"] | None = None
    """How text is packed; as pretraining would when not given."""
    split: Literal["train", "val"] = "train"
    """Training or validation text."""


@dataclass(frozen=True)
class DatasetConfig:
    """Make data sets of text and look into them.

    import makes one of own files: shards and a manifest with a validation split by document. check reads a JSON-lines
    file of conversations and names every faulty line. show prints rows as they are trained.
    """

    action: tyro.conf.Positional[Action]
    """import, check, show; chitchat is short for import chitchat."""
    paths: tyro.conf.Positional[tuple[str, ...]] = ()
    """import: .txt, .md, .jsonl and .parquet files and folders of them, or chitchat (4,017 short conversations of the
    package chitchat-dataset). check: a file. show: a file or the name of a data set."""
    importing: ImportOptions = field(default_factory=ImportOptions)
    showing: ShowOptions = field(default_factory=ShowOptions)
    tokenizer: str | None = None
    """Name or folder of the tokenizer that counts tokens and shows rows; the base folder's own when not given."""
    json: bool = False
    """Print the result as JSON."""
