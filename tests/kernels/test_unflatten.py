"""The unflatten kernel, in Triton's interpreter, against its plain-torch twin."""

import itertools

import pytest
import torch
from poisoned import assert_same_bits, dense, embedded_flat, embedded_gradients, values

from tritonddp.kernels import launch, reference
from tritonddp.kernels.device_tables import DeviceTables
from tritonddp.kernels.flat_buffer import FlatBuffer
from tritonddp.kernels.flatten import flatten
from tritonddp.kernels.unflatten import JointUnflatten, unflatten

# The interpreter is numpy, which warns of the infinities and NaNs that are the point here.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


RUNS = pytest.mark.parametrize("run", [unflatten, reference.unflatten], ids=["triton", "reference"])


def factor_of(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def reduced(slots, wire) -> FlatBuffer:
    """A flat buffer as an all-reduce leaves it."""
    flat, _ = embedded_flat(slots, wire)
    for slot, view in enumerate(flat.views):
        content = values(view.numel(), wire, slot)
        view.copy_(content.as_strided(view.shape, view.stride()))
    flat.flags.fill_(1)
    flat.tables = DeviceTables(flat, block=256)
    return flat


@RUNS
@pytest.mark.parametrize(
    ("factor", "found"),
    [
        (torch.ones(1), r"torch\.float32 of shape \(1,\) on cpu"),
        (torch.ones(2, dtype=torch.float64), r"torch\.float64 of shape \(2,\) on cpu"),
        (torch.ones((), dtype=torch.float64, device="meta"), r"shape \(\) on meta"),
    ],
    ids=["dtype", "shape", "device"],
)
def test_a_factor_of_another_kind_is_an_error_and_nothing_is_written(run, factor, found):
    flat = reduced([dense([20])], torch.float32)
    grad = torch.zeros(20)
    run(flat, [grad])  # and it is prepared
    grad.fill_(7.0)
    with pytest.raises(TypeError, match=rf"one torch\.float64 element on cpu, but is .*{found}"):
        run(flat, [grad], factor)
    assert (grad == 7).all()


@pytest.mark.parametrize("size", [19, 21])
def test_the_reference_refuses_a_gradient_of_another_size(size):
    flat = reduced([dense([20])], torch.float32)
    with pytest.raises(RuntimeError, match="not of the size"):
        reference.unflatten(flat, [torch.zeros(size)], factor_of(2.0))


@pytest.mark.parametrize("grads", [[None, None], [torch.empty(0), None]], ids=["none", "empty"])
def test_nothing_to_write_needs_no_launch(grads):
    slots = [dense([0]), dense([9])] if grads[0] is None else [dense([0]), dense([0])]
    flat = reduced(slots, torch.float32)
    before = launch.launches
    unflatten(flat, grads)
    assert launch.launches == before


@pytest.mark.parametrize("factor", [None, 0.5], ids=str)
def test_a_view_whose_data_somebody_has_set_is_written_where_it_is_now(factor):
    slots = [dense([20]), dense([30])]
    flat, plain = reduced(slots, torch.float32), reduced(slots, torch.float32)
    given = None if factor is None else factor_of(factor)
    unflatten(flat, flat.views, given)
    moved = torch.zeros(30)
    flat.views[1].data = moved
    unflatten(flat, flat.views, given)
    assert_same_bits(moved, plain.views[1] * (factor or 1) ** 2)
    assert_same_bits(flat.views[0], plain.views[0] * (factor or 1) ** 2)


def test_a_buffer_whose_storage_has_moved_is_read_where_it_is_now():
    slots = [dense([20]), dense([30])]
    flat = reduced(slots, torch.float32)
    grads = [torch.zeros(20), torch.zeros(30)]
    flatten(flat, grads, [True, True], 1.0)
    unflatten(flat, grads)
    held = flat.data.untyped_storage().nbytes()
    flat.data.untyped_storage().resize_(16 * held)  # elsewhere, as a rule
    for each in grads:
        each.fill_(3)
    flatten(flat, grads, [True, True], 2.0)
    assert all((view == 6).all() for view in flat.views)
    unflatten(flat, grads)
    assert all((grad == 6).all() for grad in grads)


# Several buffers together


def several(wires=(torch.bfloat16,) * 3):
    """Reduced buffers, and their gradients."""
    kinds = [[dense([20]), dense([0]), dense([300])], [dense([5, 7], [1, 0])], [dense([1000])] * 2]
    flats, grads = [], []
    for number, (slots, wire) in enumerate(zip(kinds, wires, strict=True)):
        flat, _ = embedded_flat(slots, wire)
        flat.tables = DeviceTables(flat, block=256)
        for view in flat.views:
            view.copy_(values(view.numel(), wire, number).as_strided(view.shape, view.stride()))
        flat.flags.fill_(1)
        flats.append(flat)
        grads.append(embedded_gradients(slots, torch.float32)[0])
    flats[2].flags[1] = 0
    return flats, grads


def assert_as_alone(flats, joint, grads, expected, factor) -> None:
    for flat, each in zip(flats, expected, strict=True):
        reference.unflatten(flat, each, factor)
    joint(grads, factor)
    for found, wanted in zip(itertools.chain(*grads), itertools.chain(*expected), strict=True):
        if found is not None:
            assert_same_bits(found, wanted)


@pytest.mark.parametrize("factor", [None, 1 / 3], ids=str)
def test_several_buffers_are_unflattened_in_one_launch_with_the_bits_of_one_each(factor):
    flats, _ = several()
    given = None if factor is None else factor_of(factor)
    joint = JointUnflatten(flats)
    for _ in range(2):  # the second time elsewhere
        (_, grads), (_, expected) = several(), several()
        for each in (grads, expected):
            each[0][0] = None
        for flat, each in zip(flats, grads, strict=True):
            flat.tables.update(each)
        before, moves = launch.launches, [flat.tables.moves for flat in flats]
        assert_as_alone(flats, joint, grads, expected, given)
        assert launch.launches - before == 1
        assert [flat.tables.moves for flat in flats] == moves
    assert not any(flat.tables.uploads for flat in flats)
    # Other gradients than the tables have: each of them says so to the device.
    (_, grads), (_, expected) = several(), several()
    before = launch.launches
    assert_as_alone(flats, joint, grads, expected, given)
    assert launch.launches - before == 1 + 3


def test_buffers_of_other_kinds_are_unflattened_one_by_one():
    for wires in [(torch.bfloat16, torch.float32, torch.bfloat16), (torch.bfloat16,) * 3]:
        flats, grads = several(wires)
        _, expected = several(wires)
        if len(set(wires)) == 1:
            for each in (grads, expected):
                each[1] = [grad.double() for grad in each[1]]
        joint = JointUnflatten(flats)
        before = launch.launches
        assert_as_alone(flats, joint, grads, expected, None)
        assert launch.launches - before == 3 + sum(flat.tables.moves for flat in flats)


def test_a_buffer_without_gradients_is_left_out():
    flats, grads = several()
    _, expected = several()
    for each in (grads, expected):
        each[1] = [None]
    joint = JointUnflatten(flats)
    joint(grads)
    before = launch.launches
    assert_as_alone(flats, joint, grads, expected, None)
    assert launch.launches - before == 1
    joint([[None] * len(each) for each in grads])


def test_several_buffers_of_views_are_scaled_together_where_they_are():
    flats, _ = several()
    twins, _ = several()
    joint = JointUnflatten(flats)
    for factor in (None, factor_of(1 / 3)):
        before = launch.launches
        joint([flat.views for flat in flats], factor)
        assert launch.launches - before == 1
        for flat, twin in zip(flats, twins, strict=True):
            reference.unflatten(twin, twin.views, factor)
            assert_same_bits(flat.payload, twin.payload)
    mixed = [flats[0].views, [None], flats[2].views]  # the second one must not be scaled
    was = flats[1].payload.clone()
    joint(mixed, factor_of(0.5))
    assert_same_bits(flats[1].payload, was)


def test_several_buffers_of_which_one_has_moved_are_read_where_they_are_now():
    flats, grads = several()
    _, expected = several()
    joint = JointUnflatten(flats)
    joint(grads)
    flats[1].data.untyped_storage().resize_(1 << 20)
    flats[1].payload.fill_(7)
    assert_as_alone(flats, joint, grads, expected, None)


def test_several_buffers_check_what_one_checks():
    flats, grads = several()
    joint = JointUnflatten(flats)
    with pytest.raises(TypeError, match=r"one torch\.float64 element"):
        joint(grads, torch.ones(1))
    with pytest.raises(ValueError, match="3 slots, but 2 gradients"):
        joint([grads[0][:2], *grads[1:]])
    with pytest.raises(ValueError, match="argument"):
        joint(grads[:2])
