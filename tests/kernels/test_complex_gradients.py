"""The buffer of a bucket of complex gradients, which kernels see as real numbers."""

import torch

from tritonddp.kernels.complex import ComplexBuffer
from tritonddp.kernels.dispatch import select
from tritonddp.kernels.flat_buffer import Layout


def test_a_part_of_a_complex_buffer_is_the_same_memory():
    layout = Layout.of([(3,), (2, 2), (5,)], [(1,), (2, 1), (1,)], alignment=1)
    flat = ComplexBuffer(layout, torch.complex64, torch.device("cpu"))
    grads = [torch.randn(2, 2, dtype=torch.complex64), torch.randn(5, dtype=torch.complex64)]
    flat.data.zero_()
    part = flat.part(1, 3)
    select(torch.device("cpu"), torch.complex64).flatten(part, grads, [True, True], 1.0)
    assert torch.equal(flat.views[0], torch.zeros(3))
    assert all(map(torch.equal, flat.views[1:], grads))
    flat.write_trailer([True, False, True], b"")
    assert flat.flags.tolist() == [1, 0, 1]
