"""The layout of a flat buffer and its trailer."""

import pytest
import torch

from tritonddp.kernels.complex import ComplexBuffer
from tritonddp.kernels.dispatch import select
from tritonddp.kernels.flat_buffer import DTYPES, FlatBuffer, Layout

CPU = torch.device("cpu")


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("headers", [0, 1, 13, 12 * 1024])
def test_headers_follow_the_flags_and_the_end_is_aligned(headers, alignment):
    layout = Layout.of([(3,), (17,)], [(1,), (1,)], alignment, headers)
    flat = FlatBuffer(layout, torch.float32, CPU)
    assert layout.headers == len(flat.headers) == headers
    end = layout.flags_offset + 2 + headers
    assert end <= layout.numel < end + alignment
    assert layout.numel % alignment == 0
    for view in flat.views:  # without gaps these elements are not zero
        view.zero_()
    flat.flags.fill_(1)
    flat.headers.fill_(2)
    expected = [0.0] * layout.flags_offset + [1.0] * 2 + [2.0] * headers
    assert flat.data[:end].tolist() == expected
    assert flat.data[end:].count_nonzero() == 0


@pytest.mark.parametrize("wire", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 9])
def test_the_sum_over_ranks_shows_which_rank_noted_which_slot(size, wire):
    total = None
    for rank in range(size):
        flat = FlatBuffer(Layout.of([(3,)] * 3, [(1,)] * 3, 16, 7 + size), wire, CPU)
        flat.write_trailer([True] * 3, [255] * 7 + [0] * size)
        assert not any(each.any() for each in flat.not_finite(size))
        if rank != 1:
            flat.note_not_finite(torch.tensor([rank == 0, False, True]), rank, size)
        total = flat.data if total is None else total.add_(flat.data)
    flat.data.copy_(total)
    which, ranks = flat.not_finite(size)
    assert which.tolist() == [True, False, True]
    assert ranks.tolist() == [rank != 1 for rank in range(size)]


def test_a_part_of_a_complex_buffer_is_the_same_memory():
    layout = Layout.of([(3,), (2, 2), (5,)], [(1,), (2, 1), (1,)], alignment=1)
    flat = ComplexBuffer(layout, torch.complex64, CPU)
    grads = [torch.randn(2, 2, dtype=torch.complex64), torch.randn(5, dtype=torch.complex64)]
    flat.data.zero_()
    select(CPU, torch.complex64).flatten(flat.part(1, 3), grads, [True, True], 1.0)
    assert torch.equal(flat.views[0], torch.zeros(3))
    assert all(map(torch.equal, flat.views[1:], grads))
    flat.write_trailer([True, False, True], b"")
    assert flat.flags.tolist() == [1, 0, 1]
