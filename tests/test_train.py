"""The one loop: occasions around updates, one loss however a batch is split, and going on when compiling fails."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nanochat.errors import UserError
from nanochat.model.config import ModelConfig
from nanochat.model.gpt import GPT
from nanochat.model.init import initialize
from nanochat.optim.groups import Rates, parameter_groups
from nanochat.optim.optimizer import Optimizer
from nanochat.records import Records, read
from nanochat.terminal import Terminal
from nanochat.train.interrupt import Interruption, StopRequested
from nanochat.train.loop import LoopState, NotFinite, Occasion, train
from nanochat.train.step import StepRates, Trainer
from nanochat.train.watch import RunLog, guarded, sample_hook, validate_hook

CONFIG = ModelConfig(sequence_len=16, vocab_size=50, num_layers=3, num_heads=2, num_kv_heads=1, model_dim=32)
CPU = torch.device("cpu")
RATES = StepRates(1.0, 0.9, 0.01)
#: Losses of two ways to compute one step, relative.
FIRST_STEP_TOLERANCE = 1e-5
#: Fifty losses of two ways to split a batch, with everything in float64.
TRAJECTORY_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Rows:
    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]


@dataclass
class Source:
    """The same rows every step, split into micro-batches of given sizes."""

    steps: int
    sizes: Sequence[int] = (4,)
    seed: int = 0
    rates_seen: list[int] = field(default_factory=list)

    def finished(self, step: int) -> bool:
        return step >= self.steps

    def rates(self, step: int) -> StepRates:
        self.rates_seen.append(step)
        return RATES

    def next_step(self) -> list[Rows]:
        return list(micro_batches(self.sizes, self.seed))

    def where(self) -> str:
        return "row group 7"


def micro_batches(sizes: Sequence[int], seed: int) -> Iterator[Rows]:
    """Rows with very different numbers of targets, so that a mean of means would be wrong."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 50, (sum(sizes), 17))
    targets = tokens[:, 1:].copy()
    for row in range(0, len(targets), 2):
        targets[row, 2:] = -1
    edges = [0, *itertools.accumulate(sizes)]
    for begin, end in itertools.pairwise(edges):
        yield Rows(tokens[begin:end, :-1].copy(), targets[begin:end])


def trainer(dtype: torch.dtype = torch.float32, **settings: object) -> Trainer:
    model = GPT(CONFIG)
    model.set_compute_dtype(dtype)
    initialize(model, seed=3)
    parameters = dict(model.named_parameters())
    # A projection of zeros would leave most gradients at zero in the first step.
    with torch.no_grad():
        for name, parameter in parameters.items():
            if "c_proj" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)) * 0.1)
    optimizer = Optimizer(parameters, parameter_groups(parameters, Rates(), CONFIG.model_dim), compute_dtype=dtype)
    return Trainer(model, optimizer, CPU, **settings)  # type: ignore[arg-type]


def run_loop(steps: int, hooks: Sequence[object] = (), source: Source | None = None) -> tuple[LoopState, list[float]]:
    losses: list[float] = []
    state = LoopState()
    finished = train(
        trainer(),
        source or Source(steps),
        state=state,
        hooks=hooks,  # type: ignore[arg-type]
        report=lambda step: losses.append(step.result.loss),
        synchronize=lambda: None,
        interruption=Interruption(lambda _: None),
    )
    assert finished
    return state, losses


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_n_updates_have_n_plus_1_occasions(steps: int) -> None:
    seen: list[tuple[int, bool]] = []
    state, losses = run_loop(steps, [lambda occasion: seen.append((occasion.step, occasion.last))])
    assert seen == [(step, step == steps) for step in range(steps + 1)]
    assert len(losses) == steps
    assert state.step == steps
    assert state.tokens == steps * 4 * 16


