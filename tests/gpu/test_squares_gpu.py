"""Sums of squares that the compiled kernels leave beside what they move, on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from poisoned import SLOTS, assert_same_bits, dense, embedded_flat, embedded_gradients
from test_kernels_gpu import kernels, strided

from tritonddp.kernels import launch
from tritonddp.kernels.flat_buffer import DTYPES, Squares

__all__ = ["kernels"]  # a fixture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# Each takes a compilation: tests/kernels/test_squares.py has all pairs.
PAIRS = [(each, each) for each in DTYPES] + [(FP32, BF16), (BF16, FP32), (FP32, FP16)]
LARGE = [dense([300_001]), dense([7]), dense([1024, 513]), dense([1])]


def filled(dtype, aligned, slots):
    grads, _ = embedded_gradients(slots, dtype, aligned, "cuda")
    for seed, grad in enumerate(grads):
        generator = torch.Generator().manual_seed(seed)
        grad.copy_(torch.randn(grad.shape, generator=generator))
    return grads


def expected(grads) -> float:
    return sum(grad.double().square().sum().item() for grad in grads if grad is not None)


def total(squares) -> float:
    assert squares.is_cuda
    assert squares.dtype in (torch.float32, torch.float64)
    return squares.double().sum().item()


@pytest.mark.parametrize("slots", [SLOTS, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    ("dtype", "wire", "aligned"),
    [*((*pair, True) for pair in PAIRS), (DTYPES[0], DTYPES[0], False)],
    ids=str,
)
def test_flatten_sums_squares_before_scaling_and_moves_the_same_bits(
    kernels, dtype, wire, aligned, slots
):
    grads = filled(dtype, aligned, slots)
    grads[-1] = None
    flat, _ = embedded_flat(slots, wire, "cuda")
    plain, _ = embedded_flat(slots, wire, "cuda")
    flat.squares = Squares()
    used = [True] * len(slots)
    kernels.flatten(plain, grads, used, 0.25)
    before = launch.launches
    kernels.flatten(flat, grads, used, 0.25)
    assert launch.launches == before + 1
    for slot, (view, twin) in enumerate(zip(flat.views, plain.views, strict=True)):
        assert_same_bits(view, twin, f"slot {slot}")
    # Sums are in fp32, or in fp64 of fp64.
    assert total(flat.squares.flattened[0]) == pytest.approx(expected(grads), rel=2e-6)
    first = flat.squares.flattened[0].clone()
    kernels.flatten(flat, grads, used, 0.25)
    assert torch.equal(flat.squares.flattened[0], first), "the order of the sum is not fixed"


@pytest.mark.parametrize("value", [None, 0.3], ids=["plain", "scaled"])
@pytest.mark.parametrize("slots", [SLOTS, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(("dtype", "wire"), PAIRS, ids=str)
def test_unflatten_sums_the_squares_of_what_it_leaves(kernels, dtype, wire, slots, value):
    flat, _ = embedded_flat(slots, wire, "cuda")
    for view, grad in zip(flat.views, filled(wire, True, slots), strict=True):
        view.copy_(grad)
    flat.flags.fill_(1)
    grads = filled(dtype, True, slots)
    plain = filled(dtype, True, slots)
    factor = None if value is None else torch.tensor([value], dtype=torch.float64, device="cuda")
    flat.squares = Squares()  # before the first launch, which chooses the kernel
    before = launch.launches
    kernels.unflatten(flat, grads, factor)
    assert launch.launches == before + 1
    without, _ = embedded_flat(slots, wire, "cuda")
    without.data.copy_(flat.data)
    kernels.unflatten(without, plain, factor)
    for slot, (grad, twin) in enumerate(zip(grads, plain, strict=True)):
        assert_same_bits(grad, twin, f"slot {slot}")
    assert total(flat.squares.unflattened) == pytest.approx(expected(grads), rel=2e-6)


@pytest.mark.parametrize("value", [None, 0.5], ids=str)
@pytest.mark.parametrize("wire", DTYPES, ids=str)
def test_views_are_scaled_and_summed_where_they_are(kernels, wire, value):
    flat, _ = embedded_flat(SLOTS, wire, "cuda")
    strided(flat)
    for view, grad in zip(flat.views, filled(wire, True, SLOTS), strict=True):
        view.copy_(grad)
    flat.squares = Squares()
    factor = None if value is None else torch.tensor([value], dtype=torch.float64, device="cuda")
    kernels.unflatten(flat, flat.views, factor)
    assert total(flat.squares.unflattened) == pytest.approx(expected(flat.views), rel=2e-6)
