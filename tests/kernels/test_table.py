"""The device tables: chunk rows, addresses, uploads."""

import struct
from types import SimpleNamespace

import pytest
import torch
from poisoned import dense

from tritonddp.kernels import device_tables, launch
from tritonddp.kernels.device_tables import DeviceTables
from tritonddp.kernels.flat_buffer import FlatBuffer, Layout


def flat_of(numels, alignment=16, headers=0) -> FlatBuffer:
    slots = [dense([numel]) for numel in numels]
    shapes, strides = [shape for shape, _ in slots], [stride for _, stride in slots]
    layout = Layout.of(shapes, strides, alignment, headers)
    return FlatBuffer(layout, torch.float32, torch.device("cpu"))


def scale_in(tables: DeviceTables) -> float:
    return struct.unpack("<d", struct.pack("<q", int(tables.dynamic[-1])))[0]


def test_offsets_of_more_than_32_bits_do_not_wrap():
    # The layout is used alone, without so much memory.
    layout = Layout.of([(2**33 - 1,), (5,)], [(1,), (1,)], 16)
    rows = DeviceTables(flat_of([3]))._rows(SimpleNamespace(layout=layout), 2**20)
    assert rows[-2].tolist() == [0, 2**33 - 2**20, 2**33 - 2**20, 2**20 - 1]
    assert rows[-1].tolist() == [1, 0, 2**33, 5]


def test_arguments_that_do_not_fit_are_errors():
    for block in (0, 8, 24, 100, -64):
        with pytest.raises(ValueError, match=f"power of two.*{block}"):
            DeviceTables(flat_of([4]), block)
    with pytest.raises(ValueError, match=r"slot 1 starts at element 5 .*alignment=16"):
        DeviceTables(flat_of([5, 5], alignment=1))
    tables = DeviceTables(flat_of([4, 4]))
    with pytest.raises(ValueError, match="2 slots, but got 1 gradients"):
        tables.update([None])
    with pytest.raises(ValueError, match="2 slots, but got 3 flags"):
        tables.update([None, None], [True] * 3, 1.0)
    with pytest.raises(ValueError, match="room for 0 headers, but got 1"):
        tables.update([None, None], [True] * 2, 1.0, [1])
    tables._device_number = 0  # as on a GPU: meta tensors have the number of the CPU
    with pytest.raises(TypeError, match="slot 1 is on meta, but its buffer is on cpu"):
        tables.update([torch.ones(4), torch.ones(4, device="meta")])


@pytest.mark.parametrize("slots", [1, 16, 17, 64, 65, 256])
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


@pytest.mark.parametrize("what", ["run", "upload"])
def test_tables_are_written_again_after_a_failed_launch_or_upload(monkeypatch, what):
    tables = DeviceTables(flat_of([4]))
    grads = [[torch.ones(4)] for _ in range(3)]
    tables.update(grads[0], [True], 1.0)

    def fail(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(launch if what == "run" else device_tables, what, fail)
        with pytest.raises(MemoryError):
            tables.update(grads[1], [True], 1.0 if what == "run" else 2.0)
    tables.dynamic.zero_()  # its content is unknown
    tables.update(grads[0], [True], 1.0)
    assert tables.dynamic[:2].tolist() == [grads[0][0].data_ptr(), 1]
    assert scale_in(tables) == 1.0
