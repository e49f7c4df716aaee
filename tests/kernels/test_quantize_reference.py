"""Block-quantized reduction in plain torch: its rounding errors, and what is exact."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_ranks import all_reduce, quantized_buffers
from torch import Tensor

from tritonddp.kernels.quantized.code import BLOCK, INT8

_TINY = torch.finfo(torch.float32).tiny

# Sizes close to those of blocks, and to the alignment of exact elements.
_numels = st.sampled_from([0, 1, 15, 16, 17, 255, 256, 257, 511, 512, 513, 1_000, 2_600])
_slots = st.lists(st.tuples(_numels, st.booleans()), min_size=1, max_size=6)
# Magnitudes of a block: zero, subnormal, usual, and the largest.
_magnitudes = st.sampled_from([0.0, 1e-45, 1e-40, 1e-38, 3e-36, 1e-20, 1e-3, 1.0, 1e4, 1e30, 3e38])


def _values(numel: int, magnitude: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(numel, generator=generator) * 2 - 1) * magnitude


def _bounds(values: Tensor) -> Tensor:
    """The largest error of each element: half a step of its block, and rounding.

    Blocks whose scale would be subnormal are zeros.
    """
    padded = torch.zeros(-(-len(values) // BLOCK) * BLOCK, dtype=torch.float64)
    padded[: len(values)] = values
    blocks = padded.view(-1, BLOCK)
    amax = blocks.abs().amax(1, keepdim=True)
    scale = amax / INT8.limit
    error = (scale / 2).expand_as(blocks) + amax * 2**-21
    return torch.where(scale < _TINY, amax, error).reshape(-1)[: len(values)]


@settings(max_examples=50, deadline=None)
@given(
    slots=_slots, magnitudes=st.lists(_magnitudes, min_size=1, max_size=4), size=st.integers(1, 4)
)
def test_the_error_of_each_block_is_bounded_and_all_ranks_get_the_same_bits(
    slots, magnitudes, size
):
    # Each rank rounds what it sends, and the owner of a block rounds the sum.
    like = [torch.empty(numel) for numel, _ in slots]
    quantized = [flag for _, flag in slots]
    grads = [
        [
            _values(numel, magnitudes[(rank + slot) % len(magnitudes)] / size, 10 * rank + slot)
            for slot, (numel, _) in enumerate(slots)
        ]
        for rank in range(size)
    ]
    results = all_reduce(quantized_buffers(like, quantized, size), grads)
    for slot, is_quantized in enumerate(quantized):
        mine, found = [each[slot] for each in grads], [each[slot] for each in results]
        if is_quantized:
            exactly = sum(each.double() for each in mine)
            error = sum(_bounds(each) for each in mine)
            error = error + _bounds(exactly.abs() + error)
            off = (found[0].double() - exactly).abs()
            assert (off <= error).all(), f"slot {slot} is off by up to {(off / error).max()}"
        else:
            assert torch.equal(found[0], sum(mine)), f"slot {slot} should be exact"
        assert all(torch.equal(each, found[0]) for each in found), f"slot {slot}"


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_block_with_a_value_that_is_not_finite_becomes_nan_and_keeps_its_residual(value):
    numel, size = 5 * BLOCK, 2
    flats = quantized_buffers([torch.empty(numel)], [True], size)
    all_reduce(flats, [[_values(numel, 1.0, rank)] for rank in range(size)])
    sent = [flat.residuals.sent.clone() for flat in flats]
    owned = torch.cat([flat.residuals.reduced for flat in flats])
    grads = [[_values(numel, 1.0, 5 + rank)] for rank in range(size)]
    grads[1][0][BLOCK + 3] = value
    for (result,) in all_reduce(flats, grads):
        is_nan = result.view(-1, BLOCK).isnan()
        assert is_nan.all(1).tolist() == [False, True, False, False, False]
        assert is_nan.any(1).tolist() == [False, True, False, False, False]
    for flat, before, changed in zip(flats, sent, [5, 4], strict=True):
        same = (flat.residuals.sent == before).all(1)
        assert (~same).sum() == changed
    after = torch.cat([flat.residuals.reduced for flat in flats])
    assert (after == owned).all(1).tolist() == [False, True, False, False, False]
    # The next step is right again.
    (result,) = all_reduce(flats, [[torch.ones(numel)]] * size)[0]
    assert (result - 2).abs().max() < 0.5


@pytest.mark.parametrize("value", [-1e-40, -0.0, 1e-45])
def test_a_block_that_is_too_small_for_a_scale_is_sent_as_zeros_and_stays_in_the_residual(value):
    flats = quantized_buffers([torch.empty(BLOCK)], [True], 1)
    ((result,),) = all_reduce(flats, [[torch.full((BLOCK,), value)]])
    assert result.count_nonzero() == 0
    assert torch.equal(flats[0].residuals.sent, torch.full((1, BLOCK), value))
