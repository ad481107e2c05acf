"""Saved steps are whole or absent, come back exactly, and damage is told in one sentence."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from nanochat import atomic, checkpoint
from nanochat.checkpoint import Checkpoint, TokenizerReference
from nanochat.errors import UserError
from nanochat.model.config import ModelConfig
from nanochat.paths import checkpoints_folder

CONFIG = ModelConfig(sequence_len=64, vocab_size=128, num_layers=2, num_heads=2, num_kv_heads=1, model_dim=64)


def some_checkpoint(step: int = 150) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(8, 4, generator=generator)
    stack = torch.randn(3, 8, 4, generator=generator)  # moments are views of one stack in the optimizer
    return Checkpoint(
        stage="base",
        step=step,
        model_config=CONFIG,
        parameters={"lm_head.weight": weight, "transformer.wte.weight": weight.bfloat16().t()},
        optimizer={f"m{i}.momentum_buffer": matrix for i, matrix in enumerate(stack)},
        optimizer_step_count=step,
        tokenizer=TokenizerReference("abc123", "tokenizers/abc"),
        config={"depth": 2, "rates": {"matrix_lr": 0.02}},
        loader={"epoch": 1, "waiting": [[0, 1, 2]]},
        loop={"tokens": 1024},
        metrics={"val_bpb": 1.25, "core": None},
    )


def assert_same(loaded: Checkpoint, saved: Checkpoint) -> None:
    for ours, theirs in ((loaded.parameters, saved.parameters), (loaded.optimizer or {}, saved.optimizer or {})):
        assert set(ours) == set(theirs)
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype
            assert torch.equal(ours[name], tensor)
    for name in ("stage", "step", "model_config", "optimizer_step_count", "tokenizer", "config", "loader", "loop"):
        assert getattr(loaded, name) == getattr(saved, name)
    assert (loaded.metrics, loaded.family) == (saved.metrics, saved.family)


def test_a_saved_step_comes_back_exactly(tmp_path: Path) -> None:
    saved = some_checkpoint()
    folder = checkpoint.save(tmp_path / "d2", saved)
    assert folder == tmp_path / "d2" / "step_000150"
    assert_same(checkpoint.load(folder, optimizer=True), saved)


def test_the_optimizer_is_read_only_when_asked_for(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, some_checkpoint())
    assert checkpoint.load(folder).optimizer is None
    assert checkpoint.load(folder).optimizer_step_count == 150


def test_a_step_without_optimizer_state_is_complete(tmp_path: Path) -> None:
    saved = replace(some_checkpoint(), optimizer=None, tokenizer=None, loader=None)
    folder = checkpoint.save(tmp_path, saved)
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "model.safetensors"]
    assert_same(checkpoint.load(folder, optimizer=True), saved)


def test_saving_leaves_nothing_but_the_step(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, some_checkpoint())
    checkpoint.save(tmp_path, some_checkpoint())
    assert [path.name for path in tmp_path.iterdir()] == ["step_000150"]


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, some_checkpoint())
    newer = replace(some_checkpoint(), metrics={"val_bpb": 1.0})
    assert_same(checkpoint.load(checkpoint.save(tmp_path, newer), optimizer=True), newer)


@pytest.mark.parametrize("when", ["_write", "_write_tensors", "_sha256"])
def test_a_failed_save_keeps_the_old_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    old = some_checkpoint()
    folder = checkpoint.save(tmp_path, old)
    monkeypatch.setattr(checkpoint, when, _disk_is_full)
    with pytest.raises(UserError, match="free some space"):
        checkpoint.save(tmp_path, replace(old, metrics={}))
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000150"]
    assert_same(checkpoint.load(folder, optimizer=True), old)


def _disk_is_full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_too_little_room_is_told_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int = 1000

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage())
    with pytest.raises(UserError, match="free some space"):
        checkpoint.save(tmp_path, some_checkpoint())
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_dead_processes_are_cleaned_and_others_kept(tmp_path: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (tmp_path / f".step_000100.tmp-{int(dead.stdout)}").mkdir()
    living = tmp_path / f".step_000120.tmp-{os.getppid()}"
    living.mkdir()
    (tmp_path / ".notes").mkdir()
    checkpoint.save(tmp_path, some_checkpoint())
    assert sorted(path.name for path in tmp_path.iterdir()) == [".notes", living.name, "step_000150"]


def test_a_step_set_aside_by_a_killed_save_comes_back(tmp_path: Path) -> None:
    """The process died between setting the old step aside and putting the new one in its place."""
    checkpoint.save(tmp_path, some_checkpoint(150)).rename(tmp_path / f".step_000150.old-{os.getpid()}")
    checkpoint.save(tmp_path, some_checkpoint(200))
    assert checkpoint.steps(tmp_path) == [150, 200]


def test_a_folder_that_cannot_be_moved_to_its_place_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "step_000150"
    final.mkdir()
    (final / "old").touch()
    rename = Path.rename

    def refuse_new(path: Path, target: Path) -> Path:
        if ".tmp-" in path.name:
            raise OSError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse_new)
    with pytest.raises(OSError, match="denied"), atomic.new_folder(final):
        pass
    assert [path.name for path in final.iterdir()] == ["old"]


def _without_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _half_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])


def _without_model(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _truncated(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100)


def _bit_flipped(folder: Path) -> None:
    path = folder / "optim_owner0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _escaping(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["../../secret"] = {"bytes": 1, "sha256": ""}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _listing_no_settings(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["model_config"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_without_manifest, "manifest.json"),
        (_half_manifest, "manifest.json"),
        (_without_model, "model.safetensors"),
        (_truncated, "model.safetensors"),
        (_bit_flipped, "optim_owner0.safetensors"),
        (_escaping, "secret"),
        (_listing_no_settings, "model_config"),
    ],
)
def test_damage_is_named_with_its_file(tmp_path: Path, damage: object, named: str) -> None:
    folder = checkpoint.save(tmp_path, some_checkpoint())
    assert callable(damage)
    damage(folder)
    with pytest.raises(UserError, match=rf"step_000150 is damaged: .*{named}.*use another step"):
        checkpoint.load(folder, optimizer=True)


def test_a_safetensors_file_with_a_broken_index_is_refused(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, some_checkpoint())
    model = folder / "model.safetensors"
    model.write_bytes(b"\xff" * model.stat().st_size)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["model.safetensors"]["sha256"] = checkpoint._sha256(model)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        checkpoint.load(folder)


def test_a_newer_format_asks_for_an_update(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, some_checkpoint())
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(UserError, match="update nanochat"):
        checkpoint.load(folder)


def test_latest_is_the_newest_complete_step_and_names_broken_ones(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        checkpoint.save(tmp_path, some_checkpoint(step))
    _truncated(tmp_path / "step_000300")
    step, notices = checkpoint.latest(tmp_path)
    assert (step, checkpoint.steps(tmp_path)) == (200, [100, 200])
    assert len(notices) == 1
    assert "step_000300" in notices[0]


def test_latest_of_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        checkpoint.latest(tmp_path / "d4")


def test_find_takes_the_deepest_tag_and_its_newest_step(tmp_path: Path) -> None:
    for tag, step in (("d4", 10), ("d12", 10), ("d12", 20), ("zoo", 99)):
        checkpoint.save(checkpoints_folder("base", tag, tmp_path), some_checkpoint(step))
    found = checkpoint.find("base", base=tmp_path)
    assert found == tmp_path / "base_checkpoints" / "d12" / "step_000020"
    assert checkpoint.find("base", "d4", 10, tmp_path).parent.name == "d4"


def test_find_takes_the_tag_written_last_when_none_is_a_depth(tmp_path: Path) -> None:
    for tag in ("zoo", "ant"):
        checkpoint.save(checkpoints_folder("sft", tag, tmp_path), some_checkpoint())
    manifest = checkpoints_folder("sft", "zoo", tmp_path) / "step_000150" / "manifest.json"
    os.utime(manifest, (2e9, 2e9))
    assert checkpoint.find("sft", base=tmp_path).parent.name == "zoo"


def test_find_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no base checkpoint"):
        checkpoint.find("base", base=tmp_path)
    checkpoint.save(checkpoints_folder("base", "d4", tmp_path), some_checkpoint(10))
    with pytest.raises(UserError, match=r"'d5'.*there are d4"):
        checkpoint.find("base", "d5", base=tmp_path)
    with pytest.raises(UserError, match=r"no step 11.*there are 10"):
        checkpoint.find("base", "d4", 11, tmp_path)


def test_find_reports_broken_steps(tmp_path: Path) -> None:
    for step in (10, 20):
        folder = checkpoint.save(checkpoints_folder("base", "d4", tmp_path), some_checkpoint(step))
    _without_manifest(folder)
    lines: list[str] = []
    assert checkpoint.find("base", "d4", base=tmp_path, report=lines.append).name == "step_000010"
    assert "step_000020" in lines[0]
