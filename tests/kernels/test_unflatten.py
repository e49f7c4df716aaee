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
    """A flat buffer as an all-reduce leaves it."""
    flat, _ = embedded_flat(slots, wire)
    flat.tables = DeviceTables(flat, block=256)
    fill(flat)
    return flat


@pytest.mark.parametrize("run", [unflatten, reference.unflatten], ids=["kernel", "twin"])
def test_a_factor_that_does_not_fit_is_an_error_and_nothing_is_written(run):
    flat, grad = reduced([dense([20])]), torch.zeros(20)
    run(flat, [grad])  # and the launch is prepared
    grad.fill_(7.0)
    for factor, found in (
        (torch.ones(1), r"torch\.float32 of shape \(1,\) on cpu"),
        (torch.ones(2, dtype=torch.float64), r"torch\.float64 of shape \(2,\) on cpu"),
        (torch.ones((), dtype=torch.float64, device="meta"), r"shape \(\) on meta"),
    ):
        with pytest.raises(
            TypeError, match=rf"one torch\.float64 element on cpu, but is .*{found}"
        ):
            run(flat, [grad], factor)
    assert (grad == 7).all()
    for size in (19, 21):
        with pytest.raises(RuntimeError, match="the size of a gradient differs"):
            reference.unflatten(flat, [torch.zeros(size)], factor_of(2.0))


def test_without_elements_to_write_nothing_is_launched():
    for slots, grads in (
        ([dense([0]), dense([9])], [None, None]),
        ([dense([0])] * 2, [torch.empty(0), None]),
    ):
        flat = reduced(slots)
        before = launch.launches
        unflatten(flat, grads)
        assert launch.launches == before


@pytest.mark.parametrize("factor", [None, 0.5], ids=str)
def test_a_view_whose_data_was_replaced_is_written_in_its_new_memory(factor):
    slots = [dense([20]), dense([30])]
    flat, plain = reduced(slots), reduced(slots)
    unflatten(flat, flat.views, factor_of(factor))
    moved = torch.zeros(30)
    flat.views[1].data = moved
    unflatten(flat, flat.views, factor_of(factor))
    for found, view in zip((flat.views[0], moved), plain.views, strict=True):
        assert_same_bits(found, view * (factor or 1) ** 2)


# Several buffers together

SEVERAL = [[dense([20]), dense([0]), dense([300])], [dense([5, 7], [1, 0])], [dense([1000])] * 2]


def several(wires=(BF16,) * 3):
    """Reduced buffers, their gradients, and the same gradients again for the twin."""
    flats = [reduced(slots, wire) for slots, wire in zip(SEVERAL, wires, strict=True)]
    flats[2].flags[1] = 0
    grads, twins = ([embedded_gradients(slots, FP32)[0] for slots in SEVERAL] for _ in range(2))
    return flats, grads, twins


def assert_as_alone(flats, joint, grads, twins, factor=None) -> int:
    """All at once have the bits of one each; returns the number of launches."""
    for flat, each in zip(flats, twins, strict=True):
        reference.unflatten(flat, each, factor)
    before = launch.launches
    joint(grads, factor)
    for found, expected in zip(itertools.chain(*grads), itertools.chain(*twins), strict=True):
        if found is not None:
            assert_same_bits(found, expected)
    return launch.launches - before


@pytest.mark.parametrize("factor", [None, 1 / 3], ids=str)
def test_several_buffers_are_unflattened_in_one_launch_with_the_bits_of_one_each(factor):
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
    # Gradients that the tables do not have: one launch for each table.
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


def test_a_buffer_without_gradients_is_left_out():
    flats, grads, twins = several()
    grads[1] = twins[1] = [None]
    joint = JointUnflatten(flats)
    joint(grads)
    assert assert_as_alone(flats, joint, grads, twins) == 1
    joint([[None] * len(each) for each in grads])


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


def test_several_buffers_check_what_one_checks():
    flats, grads, _ = several()
    joint = JointUnflatten(flats)
    with pytest.raises(TypeError, match=r"one torch\.float64 element"):
        joint(grads, torch.ones(1))
    with pytest.raises(ValueError, match="3 slots, but got 2 gradients"):
        joint([grads[0][:2], *grads[1:]])
    with pytest.raises(ValueError, match="argument"):
        joint(grads[:2])
