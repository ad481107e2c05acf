"""Data sets are found, or refused in one sentence; written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from golden_text import LONG_DATA, RUN_DATA, golden_tokenizer

from nanochat.data import chitchat
from nanochat.data.amounts import count_tokens
from nanochat.data.conversation import check_conversation
from nanochat.data.manifest import file_sha256, read_manifest
from nanochat.data.sources import iterate_texts, open_data_set, resolve_data
from nanochat.data.writing import write_shards
from nanochat.errors import UserError

TRAIN, VAL = [f"document {i}, é" for i in range(10)], ["one", "two"]


def write(folder: Path, name: str = "small") -> Path:
    write_shards(folder, TRAIN, VAL, name=name, source="a test", rows_per_group=3, documents_per_shard=7)
    return folder


def parquet(path: Path, **columns: list) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def test_last_file_by_name_is_the_validation_text() -> None:
    data_set = open_data_set(RUN_DATA)
    assert [shard.path.name for shard in data_set.train] == ["shard_00000.parquet", "shard_00001.parquet"]
    assert [shard.path.name for shard in data_set.val] == ["shard_06542.parquet"]
    assert open_data_set(LONG_DATA).train[0].row_groups == (7, 5, 9, 3)


def test_written_data_set_holds_its_documents_in_order(tmp_path: Path) -> None:
    data_set = open_data_set(write(tmp_path / "small"))
    assert list(iterate_texts(data_set, "train")) == TRAIN
    assert list(iterate_texts(data_set, "val")) == VAL
    assert [shard.row_groups for shard in data_set.train] == [(3, 3, 1), (3,)]


def test_manifest_describes_every_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "small")
    manifest = read_manifest(folder)
    assert manifest is not None
    assert (manifest.name, manifest.source) == ("small", "a test")
    assert [(entry.split, entry.documents, entry.row_groups) for entry in manifest.shards] == [
        ("train", 7, 3),
        ("train", 3, 1),
        ("val", 2, 1),
    ]
    assert sum(entry.text_bytes for entry in manifest.shards) == sum(len(text.encode()) for text in TRAIN + VAL)
    for entry in manifest.shards:
        assert entry.sha256 == file_sha256(folder / entry.name)
        assert entry.file_bytes == (folder / entry.name).stat().st_size


def test_writing_again_replaces_the_same_set_only(tmp_path: Path) -> None:
    write(write(tmp_path / "small"))
    with pytest.raises(UserError, match="holds something else: choose another --name"):
        write_shards(tmp_path / "small", TRAIN, VAL, name="small", source="elsewhere")
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="holds something else"):
        write(tmp_path / "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "small"]


@pytest.mark.parametrize(("train", "val", "split"), [([], VAL, "train"), (TRAIN, [], "val")])
def test_a_set_without_a_split_is_not_written(train: list[str], val: list[str], split: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no {split} documents"):
        write_shards(tmp_path / "small", train, val, name="small", source="a test")
    assert not list(tmp_path.iterdir())


def test_manifest_decides_what_is_validation(tmp_path: Path) -> None:
    folder = write(tmp_path / "small")
    path = folder / "manifest.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    data["shards"] = [{**entry, "split": "train" if entry["split"] == "val" else "val"} for entry in data["shards"]]
    path.write_text(json.dumps(data), encoding="utf-8")
    assert list(iterate_texts(open_data_set(folder), "train")) == VAL


def test_what_is_no_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        open_data_set(tmp_path / "absent")
    with pytest.raises(UserError, match="holds no parquet files"):
        open_data_set(tmp_path)
    parquet(tmp_path / "a.parquet", text=["x"])
    with pytest.raises(UserError, match=r"holds one file, a\.parquet, .* add another one"):
        open_data_set(tmp_path)
    parquet(tmp_path / "b.parquet", text=pyarrow.array([], pyarrow.string()))
    with pytest.raises(UserError, match=r"the validation files in .* hold no documents"):
        open_data_set(tmp_path)
    (tmp_path / "b.parquet").write_bytes(b"")
    with pytest.raises(UserError, match=r"b\.parquet is empty: fetch it again"):
        open_data_set(tmp_path)
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-10])
    with pytest.raises(UserError, match=r"b\.parquet is not a readable parquet file"):
        open_data_set(tmp_path)
    parquet(tmp_path / "b.parquet", content=["x"], url=["y"])
    with pytest.raises(UserError, match=r"b\.parquet has no column 'text' \(it has content, url\)"):
        open_data_set(tmp_path)
    parquet(tmp_path / "b.parquet", text=[1, 2])
    with pytest.raises(UserError, match="holds int64, not strings"):
        open_data_set(tmp_path)


def test_files_that_differ_from_the_manifest_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "small")
    parquet(folder / "extra.parquet", text=["x"])
    with pytest.raises(UserError, match=r"extra\.parquet is not in the manifest"):
        open_data_set(folder)
    (folder / "extra.parquet").rename(folder / "shard_00001.parquet")
    with pytest.raises(UserError, match=r"shard_00001\.parquet is missing or not [\d,]+ bytes long"):
        open_data_set(folder)
    for text in ("{", "[]", '{"format_version": 1}', '{"format_version": 9}'):
        (folder / "manifest.json").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=r"manifest\.json"):
            open_data_set(folder)


def test_damaged_pages_are_named_when_they_are_read(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", text=[f"some text {i}" for i in range(1000)])
    parquet(tmp_path / "b.parquet", text=["x"])
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[4:400] = b"\xff" * 396
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"row group 0 of .*a\.parquet cannot be read"):
        list(iterate_texts(open_data_set(tmp_path), "train"))


def test_named_sets_folders_and_the_only_set_are_found(tmp_path: Path) -> None:
    write(tmp_path / "base" / "data" / "small")
    write(tmp_path / "elsewhere")
    base = tmp_path / "base"
    assert resolve_data(None, base)[0].name == "small"
    assert resolve_data("small", base)[0].folder == base / "data" / "small"
    outside = resolve_data(str(tmp_path / "elsewhere"), base)[0]
    assert resolve_data(outside.name, base)[0] == resolve_data(str(outside.folder), base)[0]
    with pytest.raises(UserError, match=r"no data set or folder 'large' .* small"):
        resolve_data("large", base)
    write(base / "data" / "other")
    with pytest.raises(UserError, match="choose --data other or small"):
        resolve_data(None, base)
    with pytest.raises(UserError, match=r"there is no data in .* nanochat dataset"):
        resolve_data(None, tmp_path / "nowhere")


def test_today_s_folder_comes_before_the_old_one_and_the_choice_is_said(tmp_path: Path) -> None:
    write(tmp_path / "data" / "small")
    write(tmp_path / "base_data")
    old, notice = resolve_data(None, tmp_path)
    assert old.name == "base_data"
    assert notice is not None
    assert "because there is no base_data_climbmix" in notice
    write(tmp_path / "base_data_climbmix")
    new, notice = resolve_data(None, tmp_path)
    assert new.name == "base_data_climbmix"
    assert notice is not None
    assert resolve_data("base_data", tmp_path)[0].folder == tmp_path / "base_data"


def test_tokens_are_counted_with_a_bos_each_up_to_a_limit() -> None:
    data_set, tokenizer = open_data_set(LONG_DATA), golden_tokenizer()
    whole = sum(1 + len(tokenizer.encode(text)) for text in iterate_texts(data_set, "val"))
    assert count_tokens(data_set, "val", tokenizer, at_most=10**9) == whole
    assert count_tokens(data_set, "val", tokenizer, at_most=5) == 5


@pytest.mark.extras
def test_chitchat_has_the_same_split_as_text_and_as_conversations() -> None:
    train, val = chitchat.split()
    assert (len(train), len(val)) == (3717, 300)
    for documents, conversations in zip((train, val), chitchat.split_conversations(), strict=True):
        for document, conversation in zip(documents, conversations, strict=True):
            messages = conversation["messages"]
            check_conversation(messages, "chitchat")
            assert messages[-1]["role"] == "assistant"
            assert document.startswith(f"A: {messages[0]['content']}\nB: {messages[1]['content']}")


def test_missing_chitchat_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chitchat, "MODULE", "chitchat_dataset_that_is_absent")
    with pytest.raises(UserError, match=r"pip install 'chitchat-dataset==0\.9\.0'"):
        chitchat.split()
