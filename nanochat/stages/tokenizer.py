"""``nanochat tokenizer``: byte-level BPE trained on a data set's training text."""

from __future__ import annotations

import time

from nanochat.context import Context, Result
from nanochat.data.sources import iterate_texts, resolve_data
from nanochat.stages.configs import TokenizerConfig
from nanochat.tokenizer import store
from nanochat.tokenizer.memory import peak_resident_bytes
from nanochat.tokenizer.train import train


def run(config: TokenizerConfig, context: Context) -> Result:
    """Train a tokenizer and keep it in the base folder."""
    data_set, notice = resolve_data(config.data, context.base)
    if notice:
        context.terminal.say(notice)
    context.terminal.say(f"training a tokenizer of {config.vocab_size:,} tokens on {data_set.name}")
    began = time.perf_counter()
    texts = iterate_texts(data_set, "train")
    tokenizer = train(texts, config.vocab_size, config.max_chars, config.doc_cap, say=context.terminal.say)
    seconds = time.perf_counter() - began
    folder, moved = store.install(tokenizer, config.name, context.base)
    if moved:
        context.terminal.say(moved)
    sample = next(iterate_texts(data_set, "val"))
    bytes_per_token = len(sample.encode()) / max(len(tokenizer.encode(sample)), 1)
    peak = peak_resident_bytes()
    values = {
        "folder": str(folder),
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": tokenizer.fingerprint,
        "bytes_per_token": bytes_per_token,
        "seconds": seconds,
        "peak_memory_bytes": peak,
    }
    memory = "n/a (this system does not tell)" if peak is None else f"{peak / 1e9:.2f} GB"
    text = (
        f"tokenizer of {tokenizer.vocab_size:,} tokens trained in {seconds:.1f} s: {bytes_per_token:.2f} bytes per"
        f" token on the first validation document; peak memory {memory}; kept in {folder}"
    )
    return Result(values, text, outputs=(folder / store.FILE_NAME,))
