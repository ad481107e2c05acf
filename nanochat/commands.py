"""The subcommands: name, config, stage and one line of help. Names only, nothing is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    """One subcommand: ``module:attribute`` of its config, and the module whose ``run`` does it."""

    config: str
    module: str
    help: str

    def config_class(self) -> type[Any]:
        module, _, name = self.config.partition(":")
        found: type[Any] = getattr(importlib.import_module(module), name)
        return found

    def stage(self) -> Callable[..., Any]:
        """``run(config, context) -> result`` of the stage; loads what it needs."""
        run: Callable[..., Any] = importlib.import_module(self.module).run
        return run


def _stage(config: str, module: str, help: str) -> Command:
    return Command(f"nanochat.stages.configs:{config}", module, help)


def _watching(config: str, module: str, help: str) -> Command:
    return Command(f"nanochat.watching.configs:{config}", module, help)


COMMANDS: dict[str, Command] = {
    "dataset": Command(
        "nanochat.stages.dataset_config:DatasetConfig",
        "nanochat.stages.dataset",
        "make data sets of text and look into them",
    ),
    "tokenizer": _stage("TokenizerConfig", "nanochat.stages.tokenizer", "train a tokenizer"),
    "pretrain": _stage("PretrainConfig", "nanochat.stages.pretrain", "train a base model on text"),
    "sft": _stage("SftConfig", "nanochat.stages.sft", "teach a base model to chat"),
    "evaluate": _stage("EvaluateConfig", "nanochat.stages.evaluate", "measure a model"),
    "generate": _stage("GenerateConfig", "nanochat.stages.generate", "continue a text or answer a message"),
    "chat": _stage("ChatConfig", "nanochat.stages.chat", "talk to a chat model"),
    "plan": _stage("PlanConfig", "nanochat.stages.plan", "every number that follows from --depth"),
    "import": _stage("ImportConfig", "nanochat.stages.import_family", "import a folder of the nanochat family"),
    "status": _watching("StatusConfig", "nanochat.stages.status", "how a run stands, while it runs and after"),
    "runs": _watching("RunsConfig", "nanochat.stages.runs", "list all runs"),
    "report": _watching("ReportConfig", "nanochat.stages.report", "write a run's report and loss curve"),
    "attach": _watching("AttachConfig", "nanochat.stages.attach", "follow a detached run"),
    "run": _stage("RunConfig", "nanochat.recipe", "run a recipe, such as demo, stage by stage"),
}
