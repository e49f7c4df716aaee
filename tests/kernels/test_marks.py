"""Which gradients the kernels mark as not finite: in Triton's interpreter, and their twins."""

from __future__ import annotations

import math

import pytest
import torch
from poisoned import assert_gaps_intact, assert_same_bits, dense, embedded_flat
from quantized_ranks import exchange, quantized_buffers

from tritonddp.kernels import flatten as flatten_module
from tritonddp.kernels import reference
from tritonddp.kernels.complex import ComplexBuffer, on_real_parts
from tritonddp.kernels.device_tables import DeviceTables
from tritonddp.kernels.flat_buffer import DTYPES, FlatBuffer, Layout, Marks
from tritonddp.kernels.quantized import quantize as quantize_module
from tritonddp.kernels.quantized import reference as quantize_reference
from tritonddp.kernels.quantized.quantize import QuantizedTables

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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("wire", DTYPES, ids=str)
@KERNELS
def test_a_number_that_is_not_finite_marks_its_gradient_wherever_it_is(kernels, wire, value):
    marks = Marks(rank=11, world_size=19)
    flat, memory = embedded_flat(SLOTS, wire, headers=3, marks=marks)
    flat.tables = DeviceTables(flat, block=256) if kernels is flatten_module else None
    places = [(0, 0), (0, 255), (0, 256), (0, 999), (2, 4), (3, 100), (3, 152), (4, 0), (5, 255)]
    for slot, place in places:
        grads = ones(wire)
        spoil(grads[slot], place, value)
        kernels.flatten(flat, grads, [True] * 6, 0.5, [1, 2, 3])
        assert flat.marked() == {slot: [11]}, place
    assert flat.flags.tolist() == [1] * 6
    assert flat.headers.tolist() == [1, 2, 3]
    kernels.flatten(flat, ones(wire), [True] * 6, 0.5, [1, 2, 3])
    assert flat.marked() == {}, "marks of an earlier reduction"
    assert_gaps_intact(flat)
    memory.assert_guards_intact("the flat buffer")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@KERNELS
def test_large_numbers_are_finite_and_so_is_what_does_not_count(kernels, dtype):
    # Their sum is not.
    flat, _ = embedded_flat(SLOTS, dtype, marks=Marks(0, 1))
    largest = torch.finfo(dtype).max
    grads = [torch.full_like(grad, largest) for grad in ones(dtype)]
    grads[4] = None
    kernels.flatten(flat, grads, [True] * 6, 1.0)
    assert flat.marked() == {}
    kernels.flatten(flat, [None] * 6, [True] * 6, math.nan)
    assert flat.marked() == {}


@KERNELS
def test_what_overflows_in_the_dtype_on_the_wire_is_marked(kernels):
    flat, _ = embedded_flat(SLOTS, torch.float16, marks=Marks(1, 2))
    grads = ones()
    grads[0][3], grads[5][8] = 131_000.0, 132_000.0
    kernels.flatten(flat, grads, [True] * 6, 0.5)
    assert flat.marked() == {5: [1]}


@pytest.mark.parametrize("wire", DTYPES, ids=str)
def test_what_is_written_is_what_is_written_without_marks(wire):
    grads = [grad * math.pi for grad in ones()]
    flat, _ = embedded_flat(SLOTS, wire, marks=Marks(0, 2))
    plain, _ = embedded_flat(SLOTS, wire)
    flatten_module.flatten(flat, grads, [True] * 6, 1 / 3)
    flatten_module.flatten(plain, grads, [True] * 6, 1 / 3)
    for view, expected in zip(flat.views, plain.views, strict=True):
        assert_same_bits(view, expected)


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


def test_a_poisoned_buffer_keeps_no_marks_of_the_reduction_before():
    flat, _ = embedded_flat(SLOTS, torch.bfloat16, marks=Marks(rank=9, world_size=19))
    flat.marks.fill_(255)  # those of all ranks, once reduced
    flat.fill_nan()
    assert flat.marked() == {slot: [9] for slot in range(6)}


def test_the_twin_marks_the_parts_of_a_buffer_one_by_one():
    flat, _ = embedded_flat(SLOTS, torch.float32, headers=1, marks=Marks(0, 1))
    grads = ones()
    grads[2][1], grads[5][1] = math.nan, math.inf
    for first, last in ((0, 3), (3, 6)):
        reference.flatten(flat.part(first, last), grads[first:last], [True] * 3, 1.0)
    flat.write_trailer([True] * 6, [9])
    assert flat.marked() == {2: [0], 5: [0]}
    assert flat.headers.tolist() == [9]


def test_a_buffer_of_headers_alone_marks_nothing():
    layout = Layout.of([], [], 1, 2, Marks(0, 1))
    flat = FlatBuffer(layout, torch.float32, torch.device("cpu"))
    reference.flatten(flat, [], [], 1.0, [3, 4])
    assert flat.marked() == {}
    assert flat.headers.tolist() == [3, 4]


@pytest.mark.parametrize("numbers", [torch.int8, torch.float8_e4m3fn], ids=str)
@QUANTIZING
def test_every_rank_learns_what_each_has_quantised(kernels, numbers):
    quantized = [True, True, False, True, False, True]
    flats = quantized_buffers(ones(), quantized, numbers, 3, has_marks=True)
    found = [{}, {0: 999, 2: 4}, {0: 0, 3: 152, 4: 0}]
    for step in range(3):
        for rank, flat in enumerate(flats):
            if kernels is quantize_module:
                flat.tables = QuantizedTables(flat, block=512)
            grads = ones()
            for slot, place in found[rank].items() if step == 1 else ():
                spoil(grads[slot], place, (math.nan, math.inf)[rank % 2])
            headers = bytes(3 * rank) + bytes([rank + 1] * 3) + bytes(3 * (2 - rank))
            kernels.quantize(flat, grads, [True] * 6, 1 / 3, headers)
        exchange(flats)
        for flat in flats:
            marked = flat.marked()
            assert marked == ({0: [1, 2], 2: [1], 3: [2], 4: [2]} if step == 1 else {})
            quantize_reference.reduce_parts(flat)
            assert flat.flags.tolist() == [3] * 6
            assert flat.headers.tolist() == [1] * 3 + [2] * 3 + [3] * 3
    flats[1].fill_nan()
    exchange(flats)
    assert flats[0].marked() == {slot: [1] for slot in range(6)}


@QUANTIZING
def test_a_part_of_a_quantised_buffer_marks_slots_of_its_own(kernels):
    (flat,) = quantized_buffers(ones(), [True] * 6, torch.int8, 1, has_marks=True)
    grads = ones()
    spoil(grads[0], 500, math.inf)
    grads[4].fill_(math.nan)
    for first, last in ((3, 6), (0, 3)):
        part = flat.part(first, last)
        kernels.quantize(part, grads[first:last], [True] * 3, 1.0)
    exchange([flat])
    assert flat.marked() == {0: [0], 4: [0]}
