"""``nanochat dataset`` as a user walks it: import, check, show."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from golden_text import RUN_DATA, golden_tokenizer

from nanochat.config import parse_flags
from nanochat.context import Context, Result
from nanochat.data.conversation import render
from nanochat.data.show import conversation_rows, text_rows
from nanochat.data.sources import open_data_set
from nanochat.errors import UserError
from nanochat.stages import dataset
from nanochat.stages.dataset_config import DatasetConfig
from nanochat.terminal import Terminal

#: Whole commands, many of them: left out of the quick check.
pytestmark = pytest.mark.slow

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
CALCULATING = [
    {"role": "user", "content": "1+1?"},
    {
        "role": "assistant",
        "content": [{"type": "python", "text": "1+1"}, {"type": "python_output", "text": "2"}],
    },
]
BAD = [{"role": "user", "content": "hi"}]


class Quiet(Terminal):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.interactive = False
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(tmp_path / "base", Quiet())


def run(context: Context, *words: str) -> Result:
    result = dataset.run(parse_flags(DatasetConfig, words, "nanochat dataset"), context)
    json.dumps(result.values)
    return result


def texts(folder: Path, number: int = 10) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(number):
        (folder / f"{index:02d}.txt").write_bytes(f"Document {index}.".encode())
    return folder


def conversations(path: Path, values: list) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def test_import_makes_a_set_that_is_found_by_its_name(context: Context, tmp_path: Path) -> None:
    result = run(context, "import", str(texts(tmp_path / "My notes")))
    assert result.values["data"] == "My-notes"
    assert result.values["train_documents"] + result.values["val_documents"] == 10
    assert result.values["train_tokens"] is None
    assert all(path.exists() for path in result.outputs)
    assert "10 files (110 bytes)" in context.terminal.said[0]
    open_data_set(context.base / "data" / "My-notes")
    assert run(context, "import", str(tmp_path / "My notes")).values == result.values, "doing it again is harmless"


def test_import_counts_tokens_when_there_is_a_tokenizer(context: Context, tmp_path: Path) -> None:
    golden_tokenizer().save(context.base / "tokenizer")
    result = run(context, "import", str(texts(tmp_path / "notes")), "--name", "own", "--val-share", "0.3")
    assert result.values["train_tokens"] > result.values["train_bytes"] / 10
    assert re.search(r"data set own: \d documents to train on \(\d+ bytes, \d+ tokens\)", result.text)
    golden_tokenizer().save(context.base / "tokenizers" / "other")
    assert run(context, "import", str(tmp_path / "notes"), "--tokenizer", "other").values["val_tokens"] > 0


def test_import_says_what_a_person_should_know_of_their_text(context: Context, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    documents = ["x y " * 100, "", "once", "once", *map(str, range(10))]
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in documents), encoding="utf-8")
    run(context, "import", str(path), "--column", "body", "--longest-document", "100")
    assert "1 documents were longer than 100 characters and became several" in context.terminal.said
    assert "1 documents were empty and left out" in context.terminal.said
    assert any("repeat an earlier one word for word" in said for said in context.terminal.said)


def test_import_splits_plain_files_where_asked(context: Context, tmp_path: Path) -> None:
    path = tmp_path / "poems.txt"
    path.write_text("one\n\ntwo\n\nthree\n", encoding="utf-8")
    values = run(context, "import", str(path), "--split-on", "blank-line").values
    assert values["train_documents"] + values["val_documents"] == 3


@pytest.mark.extras
def test_the_packaged_corpus_goes_by_its_name(context: Context) -> None:
    short, long = run(context, "chitchat"), run(context, "import", "chitchat", "--name", "again")
    assert (short.values["train_documents"], short.values["val_documents"]) == (3717, 300)
    assert short.values["train_bytes"] == long.values["train_bytes"]
    assert long.values["data"] == "again"


def test_commands_that_make_no_sense_are_one_sentence(context: Context, tmp_path: Path) -> None:
    notes = str(texts(tmp_path / "notes"))
    for words, message in {
        ("import",): "dataset import of what",
        ("show",): "dataset show of what",
        ("check", "a", "b"): "takes one file, not 2",
        ("chitchat", "a"): "takes no files",
        ("import", notes, notes): "give it a --name",
        ("import", notes, "--name", "a:b"): "cannot name a data set",
        ("import", notes, "--name", "../a"): "cannot name a data set",
        ("import", notes, "--longest-document", "0"): "leaves no text",
        ("show", "notes", "-n", "0"): "nothing to show",
        ("show", "notes"): "there is no tokenizer",
    }.items():
        with pytest.raises(UserError, match=message) as error:
            run(context, *words)
        assert "\n" not in str(error.value)


def test_check_counts_what_is_good_and_names_every_fault(context: Context, tmp_path: Path) -> None:
    path = conversations(tmp_path / "c.jsonl", [GOOD, CALCULATING])
    assert run(context, "check", str(path)).values == {"file": str(path), "conversations": 2, "messages": 4}
    path.write_bytes(b'{"messages": [\n\n' + json.dumps(GOOD).encode() + b'\n"\xff"\n' + json.dumps(BAD).encode())
    with pytest.raises(UserError) as error:
        run(context, "check", str(path))
    first, *faults = str(error.value).splitlines()
    assert first == f"3 of 4 conversations in {path} are faulty:"
    assert [re.search(r"line (\d+)", fault)[1] for fault in faults] == ["1", "4", "5"]


def test_check_names_twenty_faults_at_most(context: Context, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        run(context, "check", str(conversations(tmp_path / "c.jsonl", [BAD] * 30)))
    lines = str(error.value).splitlines()
    assert len(lines) == 22
    assert lines[-1] == "  … and 10 more"
    with pytest.raises(UserError, match="holds no conversations"):
        run(context, "check", str(conversations(tmp_path / "c.jsonl", [])))
    with pytest.raises(UserError, match="cannot be read"):
        run(context, "check", str(tmp_path / "absent.jsonl"))


def test_shown_text_rows_are_those_that_are_trained() -> None:
    tokenizer = golden_tokenizer()
    blend_rows = text_rows(_blend(), "train", tokenizer, 3, 64, "bestfit")
    for row in blend_rows:
        ids = [token for span in row.spans for token in _ids(span.text, span.special)]
        assert len(ids) == 65
        assert sum(token == tokenizer.bos_id for token in ids) == row.spans[-1].document


def _blend():
    from nanochat.data.blend import Blend

    return Blend.of(open_data_set(RUN_DATA))


def _ids(text: str, special: bool) -> list[int]:
    tokenizer = golden_tokenizer()
    if special:
        return [tokenizer.special_id(name) for name in re.findall(r"<\|\w+\|>", text)]
    return tokenizer.encode(text)


def test_shown_conversations_mark_exactly_what_is_learned() -> None:
    tokenizer = golden_tokenizer()
    conversation = {"messages": CALCULATING}
    row = conversation_rows([conversation], tokenizer, 1, 60)[0]
    ids, mask = render(conversation, tokenizer)
    shown = [(token, span.learned) for span in row.spans for token in _ids(span.text, span.special)]
    assert shown[: len(ids)] == [(token, bool(bit)) for token, bit in zip(ids, mask, strict=True)]
    first = row.marked(color=False).splitlines()[0]
    assert first == (
        "<|bos|><|user_start|>1+1?<|user_end|><|assistant_start|>[[<|python_start|>1+1<|python_end|>]]"
        "<|output_start|>2<|output_end|>[[<|assistant_end|>]]"
    )
    assert "\x1b[32m1+1\x1b[0m" in row.marked(color=True)


def test_show_takes_names_and_files(context: Context, tmp_path: Path) -> None:
    golden_tokenizer().save(context.base / "tokenizer")
    run(context, "import", str(texts(tmp_path / "notes")))
    shown = run(context, "show", "notes", "-n", "3", "--max-seq-len", "40")
    assert len(shown.values["rows"]) == 3
    assert "packing keep" in shown.text
    assert shown.text.count("<|bos|>Document") > 3
    assert "packing bestfit" in run(context, "show", "notes", "--packing", "bestfit", "--split", "val").text
    assert "Document 3." in run(context, "show", str(tmp_path / "notes" / "03.txt"), "--max-seq-len", "20").text
    spoken = conversations(tmp_path / "c.jsonl", [GOOD])
    assert "[[hello<|assistant_end|>]]" in run(context, "show", str(spoken), "--max-seq-len", "40").text
    with pytest.raises(UserError, match="no data set or folder 'absent'"):
        run(context, "show", "absent")


def test_what_would_command_a_terminal_is_shown_as_text(context: Context, tmp_path: Path) -> None:
    golden_tokenizer().save(context.base / "tokenizer")
    path = tmp_path / "a.txt"
    path.write_text("red \x1b[31m and a bell \x07", encoding="utf-8")
    text = run(context, "show", str(path), "--max-seq-len", "60").text
    assert "red \\x1b[31m and a bell \\x07" in text
    assert "\x1b" not in text
