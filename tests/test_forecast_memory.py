"""The memory of a step is foreseen from the shape alone, as autograd and the allocator have it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from nanochat.errors import UserError
from nanochat.forecast import memory
from nanochat.forecast.files import checkpoint_files, disk_need
from nanochat.forecast.memory import Choices, Memory, activation_bytes, moments, step_memory
from nanochat.model import gpt
from nanochat.model.config import ModelConfig
from nanochat.model.gpt import GPT
from nanochat.model.init import initialize
from nanochat.ops import cross_entropy
from nanochat.optim.groups import Rates, parameter_groups
from nanochat.optim.optimizer import Optimizer
from nanochat.plan import model_config

#: Of the published run (depth 24, T 2048, pattern L, device batch 32, bf16) and of its files.
PUBLISHED_PEAK_BYTES, PEAK_TOLERANCE = 105e9, 0.15
PUBLISHED_MODEL_BYTES, PUBLISHED_OPTIMIZER_BYTES, FILE_TOLERANCE = 4.23e9, 5.74e9, 0.01
PUBLISHED_MODEL = model_config(24, window_pattern="L")

#: Name, tokens of a text, vocabulary, layers, heads, key-value heads, head dim, pattern, rows, several micro-batches.
SHAPES = {
    "equal heads": (96, 700, 3, 4, 4, 32, "L", 3, True),
    "few key-value heads, odd length and vocabulary": (301, 777, 4, 6, 2, 16, "SSL", 2, True),
    "one layer": (100, 300, 1, 2, 1, 32, "L", 4, False),
    "a wide head": (64, 6001, 2, 2, 2, 32, "L", 2, True),
    "hardly any tokens": (16, 500, 3, 4, 2, 32, "L", 1, False),
    "a small vocabulary": (150, 65, 3, 4, 1, 32, "SL", 4, True),
}
#: Share of the measured figure.
KEPT_TOLERANCE, ALLOCATOR_TOLERANCE = 0.01, 0.05


def shape(name: str) -> tuple[ModelConfig, int, bool]:
    length, vocab, layers, heads, kv_heads, head_dim, pattern, rows, accumulate = SHAPES[name]
    return ModelConfig(length, vocab, layers, heads, kv_heads, heads * head_dim, pattern), rows, accumulate


def model_of(config: ModelConfig, dtype: torch.dtype) -> GPT:
    model = GPT(config)
    initialize(model, 0)
    model.set_compute_dtype(dtype)
    return model


def kept_bytes(model: GPT, rows: int) -> int:
    """Bytes of all that autograd keeps of a forward pass, the model's own tensors and the loss aside."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model._rotary)}
    kept: dict[int, torch.Tensor] = {}

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor
        return tensor

    ids = torch.zeros(rows, model.config.sequence_len, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        hidden = model.hidden(ids)
    kept[hidden.untyped_storage().data_ptr()] = hidden
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def allocator_peak_bytes(config: ModelConfig, rows: int, micro_batches: int, dtype: torch.dtype) -> int:
    """The most that is allocated at once while a model is made and trained for two steps."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        model = model_of(config, dtype)
        parameters = dict(model.named_parameters())
        optimizer = Optimizer(parameters, parameter_groups(parameters, Rates(), config.model_dim), compute_dtype=dtype)
        ids = torch.zeros(rows, config.sequence_len, dtype=torch.int64)
        for _ in range(2):
            for _ in range(micro_batches):
                model.losses(ids, ids).mean().backward()
            optimizer.step(1.0, 0.9, 0.1)
            optimizer.zero_grad()
    events = [event for event in measured.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def in_allocator(foreseen: Memory) -> int:
    return foreseen.peak_bytes - foreseen.parts["runtime"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_what_autograd_keeps_is_foreseen(name: str, dtype: str) -> None:
    config, rows, _ = shape(name)
    choices = Choices(dtype, compiled=False, on_cpu=True)
    foreseen = activation_bytes(config, rows, config.sequence_len, choices)
    if dtype == "bfloat16":  # the matrices are kept in it too, all but that of the head
        foreseen += memory.cast_bytes(config, choices) - config.padded_vocab_size * config.model_dim * choices.width
    assert foreseen == pytest.approx(kept_bytes(model_of(config, getattr(torch, dtype)), rows), rel=KEPT_TOLERANCE)


@pytest.mark.parametrize("name", SHAPES)
def test_the_peak_of_a_step_is_foreseen(name: str) -> None:
    config, rows, accumulate = shape(name)
    measured = allocator_peak_bytes(config, rows, 2 if accumulate else 1, torch.float32)
    choices = Choices("float32", compiled=False, accumulate=accumulate, on_cpu=True)
    foreseen = step_memory(config, rows, config.sequence_len, choices)
    assert in_allocator(foreseen) == pytest.approx(measured, rel=ALLOCATOR_TOLERANCE), foreseen


def test_the_peak_with_a_loss_in_chunks_is_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpt, memory):
        monkeypatch.setattr(module, "MOST_LOGITS_AT_ONCE", 2**16)
    for module in (cross_entropy, memory):
        monkeypatch.setattr(module, "CHUNK_LOGITS", 2**15)
    config, rows = ModelConfig(200, 3001, 2, 4, 2, 64, "L"), 3
    measured = allocator_peak_bytes(config, rows, 2, torch.float32)
    choices = Choices("float32", compiled=False, on_cpu=True)
    assert memory.chunks_loss(config, 600, choices)
    foreseen = step_memory(config, rows, config.sequence_len, choices)
    assert in_allocator(foreseen) == pytest.approx(measured, rel=ALLOCATOR_TOLERANCE), foreseen


def test_the_loss_goes_in_chunks_where_the_model_does_so() -> None:
    assert memory.MOST_LOGITS_AT_ONCE == gpt.MOST_LOGITS_AT_ONCE
    assert memory.CHUNK_LOGITS == cross_entropy.CHUNK_LOGITS


def published(attention: memory.AttentionKernel) -> Memory:
    """With the loss at once and no windows, as that run was made: compiled, a fused attention kernel."""
    return step_memory(PUBLISHED_MODEL, 32, 2048, Choices(attention=attention, chunked_loss=False))


def test_the_published_run_comes_out_for_a_fused_kernel() -> None:
    assert published("fused").peak_bytes == pytest.approx(PUBLISHED_PEAK_BYTES, rel=PEAK_TOLERANCE)


def test_the_math_kernel_keeps_the_probabilities_of_every_layer() -> None:
    more = published("math").peak_bytes - published("fused").peak_bytes
    assert more == 24 * 32 * 12 * 2048**2 * 2  # 77 GB


def test_the_published_files_come_out() -> None:
    files = checkpoint_files(PUBLISHED_MODEL, "bfloat16")
    assert files.model_bytes == pytest.approx(PUBLISHED_MODEL_BYTES, rel=FILE_TOLERANCE)
    assert files.optimizer_bytes == pytest.approx(PUBLISHED_OPTIMIZER_BYTES, rel=FILE_TOLERANCE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_and_moments_are_what_the_optimizer_holds(dtype: str) -> None:
    config = ModelConfig(64, 301, 3, 4, 2, 64, "SL")
    model = model_of(config, getattr(torch, dtype))
    parameters = dict(model.named_parameters())
    optimizer = Optimizer(parameters, parameter_groups(parameters, Rates(), config.model_dim))
    choices = Choices(dtype)
    assert memory.weight_bytes(config, choices) == sum(each.nbytes for each in parameters.values())
    assert memory.optimizer_bytes(config, choices) == sum(each.nbytes for each in optimizer.state_tensors().values())


def test_recomputed_activations_keep_one_tensor_of_each_block() -> None:
    config = PUBLISHED_MODEL
    whole, less = (
        activation_bytes(config, 8, 2048, Choices(recompute_activations=recompute)) for recompute in (False, True)
    )
    assert less < whole / 10
    at_peak = step_memory(config, 8, 2048, Choices(recompute_activations=True))
    assert at_peak.peak_bytes < step_memory(config, 8, 2048, Choices()).peak_bytes


def test_every_moment_names_all_parts() -> None:
    for moment in moments(PUBLISHED_MODEL, 1, 2048, Choices()):
        assert sorted(moment.parts) == sorted(memory.PARTS)
        assert all(size >= 0 for size in moment.parts.values()), moment


def test_an_unknown_dtype_is_refused_in_one_sentence() -> None:
    with pytest.raises(UserError, match="choose float32, bfloat16, float16"):
        Choices("int8")


@pytest.mark.parametrize(
    ("save_every", "keep_last", "recovery", "expected"),
    [(None, None, False, 1), (None, None, True, 2), (10, None, False, 10), (10, 3, True, 5), (40, 3, False, 3)],
)
def test_checkpoints_are_counted_when_most_lie_there(
    save_every: int | None, keep_last: int | None, recovery: bool, expected: int
) -> None:
    need = disk_need(PUBLISHED_MODEL, "bfloat16", 100, save_every=save_every, keep_last=keep_last, recovery=recovery)
    assert need.num_checkpoints == expected
    assert need.needed_bytes == expected * need.checkpoint.total_bytes
    assert need.fits is None


def test_free_space_is_that_of_the_nearest_folder_there_is(tmp_path: Path) -> None:
    need = disk_need(PUBLISHED_MODEL, "bfloat16", 100, folder=tmp_path / "not" / "yet" / "made")
    assert need.free_bytes is not None
    assert need.fits == (need.needed_bytes <= need.free_bytes)
