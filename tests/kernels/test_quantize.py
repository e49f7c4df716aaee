"""The three quantizing kernels, in Triton's interpreter, and their twins in plain torch."""

import math

import pytest
import torch
from against_twins import like
from poisoned import dense
from quantized_ranks import (
    Guarded,
    assert_same_messages,
    assert_same_residuals,
    exchange,
    gather,
    quantized_buffers,
)

from tritonddp.kernels import launch
from tritonddp.kernels.quantized import reference
from tritonddp.kernels.quantized.dequantize import dequantize
from tritonddp.kernels.quantized.quantize import QuantizedTables, quantize
from tritonddp.kernels.quantized.reduce_parts import reduce_parts

# The interpreter uses numpy, which warns about infinities and NaNs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Sizes close to those of blocks, chunks of 512 and 16-wide tails; quantized and exact.
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
