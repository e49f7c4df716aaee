"""Sums of squares that kernels leave beside what they move: in Triton's interpreter, and twins."""

import math
from types import ModuleType

import pytest
import torch
from poisoned import SLOTS, dense, embedded_flat, embedded_gradients

from tritonddp.kernels import flatten as flatten_module
from tritonddp.kernels import reference
from tritonddp.kernels import unflatten as unflatten_module
from tritonddp.kernels.complex import ComplexBuffer, on_real_parts
from tritonddp.kernels.device_tables import DeviceTables
from tritonddp.kernels.flat_buffer import DTYPES, FlatBuffer, Layout, Squares

# The interpreter is numpy, which warns of the infinities and NaNs that are the point here.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PAIRS = [(grad, wire) for grad in DTYPES for wire in DTYPES]
FLATTEN = pytest.mark.parametrize("kernels", [flatten_module, reference], ids=["triton", "twin"])
UNFLATTEN = pytest.mark.parametrize(
    "kernels", [unflatten_module, reference], ids=["triton", "twin"]
)


def buffer(wire: torch.dtype, kernels: ModuleType, slots=SLOTS) -> FlatBuffer:
    flat, _ = embedded_flat(slots, wire)
    flat.squares = Squares()
    if kernels is not reference:
        flat.tables = DeviceTables(flat, block=256)
    return flat


def gradients(dtype: torch.dtype, aligned: bool = True, slots=SLOTS) -> list[torch.Tensor]:
    grads, _ = embedded_gradients(slots, dtype, aligned)
    for seed, grad in enumerate(grads):
        generator = torch.Generator().manual_seed(seed)
        grad.copy_(torch.randn(grad.shape, generator=generator))
    return grads


def expected(grads) -> float:
    return sum(grad.double().square().sum().item() for grad in grads if grad is not None)


def tolerance(*dtypes: torch.dtype) -> float:
    # Of what is written in 16 bits, each number is rounded by itself; sums are in fp32.
    return 1e-3 if any(dtype.itemsize == 2 for dtype in dtypes) else 2e-6


def total(squares: torch.Tensor | None) -> float:
    return squares.double().sum().item()


@FLATTEN
def test_squares_are_those_of_the_last_launch_whatever_was_prepared_before(kernels):
    slots = [dense([300]), dense([20])]
    flat = buffer(torch.float32, kernels, slots)
    for aligned in (True, False, True):
        for dtype in (torch.float32, torch.float64):
            for factor in (1, 2):
                grads = gradients(dtype, aligned, slots)
                grads[0].mul_(factor)
                kernels.flatten(flat, grads, [True, True], 0.5)
                assert total(flat.squares.flattened[0]) == pytest.approx(expected(grads))


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("place", [(0, 3), (2, 299), (3, 16)], ids=str)
@UNFLATTEN
def test_what_is_not_finite_is_in_the_sum(kernels, place, value):
    slots = [dense([5]), dense([0]), dense([300]), dense([17])]
    flat = buffer(torch.float32, kernels, slots)
    for view in flat.views:
        view.fill_(1)
    flat.views[place[0]][place[1]] = value
    flat.flags.fill_(1)
    kernels.unflatten(flat, gradients(torch.float32, slots=slots))
    assert not math.isfinite(total(flat.squares.unflattened))


@UNFLATTEN
def test_an_infinite_factor_leaves_no_nan_where_there_is_no_number(kernels):
    flat = buffer(torch.float32, kernels, [dense([5])])
    flat.views[0].fill_(1)
    flat.flags.fill_(1)
    grads = gradients(torch.float32, slots=[dense([5])])
    kernels.unflatten(flat, grads, torch.tensor([math.inf], dtype=torch.float64))
    assert total(flat.squares.unflattened) == math.inf


@pytest.mark.parametrize("kernels", [(flatten_module, unflatten_module), (reference, reference)])
def test_both_parts_of_complex_numbers_count(kernels):
    layout = Layout.of([(40,), (3, 5)], [(1,), (5, 1)], 16, 2)
    flat = ComplexBuffer(layout, torch.complex64, torch.device("cpu"))
    flat.squares = Squares()
    grads = [torch.full((40,), 3 + 4j), torch.full((3, 5), 1j)]
    on_real_parts(kernels[0].flatten)(flat, grads, [True, True], 0.5, [1, 2])
    assert total(flat.squares.flattened[0]) == pytest.approx(25 * 40 + 15)
    on_real_parts(kernels[1].unflatten)(flat, grads)
    assert total(flat.squares.unflattened) == pytest.approx((25 * 40 + 15) / 4)


def test_the_twin_sums_the_parts_of_a_buffer_one_by_one():
    flat, grads = buffer(torch.float32, reference), gradients(torch.float32)
    for first, last in ((0, 9), (9, len(SLOTS))):
        part = flat.part(first, last)
        reference.flatten(part, grads[first:last], [True] * (last - first), 1 / 3)
    assert sorted(flat.squares.flattened) == [0, 9]
    for first, last in ((0, 9), (9, len(SLOTS))):
        found = total(flat.squares.flattened[first])
        assert found == pytest.approx(expected(grads[first:last]), rel=2e-6)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("numel", [0, 1, 4096, 100_000, 3_000_001])
def test_norms_on_the_cpu_are_the_same_bits_by_any_number_of_threads(numel, threads):
    line = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    one = reference.norm_of(line)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert reference.norm_of(line) == one == reference.norms_of([line])[0]
    finally:
        torch.set_num_threads(before)
    assert one.item() == pytest.approx(line.double().norm().item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.complex128], ids=str)
def test_norms_of_tensors_of_any_kind(dtype):
    tensors = [
        torch.randn(200, 50, dtype=dtype),
        torch.randn(50, 200, dtype=dtype).t(),
        torch.randn(7, dtype=dtype).conj(),
        torch.randn(9, 9, dtype=dtype)[::2],
        torch.randn((), dtype=dtype),
        torch.sparse_coo_tensor(
            torch.tensor([[1, 1, 3]]), torch.randn(3, 4, dtype=dtype), (5, 4), check_invariants=True
        ),
    ]
    for norm, tensor in zip(reference.norms_of(tensors), tensors, strict=True):
        wide = torch.complex128 if dtype.is_complex else torch.float64
        dense = tensor.to_dense() if tensor.is_sparse else tensor
        assert norm.dim() == 0
        assert norm.dtype is (
            torch.float64 if dtype.itemsize // (1 + dtype.is_complex) == 8 else torch.float32
        )
        rel = 1e-2 if dtype.itemsize == 2 and tensor.is_sparse else 1e-5  # duplicates are added up
        assert norm.item() == pytest.approx(dense.to(wide).norm().item(), rel=rel)
