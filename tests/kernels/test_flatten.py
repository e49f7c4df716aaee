"""The flatten kernel, in Triton's interpreter, against its plain-torch twin."""

import math
from functools import partial

import pytest
import torch
from poisoned import assert_gaps_intact, assert_same_bits, dense, embedded_flat, raw, values

from tritonddp.kernels import launch, reference
from tritonddp.kernels.flat_buffer import DTYPES
from tritonddp.kernels.flatten import FLAG_BLOCK, flatten

# The interpreter is numpy, which warns of the infinities and NaNs that are the point here.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


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


@pytest.mark.parametrize(
    "run", [flatten, reference.flatten, None], ids=["kernel", "reference", "NaN"]
)
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
    write = (
        (lambda headers: run(flat, [torch.ones(20)], [True], 1.0, headers))
        if run
        else partial(flat.write_trailer, [True])
    )
    with pytest.raises(ValueError, match=message):
        write(headers)
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


def test_a_buffer_without_slots_needs_no_launch():
    flat, _ = embedded_flat([], torch.float32)
    before = launch.launches
    flatten(flat, [], [], 1.0)
    assert launch.launches == before


def test_gradients_of_two_dtypes_are_an_error_that_names_the_slot():
    flat, _ = embedded_flat([dense([4])] * 3, torch.float32)
    grads = [torch.ones(4), torch.ones(4), torch.ones(4, dtype=torch.float16)]
    with pytest.raises(TypeError, match=r"slot 2 is torch\.float16.*torch\.float32"):
        flatten(flat, grads, [True] * 3, 1.0)
    # And again: the failed call must not have been taken for the state of the table.
    with pytest.raises(TypeError, match="slot 2"):
        flatten(flat, grads, [True] * 3, 1.0)
