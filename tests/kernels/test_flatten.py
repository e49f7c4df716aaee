"""The flatten kernel, in Triton's interpreter, against its plain-torch twin."""

from __future__ import annotations

import math

import pytest
import torch
from poisoned import (
    SLOTS,
    assert_gaps_intact,
    assert_same_bits,
    dense,
    embedded_flat,
    embedded_gradients,
    raw,
    values,
)

from tritonddp.kernels import launch, reference
from tritonddp.kernels.device_tables import DeviceTables
from tritonddp.kernels.flat_buffer import DTYPES
from tritonddp.kernels.flatten import FLAG_BLOCK, flatten

# The interpreter is numpy, which warns of the infinities and NaNs that are the point here.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("wire", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_slot_has_the_bits_of_the_reference(dtype, wire, aligned):
    grads, arenas = embedded_gradients(SLOTS, dtype, aligned)
    before = [raw(arena.memory).clone() for arena in arenas]
    flat, memory = embedded_flat(SLOTS, wire)
    expected, _ = embedded_flat(SLOTS, wire)
    used = [slot % 3 != 1 for slot in range(len(SLOTS))]
    flat.tables = DeviceTables(flat, block=256)

    flatten(flat, grads, used, 1 / 3)
    reference.flatten(expected, grads, used, 1 / 3)

    assert flat.tables.aligned is aligned
    for slot, (view, twin) in enumerate(zip(flat.views, expected.views, strict=True)):
        assert_same_bits(view, twin, f"slot {slot} {SLOTS[slot]}")
    assert flat.flags.tolist() == list(map(float, used))
    assert_gaps_intact(flat)
    memory.assert_guards_intact("the flat buffer")
    for arena, bits_before in zip(arenas, before, strict=True):
        assert torch.equal(raw(arena.memory), bits_before), "a gradient was written"


@pytest.mark.parametrize("wire", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_pattern_is_cast_as_torch_does(dtype, wire):
    pattern = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    slots = [dense([len(pattern)])]
    flat, _ = embedded_flat(slots, wire)
    expected, _ = embedded_flat(slots, wire)
    flat.tables = DeviceTables(flat, block=8192)
    flatten(flat, [pattern], [True], 0.7)
    reference.flatten(expected, [pattern], [True], 0.7)
    assert_same_bits(flat.views[0], expected.views[0])


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16], ids=str)
def test_fp64_is_rounded_to_16_bits_by_way_of_fp32(wire):
    # Just above a tie: one rounding goes up, two go down, as in torch.
    tie = 1 + torch.finfo(wire).eps / 2
    grad = torch.tensor([tie + 2.0**-40, -tie - 2.0**-40], dtype=torch.float64)
    flat, _ = embedded_flat([dense([2])], wire)
    flatten(flat, [grad], [True], 1.0)
    assert flat.views[0].tolist() == [1.0, -1.0]


@pytest.mark.parametrize("wire", DTYPES, ids=str)
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


def test_the_scale_is_applied_before_the_cast_to_the_wire():
    # 60000 * 8 overflows fp16, but 60000 * 8 * 0.125 does not.
    flat, _ = embedded_flat([dense([20])], torch.float16)
    flatten(flat, [torch.full((20,), 480_000.0)], [True], 0.125)
    assert (flat.views[0] == 60_000).all()


@pytest.mark.parametrize("wire", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.5, math.inf, math.nan], ids=str)
def test_missing_gradients_become_zeros_whatever_the_scale(wire, scale):
    slots = [dense([37]), dense([300]), dense([]), dense([5])]
    flat, memory = embedded_flat(slots, wire)
    flat.tables = DeviceTables(flat, block=64)
    flatten(flat, [None, torch.ones(300), None, None], [False, True, False, True], scale)
    for slot in (0, 2, 3):
        assert_same_bits(flat.views[slot], torch.zeros_like(flat.views[slot]), f"slot {slot}")
    assert_same_bits(flat.views[1], torch.full((300,), scale).to(wire), "slot 1")
    assert flat.flags.tolist() == [0, 1, 0, 1]
    assert_gaps_intact(flat)
    memory.assert_guards_intact("the flat buffer")


