"""Flat buffers, their device tables, and the kernels that flatten and unflatten.

The kernels run in Triton's interpreter.
"""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from against_twins import fill
from poisoned import (
    assert_gaps_intact,
    assert_same_bits,
    dense,
    embedded_flat,
    embedded_gradients,
    values,
)

from tritonddp.kernels import launch, reference
from tritonddp.kernels.complex import ComplexBuffer
from tritonddp.kernels.device_tables import DeviceTables
from tritonddp.kernels.dispatch import select
from tritonddp.kernels.flat_buffer import DTYPES, FlatBuffer, Layout
from tritonddp.kernels.flatten import FLAG_BLOCK, flatten
from tritonddp.kernels.unflatten import JointUnflatten, unflatten

# The interpreter uses numpy, which warns about infinities and NaNs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32
WIRE = pytest.mark.parametrize("wire", DTYPES, ids=str)


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


@WIRE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_twin_casts_large_gradients_in_pieces_with_the_same_bits(monkeypatch, dtype, wire):
    slots = [dense([5000]), dense([]), dense([8, 3, 5, 5], [0, 2, 3, 1]), dense([30, 40], [1, 0])]
    grads = [values(math.prod(shape), dtype, n).view(shape) for n, (shape, _) in enumerate(slots)]
    whole, _ = embedded_flat(slots, wire)
    pieces, memory = embedded_flat(slots, wire)
    reference.flatten(whole, grads, [True] * 4, 1 / 3)
    monkeypatch.setattr(reference, "_SMALL", 0)
    monkeypatch.setattr(reference, "_CAST", 384)
    reference.flatten(pieces, grads, [True] * 4, 1 / 3)
    for slot, (view, expected) in enumerate(zip(pieces.views, whole.views, strict=True)):
        assert_same_bits(view, expected, f"slot {slot}")
    memory.assert_guards_intact("the flat buffer")
    with pytest.raises(RuntimeError):
        reference.flatten(pieces, [values(4999, dtype, 0), None, None, None], [True] * 4, 1.0)


@WIRE
def test_flags_of_several_programs_and_of_empty_gradients_are_written(wire):
    # Three programs of flags, the last one partly filled, and no chunk.
    slots = [dense([0])] * (2 * FLAG_BLOCK + 3)
    flat, memory = embedded_flat(slots, wire)
    used = [slot % 3 == 0 for slot in range(len(slots))]
    before = launch.launches
    flatten(embedded_flat([], wire)[0], [], [], 1.0)
    assert launch.launches == before
    flatten(flat, [torch.empty(0)] * len(slots), used, 1.0)
    assert launch.launches - before == 1
    assert flat.tables.num_chunks == 0
    assert flat.flags.tolist() == list(map(float, used))
    assert_gaps_intact(flat)
    memory.assert_guards_intact("the flat buffer")


# Device tables: rows of chunks, addresses, uploads


def flat_of(numels, headers=0) -> FlatBuffer:
    return embedded_flat([dense([numel]) for numel in numels], FP32, headers=headers)[0]


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


# Unflatten, also several buffers in one launch


def factor_of(value: float | None) -> torch.Tensor | None:
    return None if value is None else torch.tensor([value], dtype=torch.float64)


def reduced(slots, wire=FP32) -> FlatBuffer:
    """A flat buffer after an all-reduce."""
    flat, _ = embedded_flat(slots, wire)
    flat.tables = DeviceTables(flat, block=256)
    fill(flat)
    return flat


def test_a_view_whose_data_was_replaced_is_written_in_its_new_memory():
    slots = [dense([20]), dense([30])]
    flat, twin = reduced(slots), reduced(slots)
    unflatten(flat, flat.views, factor_of(0.5))
    flat.views[1].data = moved = torch.zeros(30)
    unflatten(flat, flat.views, factor_of(0.5))
    assert_same_bits(flat.views[0], twin.views[0] * 0.25)
    assert_same_bits(moved, twin.views[1] * 0.25)


SEVERAL = [[dense([20]), dense([0]), dense([300])], [dense([5, 7], [1, 0])], [dense([1000])] * 2]


def several(wires=(BF16,) * 3):
    """Reduced buffers, their gradients, and copies of the gradients for the twin."""
    flats = [reduced(slots, wire) for slots, wire in zip(SEVERAL, wires, strict=True)]
    flats[2].flags[1] = 0
    grads, twins = ([embedded_gradients(slots, FP32)[0] for slots in SEVERAL] for _ in range(2))
    return flats, grads, twins


def assert_as_alone(flats, joint, grads, twins, factor=None) -> int:
    """Compare a joint launch with one launch per buffer; return its number of launches."""
    for flat, each in zip(flats, twins, strict=True):
        reference.unflatten(flat, each, factor)
    before = launch.launches
    joint(grads, factor)
    for found, expected in zip(itertools.chain(*grads), itertools.chain(*twins), strict=True):
        if found is not None:
            assert_same_bits(found, expected)
    return launch.launches - before


@pytest.mark.parametrize("factor", [None, 1 / 3], ids=str)
def test_several_buffers_are_unflattened_in_one_launch_with_the_same_bits(factor):
    flats, *_ = several()
    joint = JointUnflatten(flats)
    for _ in range(2):  # the second time at other addresses
        _, grads, twins = several()
        grads[0][0] = twins[0][0] = None
        for flat, each in zip(flats, grads, strict=True):
            flat.tables.update(each)
        moves = [flat.tables.moves for flat in flats]
        assert assert_as_alone(flats, joint, grads, twins, factor_of(factor)) == 1
        assert [flat.tables.moves for flat in flats] == moves
    assert not any(flat.tables.uploads for flat in flats)
    # The tables do not have these gradients: one more launch for each table.
    _, grads, twins = several()
    assert assert_as_alone(flats, joint, grads, twins, factor_of(factor)) == 1 + 3


def test_buffers_of_different_kinds_are_unflattened_one_by_one():
    for wires in [(BF16, FP32, BF16), (BF16,) * 3]:
        flats, grads, twins = several(wires)
        if len(set(wires)) == 1:
            for each in (grads, twins):
                each[1] = [grad.double() for grad in each[1]]
        launches = assert_as_alone(flats, JointUnflatten(flats), grads, twins)
        assert launches == 3 + sum(flat.tables.moves for flat in flats)


def test_several_buffers_of_views_are_scaled_together_in_place():
    (flats, *_), (twins, *_) = several(), several()
    joint = JointUnflatten(flats)
    for factor in (None, factor_of(1 / 3)):
        before = launch.launches
        joint([flat.views for flat in flats], factor)
        assert launch.launches - before == 1
        for flat, twin in zip(flats, twins, strict=True):
            reference.unflatten(twin, twin.views, factor)
            assert_same_bits(flat.payload, twin.payload)
    was = flats[1].payload.clone()
    joint([flats[0].views, [None], flats[2].views], factor_of(0.5))
    assert_same_bits(flats[1].payload, was)  # it has no gradients
