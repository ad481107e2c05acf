"""``nanochat dataset``: own text into shards with a manifest, and a look at what is trained on."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from nanochat.context import Context, Result
from nanochat.data import chitchat, own_text
from nanochat.data.blend import Blend, choose_packing, resolve_blend
from nanochat.data.manifest import FILE_NAME, Manifest
from nanochat.data.mixture import check_file, is_conversations, read_conversations
from nanochat.data.show import ShownRow, conversation_rows, text_rows
from nanochat.data.text_files import SUFFIXES, Reading, Tally, find_files
from nanochat.data.writing import write_shards
from nanochat.errors import UserError
from nanochat.stages.dataset_config import DatasetConfig
from nanochat.tokenizer import store
from nanochat.tokenizer.bpe import Tokenizer

#: The packaged corpus, by the name it goes by.
CHITCHAT = "chitchat"


def run(config: DatasetConfig, context: Context) -> Result:
    """Do one of import, check and show.

    Raises:
        UserError: for text that cannot be read or written, and for a checked file with faults.
    """
    if config.action == CHITCHAT:
        if config.paths:
            raise UserError(
                f"dataset chitchat takes no files: import them with nanochat dataset import {config.paths[0]}"
            )
        return _import_chitchat(config, context)
    if not config.paths:
        raise UserError(f"dataset {config.action} of what: name a file")
    if config.action == "import":
        return _import_chitchat(config, context) if config.paths == (CHITCHAT,) else _import(config, context)
    if len(config.paths) > 1:
        raise UserError(f"dataset {config.action} takes one file, not {len(config.paths)}: name them one by one")
    return _check(config) if config.action == "check" else _show(config, context)


def _import(config: DatasetConfig, context: Context) -> Result:
    paths = [Path(path).expanduser() for path in config.paths]
    options = config.importing
    if options.name is None and len(paths) > 1:
        raise UserError(f"{len(paths)} paths make one data set: give it a --name")
    files = find_files(paths)
    name = _checked_name(options.name or _name_of(paths[0]))
    folder = context.base / "data" / name
    size = sum(path.stat().st_size for path in files)
    context.terminal.say(f"importing {len(files):,} files ({_size(size)}) into {folder}")
    with context.terminal.progress("import", size) as progress:

        def report(tally: Tally) -> None:
            progress.update(min(tally.file_bytes, size), f"{tally.documents:,} documents")

        manifest, tally = own_text.import_text(
            paths,
            folder,
            name=name,
            reading=Reading(options.split_on, options.column, options.longest_document),
            val_share=options.val_share,
            tokenizer=_tokenizer_if_any(config, context),
            report=report,
        )
    for notice in _notices(tally, config):
        context.terminal.say(notice)
    return _made(folder, manifest, {"files": len(files), "empty": tally.empty, "repeated": tally.repeated})


def _import_chitchat(config: DatasetConfig, context: Context) -> Result:
    """The packaged corpus with its own split."""
    name = _checked_name(config.importing.name or CHITCHAT)
    folder = context.base / "data" / name
    train, validation = chitchat.split()
    context.terminal.say(f"writing {len(train):,} training and {len(validation):,} validation documents to {folder}")
    source = f"PyPI package {chitchat.PACKAGE}"
    tokenizer = _tokenizer_if_any(config, context)
    return _made(folder, write_shards(folder, train, validation, name=name, source=source, tokenizer=tokenizer), {})


def _tokenizer_if_any(config: DatasetConfig, context: Context) -> Tokenizer | None:
    """The tokenizer that counts tokens: the one that is asked for, else the base folder's own, if there is one."""
    own = store.folder(None, context.base) / store.FILE_NAME
    if config.tokenizer is None and not own.is_file():
        return None
    return store.open_tokenizer(config.tokenizer, context.base)[0]


def _name_of(path: Path) -> str:
    """A name for what is imported from a file or folder."""
    own = path.resolve().name if path.is_dir() else path.stem
    return re.sub(r"[^\w.-]+", "-", own).strip(".-") or "text"


