"""The unflatten kernel, in Triton's interpreter, and its twin in plain torch."""

import itertools

import pytest
import torch
from against_twins import fill
from poisoned import assert_same_bits, dense, embedded_flat, embedded_gradients

from tritonddp.kernels import launch, reference
from tritonddp.kernels.device_tables import DeviceTables
from tritonddp.kernels.flat_buffer import FlatBuffer
from tritonddp.kernels.unflatten import JointUnflatten, unflatten

# The interpreter uses numpy, which warns about infinities and NaNs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BF16, FP32 = torch.bfloat16, torch.float32


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