@pytest.mark.parametrize("wire", DTYPES, ids=str)
def test_a_bucket_without_any_gradient_becomes_zeros(wire):
    slots = [dense([37]), dense([100])]
    flat, _ = embedded_flat(slots, wire)
    flatten(flat, [None, None], [False, False], 0.5)
    assert all(view.count_nonzero() == 0 for view in flat.views)
    assert flat.flags.tolist() == [0, 0]


@pytest.mark.parametrize("wire", DTYPES, ids=str)
def test_flags_beyond_one_program_and_of_empty_gradients_are_written(wire):
    # Three programs of flags, the last one partly filled; only empty gradients, so no chunks.
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


@pytest.mark.parametrize("count", [1, FLAG_BLOCK - 2, 2 * FLAG_BLOCK + 9])
@pytest.mark.parametrize("wire", DTYPES, ids=str)
def test_headers_are_written_behind_the_flags_in_the_same_launch(wire, count):
    slots = [dense([20]), dense([0]), dense([300])]
    grads, _ = embedded_gradients(slots, torch.float32)
    flat, memory = embedded_flat(slots, wire, headers=count)
    expected, twin_memory = embedded_flat(slots, wire, headers=count)
    used = [True, False, True]
    headers = [(7 * place + 255) % 256 for place in range(count)]
    before = launch.launches
    flatten(flat, grads, used, 1 / 3, headers)
    assert launch.launches - before == 1
    reference.flatten(expected, grads, used, 1 / 3, headers)
    for buffer, arena in ((flat, memory), (expected, twin_memory)):
        assert buffer.flags.tolist() == [1, 0, 1]
        assert buffer.headers.tolist() == headers
        assert_gaps_intact(buffer)
        arena.assert_guards_intact("the flat buffer")
    for slot, (view, twin) in enumerate(zip(flat.views, expected.views, strict=True)):
        assert_same_bits(view, twin, f"slot {slot}")


@pytest.mark.parametrize("wire", DTYPES, ids=str)
@pytest.mark.parametrize("run", [flatten, reference.flatten], ids=["triton", "reference"])
def test_a_sum_over_ranks_gives_everybody_all_headers_exactly(run, wire):
    ranks, everything = 4, bytes(range(256))
    total = torch.zeros(256, dtype=wire)
    for rank in range(ranks):
        own = bytes(b if b % ranks == rank else 0 for b in everything)
        flat, _ = embedded_flat([], wire, headers=256)  # no gradient: just the trailer
        run(flat, [], [], 1.0, own)
        total += flat.headers
    assert total.tolist() == list(everything)


@pytest.mark.parametrize("run", [flatten, reference.flatten], ids=["triton", "reference"])
@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ((), "room for 3 headers, but 0 came"),
        ([1], "room for 3 headers, but 1 came"),
        ([1, 2, 3, 4], "room for 3 headers, but 4 came"),
        ([1, 256, 3], r"header 1 should be in 0\.\.255, but is 256"),
        ([1, 2, -1], r"header 2 should be in 0\.\.255, but is -1"),
    ],
)
def test_headers_that_do_not_fit_are_an_error_and_nothing_is_written(run, headers, message):
    flat, _ = embedded_flat([dense([20])], torch.float32, headers=3)
    before = raw(flat.data).clone()
    with pytest.raises(ValueError, match=message):
        run(flat, [torch.ones(20)], [True], 1.0, headers)
    assert torch.equal(raw(flat.data), before)


