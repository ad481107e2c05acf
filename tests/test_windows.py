"""Attention by blocks computes what the plain one does, in every shape, and holds no square of the text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from largest_tensor import largest_tensor
from torch import Tensor

from nanochat.ops import reference, windows
from nanochat.ops.attention import sdpa
from nanochat.ops.windows import windowed

#: Relative to the largest value.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
#: Where scores too are rounded to the narrow dtype, as on accelerators.
NARROW_TOLERANCES = {torch.bfloat16: 5e-2, torch.float16: 5e-3}


def example(
    num_queries: int,
    query_offset: int = 0,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    batch_size: int = 2,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, laid out as the model's projections give them."""
    generator = torch.Generator().manual_seed(0)
    num_keys = query_offset + num_queries
    shapes = [(batch_size, length, n, head_dim) for length, n in zip((num_queries, num_keys), heads, strict=True)]
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in (*shapes, shapes[1]))
    return tuple(x.transpose(1, 2).requires_grad_() for x in (q, k, v))


def all_values(function: object, inputs: tuple[Tensor, ...], window: int, query_offset: int) -> list[Tensor]:
    out = function(*inputs, window, query_offset)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


def assert_equal_to_the_reference(
    inputs: tuple[Tensor, ...], window: int, query_offset: int = 0, tolerance: float | None = None
) -> None:
    tolerance = tolerance or TOLERANCES[inputs[0].dtype]
    expected = all_values(reference.attention, inputs, window, query_offset)
    for name, ours, plain in zip("oqkv", all_values(windowed, inputs, window, query_offset), expected, strict=True):
        assert ours.dtype == plain.dtype
        torch.testing.assert_close(ours, plain, rtol=0, atol=tolerance * max(1, plain.abs().max().item()), msg=name)


@settings(max_examples=60, deadline=None)
@given(
    num_queries=st.integers(1, 23),
    query_offset=st.integers(0, 13),
    window=st.integers(0, 40),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1), (1, 1)]),
    block=st.integers(1, 9),
)
def test_blocks_of_any_size_equal_the_reference(
    num_queries: int, query_offset: int, window: int, heads: tuple[int, int], block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "BLOCK_QUERIES", block)
        assert_equal_to_the_reference(example(num_queries, query_offset, heads), window, query_offset)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_every_dtype_and_usual_head_dims_equal_the_reference(dtype: torch.dtype, head_dim: int) -> None:
    assert_equal_to_the_reference(example(333, 0, (2, 1), head_dim, dtype, batch_size=1), 130)


@pytest.mark.parametrize("dtype", list(NARROW_TOLERANCES))
def test_products_in_the_narrow_dtype_stay_near_the_reference(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "_product_dtype", lambda x: x.dtype)
    assert_equal_to_the_reference(example(200, 7, dtype=dtype), 50, 7, NARROW_TOLERANCES[dtype])


def test_derivatives_equal_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "BLOCK_QUERIES", 3)
    inputs = example(7, 2, (2, 1), 4, torch.float64, batch_size=1)
    assert torch.autograd.gradcheck(lambda *inputs: windowed(*inputs, 4, 2), inputs)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_the_operators_keep_torchs_rules(heads: tuple[int, int]) -> None:
    inputs = example(9, heads=heads)
    torch.library.opcheck(windows._forward, (*inputs, 3, 0))
    constants = tuple(x.detach() for x in inputs)
    for layout in (constants, tuple(x.contiguous() for x in constants)):
        torch.library.opcheck(windows._gradients, (torch.rand_like(layout[0]), *layout, 3, 0))


@pytest.mark.slow
def test_blocks_compile_into_one_graph_that_computes_the_same() -> None:
    inputs = example(200)
    compiled = torch.compile(sdpa, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(all_values(compiled, inputs, 60, 0), all_values(windowed, inputs, 60, 0))


@pytest.mark.parametrize("query_offset", [0, 500])
def test_nothing_grows_with_the_square_of_the_text(query_offset: int) -> None:
    window, num_queries = 100, 1500
    inputs = example(num_queries, query_offset, (1, 1), batch_size=1)
    block = windows.BLOCK_QUERIES
    largest = largest_tensor(lambda: all_values(sdpa, inputs, window, query_offset))
    assert largest <= max(block * (window + block), inputs[1].numel())
    assert largest_tensor(lambda: all_values(reference.attention, inputs, window, query_offset)) >= num_queries**2


def test_a_window_hides_all_keys_before_it() -> None:
    q, k, v = (x.detach() for x in example(300))
    far, near = v.clone(), v.clone()
    far[:, :, :99] = torch.nan
    near[:, :, 99] += 1
    window = 200
    last = windowed(q, k, v, window)[:, :, 299]
    assert not torch.equal(windowed(q, k, near, window)[:, :, 299], last)
    torch.testing.assert_close(sdpa(q[:, :, 299:], k, far, window, 299), last[:, :, None])
