"""The flatten kernel, in Triton's interpreter, and its twin in plain torch."""

import math

import pytest
import torch
from poisoned import assert_gaps_intact, assert_same_bits, dense, embedded_flat, raw, values

from tritonddp.kernels import launch, reference
from tritonddp.kernels.flat_buffer import DTYPES
from tritonddp.kernels.flatten import FLAG_BLOCK, flatten

# The interpreter uses numpy, which warns about infinities and NaNs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
WIRE = pytest.mark.parametrize("wire", DTYPES, ids=str)


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
    flatten(flat, [torch.empty(0)] * len(slots), used, 1.0)
    assert launch.launches - before == 1
    assert flat.tables.num_chunks == 0
    assert flat.flags.tolist() == list(map(float, used))
    assert_gaps_intact(flat)
    memory.assert_guards_intact("the flat buffer")


def test_a_buffer_without_slots_needs_no_launch():
    flat, _ = embedded_flat([], torch.float32)
    before = launch.launches
    flatten(flat, [], [], 1.0)
    assert launch.launches == before


def write_trailer(flat, grads, used, scale, headers) -> None:
    flat.write_trailer(used, headers)


@pytest.mark.parametrize("run", [flatten, reference.flatten, write_trailer])
def test_headers_that_do_not_fit_are_an_error_and_nothing_is_written(run):
    flat, _ = embedded_flat([dense([20])], torch.float32, headers=3)
    before = raw(flat.data).clone()
    for headers, message in (
        ((), "room for 3 headers, but got 0"),
        ([1], "room for 3 headers, but got 1"),
        ([1, 2, 3, 4], "room for 3 headers, but got 4"),
        ([1, 256, 3], r"header 1 should be in 0\.\.255, but is 256"),
        ([1, 2, -1], r"header 2 should be in 0\.\.255, but is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            run(flat, [torch.ones(20)], [True], 1.0, headers)
        assert torch.equal(raw(flat.data), before)


def test_a_part_writes_only_its_own_flags():
    flat, memory = embedded_flat([dense([20])] * 3, torch.float32, headers=5)
    before = raw(flat.data).clone()
    part = flat.part(1, 2)
    flatten(part, [torch.ones(20)], [True], 1.0)
    assert flat.flags[1] == 1
    raw(flat.data)[flat.layout.flags_offset + 1] = before[flat.layout.flags_offset + 1]
    flat.views[1].copy_(before.view(torch.float32)[32:52])
    assert torch.equal(raw(flat.data), before)
    memory.assert_guards_intact("the flat buffer")
    with pytest.raises(ValueError, match="room for 0 headers, but got 5"):
        flatten(part, [torch.ones(20)], [True], 1.0, bytes(5))


def test_gradients_of_two_dtypes_are_an_error_that_names_the_slot():
    flat, _ = embedded_flat([dense([4])] * 3, torch.float32)
    grads = [torch.ones(4), torch.ones(4), torch.ones(4, dtype=torch.float16)]
    for _ in range(2):  # the tables must not keep what a failed call was given
        with pytest.raises(TypeError, match=r"slot 2 is torch\.float16.*torch\.float32"):
            flatten(flat, grads, [True] * 3, 1.0)
