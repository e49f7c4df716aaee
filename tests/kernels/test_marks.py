"""Which gradients the kernels mark as not finite: in Triton's interpreter, and their twins."""

import math

import pytest
import torch
from poisoned import dense, embedded_flat
from quantized_ranks import exchange, quantized_buffers

from tritonddp.kernels import flatten as flatten_module
from tritonddp.kernels import reference
from tritonddp.kernels.complex import ComplexBuffer, on_real_parts
from tritonddp.kernels.flat_buffer import FlatBuffer, Layout, Marks
from tritonddp.kernels.quantized import quantize as quantize_module
from tritonddp.kernels.quantized import reference as quantize_reference

# The interpreter is numpy, which warns of the infinities and NaNs that are the point here.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

KERNELS = pytest.mark.parametrize("kernels", [flatten_module, reference], ids=["triton", "twin"])
QUANTIZING = pytest.mark.parametrize(
    "kernels", [quantize_module, quantize_reference], ids=["triton", "twin"]
)

# Around the edges of chunks of 256 and of the 16-wide tail, empty, scalar, in another memory order.
SLOTS = [dense([1000]), dense([0]), dense([5]), dense([17, 9], [1, 0]), dense([]), dense([256])]
NUMELS = [math.prod(shape) for shape, _ in SLOTS]


def ones(dtype=torch.float32):
    return [
        torch.ones(n, dtype=dtype).as_strided(*each) for n, each in zip(NUMELS, SLOTS, strict=True)
    ]


def spoil(grad, place, value):
    grad.as_strided((grad.numel(),), (1,))[place] = value


@KERNELS
def test_what_overflows_in_the_dtype_on_the_wire_is_marked(kernels):
    flat, _ = embedded_flat(SLOTS, torch.float16, marks=Marks(1, 2))
    grads = ones()
    grads[0][3], grads[5][8] = 131_000.0, 132_000.0
    kernels.flatten(flat, grads, [True] * 6, 0.5)
    assert flat.marked() == {5: [1]}


@pytest.mark.parametrize("number", [complex(math.nan, 0), complex(0, math.inf)], ids=str)
@KERNELS
def test_both_parts_of_complex_numbers_are_looked_at(kernels, number):
    layout = Layout.of([(40,), (30,)], [(1,), (1,)], 16, 2, Marks(1, 2))
    flat = ComplexBuffer(layout, torch.complex64, torch.device("cpu"))
    grads = [torch.ones(40, dtype=torch.complex64), torch.ones(30, dtype=torch.complex64)]
    grads[1][29] = number
    on_real_parts(kernels.flatten)(flat, grads, [True, True], 1.0, [1, 2])
    assert flat.marked() == {1: [1]}
    assert flat.headers.tolist() == [1, 2]


@QUANTIZING
def test_a_part_of_a_quantised_buffer_marks_slots_of_its_own(kernels):
    (flat,) = quantized_buffers(ones(), [True] * 6, 1, has_marks=True)
    grads = ones()
    spoil(grads[0], 500, math.inf)
    grads[4].fill_(math.nan)
    for first, last in ((3, 6), (0, 3)):
        part = flat.part(first, last)
        kernels.quantize(part, grads[first:last], [True] * 3, 1.0)
    exchange([flat])
    assert flat.marked() == {0: [0], 4: [0]}


def test_a_buffer_of_headers_alone_marks_nothing():
    layout = Layout.of([], [], 1, 2, Marks(0, 1))
    flat = FlatBuffer(layout, torch.float32, torch.device("cpu"))
    reference.flatten(flat, [], [], 1.0, [3, 4])
    assert flat.marked() == {}
    assert flat.headers.tolist() == [3, 4]
