"""``nanochat dataset``: text into shards with a manifest and a validation split."""

from __future__ import annotations

from nanochat.context import Context, Result
from nanochat.data import chitchat
from nanochat.data.sources import write_shards
from nanochat.stages.configs import DatasetConfig


def run(config: DatasetConfig, context: Context) -> Result:
    """Write the packaged corpus as a data set of the base folder."""
    name = config.name or config.source
    folder = context.base / "data" / name
    train, validation = chitchat.split()
    context.terminal.say(f"writing {len(train):,} training and {len(validation):,} validation documents to {folder}")
    write_shards(folder, train, validation, name=name, source=f"PyPI package {chitchat.PACKAGE}")
    num_bytes = sum(len(text.encode()) for text in train), sum(len(text.encode()) for text in validation)
    values = {
        "data": name,
        "folder": str(folder),
        "train_documents": len(train),
        "train_bytes": num_bytes[0],
        "val_documents": len(validation),
        "val_bytes": num_bytes[1],
    }
    text = (
        f"data set {name}: {len(train):,} training documents ({num_bytes[0] / 1e6:.2f} MB) and"
        f" {len(validation):,} validation documents ({num_bytes[1] / 1e6:.2f} MB) in {folder}"
    )
    return Result(values, text, outputs=(folder / "manifest.json",))
