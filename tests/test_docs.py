"""Docs that cannot rot: what they show is what the program prints."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from nanochat.commands import COMMANDS

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_the_page_of_commands_is_what_the_commands_say() -> None:
    spec = importlib.util.spec_from_file_location("write_command_docs", ROOT / "tools" / "write_command_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "commands.md").read_text(encoding="utf-8") == module.text(), (
        "docs/commands.md is old: run python tools/write_command_docs.py"
    )


@pytest.mark.parametrize("page", sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("*.md")))
def test_commands_named_in_pages_exist(page: str) -> None:
    named = set(re.findall(r"^\s*(?:\.venv/bin/)?nanochat (\w+)", (ROOT / page).read_text(encoding="utf-8"), re.M))
    assert named <= set(COMMANDS), f"{page} names commands that do not exist: {named - set(COMMANDS)}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page} links to {target}, which is not there"
