"""Block-quantized reduction in plain torch: its rounding errors, and what is exact."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_ranks import all_reduce, quantized_buffers
from torch import Tensor

from tritonddp.kernels.quantized.buffer import MessageLayout, Quantization, QuantizedBuffer
from tritonddp.kernels.quantized.code import BLOCK, INT8

_TINY = torch.finfo(torch.float32).tiny

# Sizes next to those of blocks, and to the alignment of exact elements.
_numels = st.sampled_from([0, 1, 15, 16, 17, 255, 256, 257, 511, 512, 513, 1_000, 2_600])
_slots = st.lists(st.tuples(_numels, st.booleans()), min_size=1, max_size=6)
# Of the values of a block: zero, subnormal, usual, and the largest.
_magnitudes = st.sampled_from([0.0, 1e-45, 1e-40, 1e-38, 3e-36, 1e-20, 1e-3, 1.0, 1e4, 1e30, 3e38])


def _values(numel: int, magnitude: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(numel, generator=generator) * 2 - 1) * magnitude


def _bounds(values: Tensor) -> Tensor:
    """The most by which each element may be off: half a step of its block, and rounding.

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


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("feedback", [True, False])
def test_a_block_with_a_value_that_is_not_finite_becomes_nan_and_keeps_its_residual(
    value, feedback
):
    numel, size = 5 * BLOCK, 2
    flats = quantized_buffers([torch.empty(numel)], [True], size, feedback)
    all_reduce(flats, [[_values(numel, 1.0, rank)] for rank in range(size)])
    sent = [flat.residuals.sent.clone() for flat in flats] if feedback else None
    owned = torch.cat([flat.residuals.reduced for flat in flats]) if feedback else None
    grads = [[_values(numel, 1.0, 5 + rank)] for rank in range(size)]
    grads[1][0][BLOCK + 3] = value
    for (result,) in all_reduce(flats, grads):
        is_nan = result.view(-1, BLOCK).isnan()
        assert is_nan.all(1).tolist() == [False, True, False, False, False]
        assert is_nan.any(1).tolist() == [False, True, False, False, False]
    if feedback:
        for flat, before, changed in zip(flats, sent, [5, 4], strict=True):
            same = (flat.residuals.sent == before).all(1)
            assert (~same).sum() == changed
        after = torch.cat([flat.residuals.reduced for flat in flats])
        assert (after == owned).all(1).tolist() == [False, True, False, False, False]
        # And the next step is right again.
        (result,) = all_reduce(flats, [[torch.ones(numel)]] * size)[0]
        assert (result - 2).abs().max() < 0.5


def test_a_sum_that_overflows_is_nan_though_each_rank_sends_numbers():
    flats = quantized_buffers([torch.empty(BLOCK)], [True], 2)
    results = all_reduce(flats, [[torch.full((BLOCK,), 3e38)]] * 2)
    assert all(result.isnan().all() for (result,) in results)
    assert flats[0].residuals.reduced.count_nonzero() == 0


@pytest.mark.parametrize("value", [-1e-40, -0.0, 1e-45])
def test_what_is_too_small_for_a_scale_is_zero_and_stays_in_the_residual(value):
    flats = quantized_buffers([torch.empty(BLOCK)], [True], 1)
    ((result,),) = all_reduce(flats, [[torch.full((BLOCK,), value)]])
    assert result.count_nonzero() == 0
    assert torch.equal(flats[0].residuals.sent, torch.full((1, BLOCK), value))


@settings(max_examples=100, deadline=None)
@given(slots=_slots, size=st.integers(1, 5), header=st.integers(0, 14))
def test_a_message_has_the_size_of_the_docstring_and_one_place_for_each_element(
    slots, size, header
):
    numels, quantized = [n for n, _ in slots], [flag for _, flag in slots]
    layout = MessageLayout(numels, quantized, size, header * size)
    blocks = sum(-(-n // 256) for n, flag in slots if flag)
    exact = sum(-(-n // 16) * 16 for n, flag in slots if not flag)
    part_blocks, part_exact = math.ceil(blocks / size), math.ceil(exact / size / 16) * 16
    part = 256 * part_blocks + -(-4 * part_blocks // 16) * 16 + 4 * part_exact
    trailer = -(-(len(slots) + header) // 16) * 16
    assert layout.gathered_numel == size * part
    assert layout.stride == part + trailer
    assert sum(map(layout.owned_blocks, range(size))) == blocks
    pieces, places = list(layout.pieces(0, len(slots))), set()
    expected = [0] * len(slots)  # the next element of each slot
    for piece in pieces:
        is_quantized = quantized[piece.slot]
        assert piece.start == expected[piece.slot]
        assert piece.start % (256 if is_quantized else 16) == 0
        expected[piece.slot] += piece.numel
        length = -(-piece.numel // 256) if is_quantized else piece.numel
        places |= {(is_quantized, piece.part, piece.place + i) for i in range(length)}
    assert expected == numels
    assert len(places) == blocks + sum(n for n, flag in slots if not flag)


def test_a_buffer_that_is_not_of_fp32_is_refused():
    flat = quantized_buffers([torch.empty(3)], [True], 1)[0]
    quantization = Quantization(flat.message_layout, 0, None)
    with pytest.raises(ValueError, match=r"torch\.float32, not torch\.bfloat16"):
        QuantizedBuffer(quantization, flat.layout, torch.bfloat16, torch.device("cpu"))