def _checked_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(f"{name!r} cannot name a data set: use letters, digits, dots, - and _ for --name")
    return name


def _notices(tally: Tally, config: DatasetConfig) -> list[str]:
    """What a person should know of their text."""
    notices = []
    if tally.cut:
        longest = config.importing.longest_document
        notices.append(f"{tally.cut:,} documents were longer than {longest:,} characters and became several")
    if tally.empty:
        notices.append(f"{tally.empty:,} documents were empty and left out")
    if tally.repeated:
        notices.append(f"{tally.repeated:,} documents repeat an earlier one word for word and were kept")
    return notices


def _made(folder: Path, manifest: Manifest, more: dict[str, int | None]) -> Result:
    """The result of a data set that was written."""
    values: dict[str, object] = {"data": manifest.name, "folder": str(folder)}
    shown = []
    for split, purpose in (("train", "documents to train on"), ("val", "to validate on")):
        entries = [entry for entry in manifest.shards if entry.split == split]
        documents, num_bytes = sum(e.documents for e in entries), sum(e.text_bytes for e in entries)
        values |= {f"{split}_documents": documents, f"{split}_bytes": num_bytes}
        tokens = next((counts[split] for counts in manifest.tokens.values()), None)
        values[f"{split}_tokens"] = tokens
        counted = "" if tokens is None else f", {tokens:,} tokens"
        shown.append(f"{documents:,} {purpose} ({_size(num_bytes)}{counted})")
    text = f"data set {manifest.name}: {' and '.join(shown)} in {folder}"
    return Result(values | more, text, outputs=(folder / FILE_NAME,))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.2f} MB" if num_bytes >= 10_000 else f"{num_bytes:,} bytes"


def _check(config: DatasetConfig) -> Result:
    path = Path(config.paths[0]).expanduser()
    checked = check_file(path)
    if checked.faulty:
        more = [f"… and {checked.faulty - len(checked.faults)} more"] if checked.faulty > len(checked.faults) else []
        listed = "\n  ".join([*checked.faults, *more])
        raise UserError(
            f"{checked.faulty:,} of {checked.faulty + checked.conversations:,} conversations in {path} are faulty:\n"
            f"  {listed}"
        )
    if not checked.conversations:
        raise UserError(f"{path} holds no conversations: write one list of messages a line")
    values = {"file": str(path), "conversations": checked.conversations, "messages": checked.messages}
    return Result(values, f"{path}: {checked.conversations:,} conversations, {checked.messages:,} messages, no faults")


def _show(config: DatasetConfig, context: Context) -> Result:
    options, name = config.showing, config.paths[0]
    if min(options.rows, options.max_seq_len) < 1:
        raise UserError("nothing to show: give --rows and --max-seq-len of at least 1")
    tokenizer, _ = store.open_tokenizer(config.tokenizer, context.base)
    path = Path(name).expanduser()
    if path.is_file() and is_conversations(path):
        rows = conversation_rows(read_conversations(path), tokenizer, options.rows, options.max_seq_len)
        how = "whole conversations; what is learned is marked"
    else:
        with tempfile.TemporaryDirectory(prefix="nanochat-") as folder:
            is_text = path.is_file() and path.suffix.lower() in SUFFIXES
            blend = Blend.of(own_text.open_as_validation(path, Path(folder))) if is_text else None
            split = options.split if blend is None else "val"
            blend = blend or resolve_blend([name], context.base)[0]
            packing = options.packing or choose_packing(blend)[0]
            rows = text_rows(blend, split, tokenizer, options.rows, options.max_seq_len, packing)
        how = f"packing {packing}; every document begins with bos"
    values = {"data": name, "rows": [row.to_dict() for row in rows]}
    return Result(values, "\n".join([f"{name}: {how}", *(_shown(row, number) for number, row in enumerate(rows, 1))]))


def _shown(row: ShownRow, number: int) -> str:
    return f"\n--- row {number}: {row.summary}\n{row.marked(color=_is_coloured())}"


def _is_coloured() -> bool:
    import os
    import sys

    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