def test_a_part_writes_its_own_flags_and_no_header():
    flat, memory = embedded_flat([dense([20])] * 3, torch.float32, headers=5)
    before = raw(flat.data).clone()
    part = flat.part(1, 2)
    flatten(part, [torch.ones(20)], [True], 1.0)
    assert flat.flags[1] == 1
    raw(flat.data)[flat.layout.flags_offset + 1] = before[flat.layout.flags_offset + 1]
    flat.views[1].copy_(before.view(torch.float32)[32:52])
    assert torch.equal(raw(flat.data), before)
    memory.assert_guards_intact("the flat buffer")
    with pytest.raises(ValueError, match="room for 0 headers, but 5 came"):
        flatten(part, [torch.ones(20)], [True], 1.0, bytes(5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_that_is_its_bucket_view_is_scaled_in_place(dtype):
    flat, memory = embedded_flat(SLOTS, dtype)
    flat.tables = DeviceTables(flat, block=256)
    grads = []
    for slot, view in enumerate(flat.views):
        content = values(view.numel(), dtype, slot)
        view.copy_(content.as_strided(view.shape, view.stride()))
        grads.append(view.clone())
    expected, _ = embedded_flat(SLOTS, dtype)
    flatten(flat, flat.views, [True] * len(SLOTS), 0.3)
    reference.flatten(expected, grads, [True] * len(SLOTS), 0.3)
    for slot, (view, twin) in enumerate(zip(flat.views, expected.views, strict=True)):
        assert_same_bits(view, twin, f"slot {slot}")
    assert_gaps_intact(flat)
    memory.assert_guards_intact("the flat buffer")


@pytest.mark.parametrize("count", [1, 7, 60])
def test_any_number_of_gradients_is_one_launch(count):
    slots = [dense([5 + slot]) for slot in range(count)]
    flat, _ = embedded_flat(slots, torch.float32)
    grads, _ = embedded_gradients(slots, torch.float32)
    before = launch.launches
    flatten(flat, grads, [True] * count, 1.0)
    assert launch.launches - before == 1
    for view, grad in zip(flat.views, grads, strict=True):
        assert_same_bits(view, grad)


def test_a_buffer_without_slots_needs_no_launch():
    flat, _ = embedded_flat([], torch.float32)
    before = launch.launches
    flatten(flat, [], [], 1.0)
    assert launch.launches == before


def test_the_table_is_uploaded_only_when_an_address_a_flag_or_the_scale_changed():
    slots = [dense([20]), dense([30])]
    flat, _ = embedded_flat(slots, torch.float32)
    grads, _ = embedded_gradients(slots, torch.float32)
    others, _ = embedded_gradients(slots, torch.float32)

    def uploads(*arguments):
        before = DeviceTables.of(flat).uploads
        flatten(flat, *arguments)
        return flat.tables.uploads - before

    assert uploads(grads, [True, True], 0.5) == 1
    assert uploads(grads, [True, True], 0.5) == 0
    grads[0].mul_(2)  # contents are no business of the table
    assert uploads(grads, (1, 1), 0.5) == 0
    assert_same_bits(flat.views[0], grads[0] * 0.5)
    assert uploads(grads, [True, False], 0.5) == 1
    assert flat.flags.tolist() == [1, 0]
    assert uploads(grads, [True, False], 0.25) == 1
    assert_same_bits(flat.views[0], grads[0] * 0.25)
    assert uploads([grads[0], others[1]], [True, False], 0.25) == 1
    assert_same_bits(flat.views[1], others[1] * 0.25)
    assert uploads([grads[0], None], [True, False], 0.25) == 1
    assert flat.views[1].count_nonzero() == 0


def test_headers_are_uploaded_only_when_they_changed():
    flat, _ = embedded_flat([dense([20])], torch.float32, headers=4)
    grad, headers = torch.ones(20), [1, 2, 3, 4]

    def uploads(given):
        before = DeviceTables.of(flat).uploads
        flatten(flat, [grad], [True], 0.5, given)
        assert flat.headers.tolist() == list(given)
        return flat.tables.uploads - before

    assert uploads(headers) == 1
    assert uploads(headers) == 0
    assert uploads((1, 2, 3, 4)) == 0
    assert uploads(bytes(headers)) == 0
    headers[3] = 0  # by their owner, in place
    assert uploads(headers) == 1
    assert uploads(bytes(4)) == 1


def test_a_list_of_flags_that_its_owner_changes_in_place_is_noticed():
    flat, _ = embedded_flat([dense([20])], torch.float32)
    used, grad = [True], torch.ones(20)
    flatten(flat, [grad], used, 1.0)
    used[0] = False
    flatten(flat, [grad], used, 1.0)
    assert flat.flags.tolist() == [0]


def test_gradients_of_two_dtypes_are_an_error_that_names_the_slot():
    flat, _ = embedded_flat([dense([4])] * 3, torch.float32)
    grads = [torch.ones(4), torch.ones(4), torch.ones(4, dtype=torch.float16)]
    with pytest.raises(TypeError, match=r"slot 2 is torch\.float16.*torch\.float32"):
        flatten(flat, grads, [True] * 3, 1.0)
    # And again: the failed call must not have been taken for the state of the table.
    with pytest.raises(TypeError, match="slot 2"):
        flatten(flat, grads, [True] * 3, 1.0)
