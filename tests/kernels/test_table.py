"""The device tables: rows of chunks, addresses, uploads."""

from types import SimpleNamespace

import pytest
import torch
from poisoned import dense

from tritonddp.kernels import launch
from tritonddp.kernels.device_tables import DeviceTables
from tritonddp.kernels.flat_buffer import FlatBuffer, Layout


def flat_of(numels, alignment=16, headers=0) -> FlatBuffer:
    slots = [dense([numel]) for numel in numels]
    shapes, strides = [shape for shape, _ in slots], [stride for _, stride in slots]
    layout = Layout.of(shapes, strides, alignment, headers)
    return FlatBuffer(layout, torch.float32, torch.device("cpu"))


def test_offsets_of_more_than_32_bits_do_not_wrap():
    # Only the layout is used: nothing is allocated.
    layout = Layout.of([(2**33 - 1,), (5,)], [(1,), (1,)], 16)
    rows = DeviceTables(flat_of([3]))._rows(SimpleNamespace(layout=layout), 2**20)
    assert rows[-2].tolist() == [0, 2**33 - 2**20, 2**33 - 2**20, 2**20 - 1]
    assert rows[-1].tolist() == [1, 0, 2**33, 5]


@pytest.mark.parametrize("slots", [1, 17, 256])
def test_changed_addresses_are_arguments_of_a_launch_and_not_uploaded(slots):
    tables = DeviceTables(flat_of([4] * slots, headers=2))
    memory = torch.ones(2, slots, 4)
    tables.update([None] * slots, [True] * slots, 1 / 3, b"\1\2")
    rest = tables.dynamic[slots:].clone()
    before, launches = tables.uploads, launch.launches
    for number, grads in enumerate([memory[0], memory[1], memory[0]]):
        missing = [*grads[1:], None] if number == 2 else list(grads)
        tables.update(missing)
        expected = [0 if grad is None else grad.data_ptr() for grad in missing]
        assert tables.dynamic[:slots].tolist() == tables.addresses == expected
        assert torch.equal(tables.dynamic[slots:], rest)
    assert tables.uploads == before
    assert tables.moves == launch.launches - launches == 3
    tables.update(list(memory[1]), [False] * slots)  # flags have changed, too
    assert tables.uploads == before + 1


def test_more_addresses_than_a_launch_may_have_arguments_are_uploaded():
    tables = DeviceTables(flat_of([1] * 257))
    memory = torch.ones(2, 257, 1)
    for grads in memory:
        tables.update(list(grads), [True] * 257, 1.0)
        assert tables.dynamic[:257].tolist() == [grad.data_ptr() for grad in grads]
    assert (tables.uploads, tables.moves) == (2, 0)
