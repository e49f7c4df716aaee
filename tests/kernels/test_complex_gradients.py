"""The kernels, which know real numbers only, on complex gradients, in Triton's interpreter."""

import pytest
import torch

from tritonddp.kernels import reference
from tritonddp.kernels.complex import REAL, ComplexBuffer, on_real_parts
from tritonddp.kernels.device_tables import ALIGNMENT
from tritonddp.kernels.dispatch import select
from tritonddp.kernels.flat_buffer import Layout
from tritonddp.kernels.flatten import flatten
from tritonddp.kernels.unflatten import unflatten

SHAPES = [(3, 5), (), (0,), (40,), (2, 3, 4)]
STRIDES = [(1, 3), (), (1,), (1,), (12, 1, 3)]
KERNELS = {"triton": (flatten, unflatten), "reference": (reference.flatten, reference.unflatten)}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_complex_gradients_go_through_the_buffer_and_back(dtype, kernels):
    into, out = map(on_real_parts, KERNELS[kernels])
    layout = Layout.of(SHAPES, STRIDES, ALIGNMENT, headers=3)
    flat = ComplexBuffer(layout, dtype, torch.device("cpu"))
    grads = [
        torch.empty_strided(shape, strides, dtype=dtype).copy_(torch.randn(shape, dtype=dtype))
        for shape, strides in zip(SHAPES, STRIDES, strict=True)
    ]
    grads[3] = None
    used = [True, True, True, False, True]

    into(flat, grads, used, 0.5, b"\1\2\3")

    assert flat.data.dtype == REAL[dtype]
    assert flat.flags.tolist() == [1, 1, 1, 0, 1]
    assert flat.headers.tolist() == [1, 2, 3]
    for view, grad in zip(flat.views, grads, strict=True):
        assert torch.equal(view, torch.zeros_like(view) if grad is None else grad * 0.5)
        assert grad is None or view.stride() == grad.stride()
    halves = [None if grad is None else grad * 0.5 for grad in grads]
    into(flat, [flat.views[0], *halves[1:]], used, 2.0, b"\1\2\3")  # the first one in place
    targets = [None if grad is None else torch.zeros_like(grad) for grad in grads]
    out(flat, targets, torch.tensor([3.0], dtype=torch.float64))
    for target, grad in zip(targets, grads, strict=True):
        assert grad is None or torch.equal(target, grad * 3)
    out(flat, flat.views, torch.tensor([3.0], dtype=torch.float64))
    for view, grad in zip(flat.views, grads, strict=True):  # in place
        assert grad is None or torch.equal(view, grad * 3)


def test_a_part_of_a_complex_buffer_is_the_same_memory():
    layout = Layout.of([(3,), (2, 2), (5,)], [(1,), (2, 1), (1,)], alignment=1)
    flat = ComplexBuffer(layout, torch.complex64, torch.device("cpu"))
    grads = [torch.randn(2, 2, dtype=torch.complex64), torch.randn(5, dtype=torch.complex64)]
    part = flat.part(1, 3)
    select(torch.device("cpu"), torch.complex64).flatten(part, grads, [True, True], 1.0)
    assert torch.equal(flat.views[0], torch.zeros(3))
    assert all(map(torch.equal, flat.views[1:], grads))
    flat.write_trailer([True, False, True], b"")
    assert flat.flags.tolist() == [1, 0, 1]