def test_an_occasion_comes_before_its_update() -> None:
    made = trainer()
    before = made.model.lm_head.weight.detach().clone()
    seen: list[bool] = []
    train(
        made,
        Source(1),
        state=LoopState(),
        hooks=[lambda _: seen.append(torch.equal(before, made.model.lm_head.weight))],
        report=lambda _: None,
        synchronize=lambda: None,
        interruption=Interruption(lambda _: None),
    )
    assert seen == [True, False]


def due(every: int | None, steps: int, *, at_start: bool) -> list[int]:
    state = LoopState()
    return [s for s in range(steps + 1) if Occasion(s, s == steps, state).due(every, at_start=at_start)]


def test_validation_is_due_at_the_start_at_intervals_and_at_the_end() -> None:
    assert due(2, 5, at_start=True) == [0, 2, 4, 5]
    assert due(2, 4, at_start=True) == [0, 2, 4]
    assert due(0, 5, at_start=True) == []


def test_saves_and_samples_are_due_at_intervals_and_at_the_end_but_not_at_the_start() -> None:
    assert due(2, 5, at_start=False) == [2, 4, 5]
    assert due(None, 5, at_start=False) == [5]
    assert due(100, 5, at_start=False) == [5]


def test_saves_come_before_evaluations_and_samples(tmp_path: Path) -> None:
    happened: list[tuple[str, int]] = []
    log = RunLog(Records(tmp_path), Terminal())

    def measure() -> float:
        happened.append(("validate", -1))
        return 2.0

    def continue_text(prompt: str) -> str:
        happened.append(("sample", -1))
        return prompt

    hooks = [
        lambda occasion: happened.append(("save", occasion.step)) if occasion.due(2, at_start=False) else None,
        validate_hook(measure, 2, log),
        sample_hook(continue_text, ["a"], 2, log),
    ]
    run_loop(3, hooks)
    assert [name for name, _ in happened] == ["validate", *["save", "validate", "sample"] * 2]
    assert [step for name, step in happened if name == "save"] == [2, 3]
    assert [record["step"] for record in read(tmp_path, "validation")] == [0, 2, 3]


def test_the_best_validation_and_its_step_are_remembered(tmp_path: Path) -> None:
    values = iter([3.0, 1.0, 2.0])
    state, _ = run_loop(2, [validate_hook(lambda: next(values), 1, RunLog(Records(tmp_path), Terminal()))])
    assert (state.best_val_bpb, state.best_val_step) == (1.0, 1)


def gradients(sizes: Sequence[int]) -> tuple[float, dict[str, torch.Tensor]]:
    made = trainer()
    caught: dict[str, torch.Tensor] = {}

    def keep_instead_of_stepping(*_: float) -> None:
        caught.update({name: p.grad.clone() for name, p in made.model.named_parameters() if p.grad is not None})

    made.optimizer.step = keep_instead_of_stepping  # type: ignore[method-assign]
    return made.step(list(micro_batches(sizes, 1)), RATES).loss, caught


@pytest.mark.parametrize("sizes", [(1,) * 8, (5, 3), (7, 1)])
def test_accumulation_equals_one_large_batch(sizes: tuple[int, ...]) -> None:
    whole_loss, whole = gradients((8,))
    split_loss, split = gradients(sizes)
    assert split_loss == pytest.approx(whole_loss, rel=FIRST_STEP_TOLERANCE)
    assert set(split) == set(whole)
    for name, gradient in whole.items():
        # The gradient of backout is a sum that nearly cancels: what is left of it is rounding.
        allowed = 1e-6 if name == "backout_lambda" else FIRST_STEP_TOLERANCE * float(gradient.abs().max())
        assert float((split[name] - gradient).abs().max()) <= allowed, name


def test_fifty_steps_do_not_depend_on_how_the_batch_is_split() -> None:
    def losses(sizes: Sequence[int]) -> list[float]:
        made = trainer(torch.float64)
        return [made.step(list(micro_batches(sizes, step)), RATES).loss for step in range(50)]

    assert losses((5, 3)) == pytest.approx(losses((8,)), rel=TRAJECTORY_TOLERANCE)


