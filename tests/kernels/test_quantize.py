"""The quantizing kernels, in Triton's interpreter, and their twins: bits and rounding errors."""

import math
from types import SimpleNamespace

import pytest
import torch
from against_twins import like
from hypothesis import given, settings
from hypothesis import strategies as st
from poisoned import dense
from quantized_ranks import (
    Guarded,
    all_reduce,
    assert_same_messages,
    assert_same_residuals,
    exchange,
    gather,
    quantized_buffers,
)
from torch import Tensor

from tritonddp.kernels import launch
from tritonddp.kernels.quantized import reference
from tritonddp.kernels.quantized.code import BLOCK, INT4, INT8, BlockCode
from tritonddp.kernels.quantized.dequantize import dequantize
from tritonddp.kernels.quantized.quantize import QuantizedTables, quantize
from tritonddp.kernels.quantized.reduce_parts import reduce_parts

# The interpreter uses numpy, which warns about infinities and NaNs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Sizes close to a block, to a chunk of 512 and to a 16-wide tail; quantized and exact.
SLOTS = [dense([1000]), dense([0]), dense([5]), dense([17, 9], [1, 0]), dense([]), dense([256])]
QUANTIZED = [True, True, False, True, False, True]


def gradients(seed):
    """Numbers of one magnitude, some of them -0.0."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for shape, stride in SLOTS:
        content = torch.randn(math.prod(shape), generator=generator)
        content[::7] = -0.0
        result.append(content.as_strided(shape, stride))
    return result


@pytest.mark.parametrize("scale", [0.5, 4.0, 0.375, -0.5, math.inf])
def test_the_twin_scales_large_gradients_as_the_kernel_does(monkeypatch, scale):
    monkeypatch.setattr(reference, "_LARGE", 1)
    mine, twins = (Guarded(like(SLOTS), QUANTIZED, 2, feedback=True) for _ in range(2))
    for flat in mine.flats:
        flat.tables = QuantizedTables(flat, block=512)
    for step in range(4):  # a factor makes the first numbers subnormal
        for flat, twin in zip(mine.flats, twins.flats, strict=True):
            grads = gradients(flat.rank + 2 * step)
            if step < 2:
                grads = [grad * 2.0**-146 for grad in grads]
            if step == 3:
                grads[3] = None
            used = [True, True, True, step != 3, True, True]
            quantize(flat, grads, used, scale, bytes(6))
            reference.quantize(twin, grads, used, scale, bytes(6))
            assert_same_messages(flat.message, twin.message, flat)
            assert_same_residuals(flat, twin)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_message_of_a_direct_exchange_is_that_of_the_twin(rank):
    flat, twin = (
        quantized_buffers(like(SLOTS), QUANTIZED, 2, is_direct=True)[rank] for _ in range(2)
    )
    own = [3, 4, 5] if rank else [0, 1, 2]
    for step in range(2):
        grads, used = gradients(step), [True, True, step == 0, True, True, True]
        quantize(flat, grads, used, 0.5, bytes(range(6)))
        reference.quantize(twin, grads, used, 0.5, bytes(range(6)))
        assert torch.equal(flat.received, twin.received)
        assert flat.outgoing.trailers.tolist() == [[*map(int, used), *own]]
        assert_same_residuals(flat, twin)


def test_a_number_times_its_scale_is_exact():
    # Otherwise a fused multiply-add would change the bits.
    flat = quantized_buffers([torch.empty(1 << 16)], [True], 1)[0]
    grad = torch.randn(1 << 16) * torch.logspace(-30, 30, 1 << 16)
    reference.quantize(flat, [grad], [True], 1.0, bytes(3))
    numbers, scales = flat.outgoing.numbers.double(), flat.outgoing.scales.double()
    assert scales.min() > 0
    products = numbers * scales[..., None]
    assert torch.equal(products.float().double(), products)


def test_missing_gradients_are_zeros_for_every_scale_and_need_no_launch_to_read():
    slots = [dense([300]), dense([40])]
    for quantized in ([True, False], [False, True]):
        flat = quantized_buffers(like(slots), quantized, 1)[0]
        quantize(flat, [None, None], [False, False], math.nan, bytes(3))
        assert flat.outgoing.exact.count_nonzero() == 0
        assert flat.outgoing.scales.count_nonzero() == 0
        exchange([flat])
        reduce_parts(flat)
        gather([flat])
        before = launch.launches
        dequantize(flat, [None, None])
        assert launch.launches == before


@pytest.mark.parametrize("run", [quantize, reference.quantize], ids=["kernel", "twin"])
def test_parts_of_a_buffer_fill_the_same_message_as_the_whole(run):
    grads, headers = gradients(0), bytes([1, 2, 3, 0, 0, 0])
    whole, cut = (quantized_buffers(like(SLOTS), QUANTIZED, 2)[0] for _ in range(2))
    run(whole, grads, [True] * 6, 0.5, headers)
    for first, last in [(0, 3), (3, 6)]:
        run(cut.part(first, last), grads[first:last], [True] * 3, 0.5)
    assert cut.outgoing.trailers.count_nonzero() == 0
    cut.write_trailer([True] * 6, headers)
    assert torch.equal(whole.message, cut.message)
    assert_same_residuals(whole, cut)


# Rounding errors, and what is exact

_TINY = torch.finfo(torch.float32).tiny

# Sizes close to blocks, and to the alignment of exact elements.
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


# Codes of blocks

CODES = pytest.mark.parametrize("code", [INT8, INT4], ids=lambda code: code.name)
IN_TRITON = SimpleNamespace(quantize=quantize, reduce_parts=reduce_parts, dequantize=dequantize)


@CODES
def test_each_number_is_read_as_it_was_written(code: BlockCode) -> None:
    numbers = torch.arange(-code.limit, code.limit + 1).repeat(2 * BLOCK)[: 3 * BLOCK].view(3, -1)
    codes, found = torch.empty(3, code.nbytes, dtype=code.dtype), torch.empty_like(numbers)
    code.write(codes, numbers)
    code.read(found, codes)
    assert torch.equal(found, numbers)


@CODES
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_have_the_same_bits_on_all_ranks_and_in_torch_and_triton(
    code: BlockCode, ranks: int
) -> None:
    torch.manual_seed(0)
    like = [torch.empty(700), torch.empty(30), torch.empty(3_000)]
    flats = [quantized_buffers(like, [True, False, True], ranks, code=code) for _ in range(2)]
    for _ in range(3):  # with residuals of the step before
        grads = [[torch.randn_like(each) for each in like] for _ in range(ranks)]
        mine = all_reduce(flats[0], grads, kernels=reference)
        for each in (*mine, *all_reduce(flats[1], grads, kernels=IN_TRITON)):
            assert all(map(torch.equal, each, mine[0]))
        exact = [sum(each[slot] for each in grads) for slot in range(3)]
        torch.testing.assert_close(mine[0][1], exact[1])
        assert 0 < (mine[0][2] - exact[2]).norm() < 4 / code.limit * mine[0][2].norm()
