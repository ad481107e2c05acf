"""Configs go to dicts and flags and back unchanged, strictly; records survive a reader beside the writer."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest

from nanochat import config as configs
from nanochat import records
from nanochat.commands import COMMANDS
from nanochat.errors import UserError
from nanochat.stages.configs import PretrainConfig, SftConfig

#: The most fields a group may have before it asks to be split.
MOST_FIELDS = 12


@pytest.mark.parametrize("config", [PretrainConfig(model_tag="x", seed=7), SftConfig(model_tag="x", num_iterations=3)])
def test_a_config_comes_back_from_its_dict(config: PretrainConfig | SftConfig) -> None:
    assert configs.from_dict(type(config), configs.to_dict(config), "here") == config


def test_unknown_names_are_refused_wherever_they_are() -> None:
    values = configs.to_dict(PretrainConfig())
    values["model"]["deepness"] = 3
    with pytest.raises(UserError, match=r"run x.*deepness"):
        configs.from_dict(PretrainConfig, values, "run x")


def test_flags_say_what_a_table_says() -> None:
    values = {"depth": 3, "json": True, "model_tag": None, "sample_prompts": ["a", "b"], "total_batch_size": -1}
    config = configs.parse_flags(PretrainConfig, configs.flags_of(values), "nanochat pretrain")
    assert config.model.depth == 3
    assert config.json
    assert config.occasions.sample_prompts == ("a", "b")
    assert config.batch.total_batch_size == -1


@pytest.mark.parametrize("name", COMMANDS)
def test_groups_of_settings_stay_small_and_every_field_is_explained(name: str) -> None:
    import inspect

    def check(group: type) -> None:
        fields = dataclasses.fields(group)
        hints = typing.get_type_hints(group)
        assert len(fields) <= MOST_FIELDS, f"{group.__name__} has {len(fields)} fields"
        source = inspect.getsource(group)
        for field in fields:
            if dataclasses.is_dataclass(hints[field.name]):
                check(typing.cast("type", hints[field.name]))
                continue
            after = source.split(f"\n    {field.name}:", 1)[1]
            assert '"""' in after.split("\n    def ")[0], f"{group.__name__}.{field.name} is not explained"

    check(COMMANDS[name].config_class())


def test_records_are_read_while_a_line_is_being_written(tmp_path: Path) -> None:
    log = records.Records(tmp_path)
    log.write("step", step=1)
    log.write("save", step=1)
    with (tmp_path / records.RECORDS_NAME).open("a") as file:
        file.write('{"kind": "step", "st')
    assert [record["kind"] for record in records.read(tmp_path)] == ["step", "save"]
    assert [record["step"] for record in records.read(tmp_path, "save")] == [1]
    assert list(records.read(tmp_path / "nowhere")) == []