def test_training_lowers_the_loss() -> None:
    _, losses = run_loop(20)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_what_is_not_finite_stops_before_the_update_and_is_placed(broken: str) -> None:
    made = trainer()
    if broken == "loss":
        with torch.no_grad():
            made.model.lm_head.weight[0, 0] = float("nan")
    else:
        made.model.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    with pytest.raises(NotFinite, match=rf"{broken} of the update after step 0 .* row group 7"):
        train(
            made,
            Source(3),
            state=LoopState(),
            hooks=[],
            report=lambda _: None,
            synchronize=lambda: None,
            interruption=Interruption(lambda _: None),
        )
    for name, parameter in made.model.named_parameters():
        assert torch.equal(parameter.nan_to_num(), before[name].nan_to_num()), name


def test_a_stop_that_was_asked_for_happens_between_two_steps() -> None:
    interruption = Interruption(lambda _: None)
    state = LoopState()
    seen: list[int] = []

    def hook(occasion: Occasion) -> None:
        seen.append(occasion.step)
        if occasion.step == 2:
            interruption.ask("SIGTERM")

    finished = train(
        trainer(), Source(5), state=state, hooks=[hook], report=lambda _: None, synchronize=lambda: None,
        interruption=interruption,
    )  # fmt: skip
    assert not finished
    assert (state.step, seen) == (2, [0, 1, 2])
    with pytest.raises(KeyboardInterrupt):
        interruption.ask("SIGINT")


def test_a_failing_hook_is_told_once_and_a_stop_passes_through(tmp_path: Path) -> None:
    log = RunLog(Records(tmp_path), Terminal())

    def fail(_: Occasion) -> None:
        raise RuntimeError("broken tracker\nwith a traceback")

    run_loop(3, [guarded("tracking", fail, log)])
    (notice,) = read(tmp_path, "notice")
    assert "broken tracker" in notice["text"]

    def stop(_: Occasion) -> None:
        raise StopRequested

    with pytest.raises(StopRequested):
        guarded("tracking", stop, log)(Occasion(1, False, LoopState()))


def failing_compile(*_: object, **__: object) -> object:
    def losses(*_: object) -> torch.Tensor:
        raise RuntimeError("no compiler today\nand a long traceback")

    return losses


def test_auto_goes_on_uncompiled_with_one_line_when_compiling_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", failing_compile)
    said: list[str] = []
    made = trainer(compile_mode="auto", say=said.append)
    rows = list(micro_batches((4,), 0))
    loss = made.step(rows, RATES).loss
    assert loss == trainer().step(rows, RATES).loss
    assert not made.compiled
    assert len(said) == 1
    assert "no compiler today" in said[0]
    assert "\n" not in said[0]


def test_on_fails_in_one_sentence_when_compiling_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", failing_compile)
    with pytest.raises(UserError, match="no compiler today"):
        trainer(compile_mode="on").step(list(micro_batches((4,), 0)), RATES)


def test_an_obstacle_is_said_once_and_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", failing_compile)
    said: list[str] = []
    made = trainer(compile_mode="auto", obstacle="no C++ compiler was found", say=said.append)
    made.step(list(micro_batches((4,), 0)), RATES)
    assert len(said) == 1
    assert "no C++ compiler" in said[0]
    with pytest.raises(UserError, match="no C\\+\\+ compiler"):
        trainer(compile_mode="on", obstacle="no C++ compiler was found")


def test_validation_between_steps_leaves_no_gradients() -> None:
    made = trainer()
    rows = next(micro_batches((4,), 0))
    losses = made.losses(rows.inputs, rows.targets)
    assert losses.shape == (4, 16)
    assert not losses.requires_grad
    assert all(parameter.grad is None for parameter in made.model.parameters())
