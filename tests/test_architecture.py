"""The house keeps its shape: imports go down only, importing costs nothing, devices stay in their room."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "nanochat"

#: From the top down; a room may import itself and what stands below it, never what stands beside it.
FLOORS = [
    {"__main__"},
    {"cli"},
    {"recipe", "__init__"},
    {"closing"},
    {"commands"},
    {"stages"},
    {"evaluation", "interop"},
    {"train"},
    {"inference"},
    {"forecast"},
    {"plan"},
    {"watching"},
    {"optim", "checkpoint"},
    {"model"},
    {"data"},
    {"tokenizer"},
    {"ops"},
    {"hardware"},
    {"context"},
    {"config", "records", "provenance", "paths", "terminal", "atomic"},
    {"processes"},
    {"errors"},
]
FLOOR_OF = {room: number for number, floor in enumerate(FLOORS) for room in floor}
#: Without torch, whatever is in them.
LIGHT = [
    "nanochat",
    "nanochat.cli",
    "nanochat.plan",
    "nanochat.stages.configs",
    "nanochat.stages.plan",
    "nanochat.forecast.memory",
    "nanochat.forecast.files",
    "nanochat.forecast.run",
    "nanochat.forecast.speed",
    "nanochat.recipe",
]
#: Files that stages may import: settings and what they share, not stages.
SHARED_IN_STAGES = {"configs", "dataset_config", "settings", "origin", "sft_preparation"}
#: Model shapes and costs are numbers that plans and importers ask for without the model itself.
NUMBERS = {"nanochat.model.config", "nanochat.model.cost"}


def modules() -> list[tuple[str, Path]]:
    return [(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts), path) for path in PACKAGE.rglob("*.py")]


def imports(path: Path) -> set[str]:
    """Every module of ours that a file imports, lazily or not."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module == "nanochat":
                found |= {f"nanochat.{alias.name}" for alias in node.names if alias.name != "__version__"}
    return {name for name in found if name.startswith("nanochat.")}


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_go_down_only(module: str, path: Path) -> None:
    own = room(module)
    for imported in imports(path):
        other = room(imported)
        assert other in FLOOR_OF, f"{imported} has no floor in the house: add it to FLOORS"
        if own == other or (module == "nanochat.__init__" and other == "inference"):
            continue
        assert FLOOR_OF[own] < FLOOR_OF[other], f"{module} imports {imported}, which does not stand below it"


def test_stages_never_import_each_other() -> None:
    for module, path in modules():
        if not module.startswith("nanochat.stages."):
            continue
        others = {name.split(".")[2] for name in imports(path) if name.startswith("nanochat.stages.")}
        assert others <= SHARED_IN_STAGES, f"{module} imports another stage: {others - SHARED_IN_STAGES}"


@pytest.mark.parametrize("module", LIGHT)
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = (
        f"import {module}, sys; heavy = [m for m in ('torch', 'numpy', 'pyarrow', 'tiktoken', 'rich.console',"
        " 'huggingface_hub') if m in sys.modules]; print(heavy); import logging; assert not logging.root.handlers"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    allowed = [] if module in ("nanochat", "nanochat.cli") else ["rich.console"]
    assert [name for name in ast.literal_eval(printed) if name not in allowed] == []


def test_device_names_stay_in_the_hardware_room() -> None:
    device = re.compile(r"torch\.(cuda|mps|version)\b|[\"'](cuda|mps|rocm|xpu)[\"':]")
    for module, path in modules():
        if room(module) != "hardware":
            found = device.search(path.read_text())
            assert found is None, f"{module} names a device: {found.group(0)}"


def test_there_are_no_rooms_for_odds_and_ends() -> None:
    names = {part for module, _ in modules() for part in module.split(".")}
    assert not names & {"utils", "util", "common", "helpers", "misc"}
