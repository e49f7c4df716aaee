"""The unflatten kernel, in Triton's interpreter, against its plain-torch twin."""

from __future__ import annotations

import math

import pytest
import torch
from poisoned import (
    POISON,
    SLOTS,
    assert_same_bits,
    dense,
    embedded_flat,
    embedded_gradients,
    raw,
    values,
)

from tritonddp.kernels import launch, reference
from tritonddp.kernels.buffer import DTYPES, FlatBuffer
from tritonddp.kernels.flatten import flatten
from tritonddp.kernels.table import DeviceTables
from tritonddp.kernels.unflatten import unflatten

# The interpreter is numpy, which warns of the infinities and NaNs that are the point here.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def reduced(slots, wire, flags=None) -> FlatBuffer:
    """A flat buffer as an all-reduce leaves it."""
    flat, _ = embedded_flat(slots, wire)
    for slot, view in enumerate(flat.views):
        content = values(view.numel(), wire, slot)
        view.copy_(content.as_strided(view.shape, view.stride()))
    flat.flags.copy_(torch.tensor([1.0] * len(slots) if flags is None else flags))
    flat.tables = DeviceTables(flat, block=256)
    return flat


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("wire", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_gradient_has_the_bits_of_the_reference(dtype, wire, aligned):
    flat = reduced(SLOTS, wire)
    before = raw(flat.data).clone()
    grads, arenas = embedded_gradients(SLOTS, dtype, aligned)
    expected, _ = embedded_gradients(SLOTS, dtype, aligned)
    for tensor in (*grads, *expected):
        tensor.fill_(7)

    unflatten(flat, grads)
    reference.unflatten(flat, expected)

    assert flat.tables.aligned is aligned
    for slot, (grad, twin) in enumerate(zip(grads, expected, strict=True)):
        assert_same_bits(grad, twin, f"slot {slot} {SLOTS[slot]}")
        arenas[slot].assert_guards_intact(f"gradient {slot}")
    assert torch.equal(raw(flat.data), before), "the flat buffer was written"


@pytest.mark.parametrize("wire", DTYPES, ids=str)
def test_gradients_that_no_rank_used_keep_every_bit(wire):
    # What a sum over ranks leaves: 0, any count, also one that saturated in 16 bits.
    flags = [0, 1, 0, 2, 0, 256, 0, 1, 0, 3, 0, 0, 2, 0]
    flat = reduced(SLOTS, wire, flags)
    grads, arenas = embedded_gradients(SLOTS, torch.float32)
    for arena in arenas:
        raw(arena.memory).fill_(POISON[4])
    unflatten(flat, grads)
    for slot, flag in enumerate(flags):
        if flag:
            assert_same_bits(grads[slot], flat.views[slot].float(), f"slot {slot}")
        else:
            assert (raw(arenas[slot].memory) == POISON[4]).all(), f"slot {slot} was written"
        arenas[slot].assert_guards_intact(f"gradient {slot}")


def test_slots_without_a_gradient_are_skipped():
    slots = [dense([300]), dense([40]), dense([17])]
    flat = reduced(slots, torch.float32)
    grads, arenas = embedded_gradients(slots, torch.float32)
    unflatten(flat, [None, grads[1], None])
    assert_same_bits(grads[1], flat.views[1])
    assert_same_bits(grads[0], values(300, torch.float32, 0))
    for slot, arena in enumerate(arenas):
        arena.assert_guards_intact(f"gradient {slot}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_pattern_is_cast_as_torch_does(wire, dtype):
    pattern = torch.arange(-(2**15), 2**15).to(torch.int16).view(wire)
    flat, _ = embedded_flat([dense([len(pattern)])], wire)
    flat.views[0].copy_(pattern)
    flat.flags.fill_(1)
    flat.tables = DeviceTables(flat, block=8192)
    grad = torch.zeros(len(pattern), dtype=dtype)
    unflatten(flat, [grad])
    assert_same_bits(grad, pattern.to(dtype))


@pytest.mark.parametrize("count", [1, 60])
def test_any_number_of_gradients_is_one_launch(count):
    slots = [dense([5 + slot]) for slot in range(count)]
    flat = reduced(slots, torch.bfloat16)
    grads, _ = embedded_gradients(slots, torch.float32)
    before = launch.launches
    unflatten(flat, grads)
    assert launch.launches - before == 1
    for view, grad in zip(flat.views, grads, strict=True):
        assert_same_bits(grad, view.float())


@pytest.mark.parametrize("grads", [[None, None], [torch.empty(0), None]], ids=["none", "empty"])
def test_nothing_to_write_needs_no_launch(grads):
    slots = [dense([0]), dense([9])] if grads[0] is None else [dense([0]), dense([0])]
    flat = reduced(slots, torch.float32)
    before = launch.launches
    unflatten(flat, grads)
    assert launch.launches == before


def test_the_gradients_that_were_flattened_need_no_second_upload():
    slots = [dense([20]), dense([300])]
    flat, _ = embedded_flat(slots, torch.bfloat16)
    grads = [torch.ones(20), torch.full((300,), 3.0)]
    flatten(flat, grads, [True, False], 0.5)
    assert flat.tables.uploads == 1
    unflatten(flat, grads)
    assert flat.tables.uploads == 1
    assert (grads[0] == 0.5).all()
    assert (grads[1] == 3.0).all()  # its flag is 0


def test_other_gradients_are_uploaded_and_leave_flags_and_scale_alone():
    slots = [dense([20]), dense([30])]
    flat, _ = embedded_flat(slots, torch.float32)
    grads, _ = embedded_gradients(slots, torch.float32)
    outputs = [torch.zeros(20), torch.zeros(30)]
    flatten(flat, grads, [True, False], 0.25)
    flags_and_scale = flat.tables.dynamic[2:].clone()
    unflatten(flat, outputs)
    assert flat.tables.uploads == 2
    assert torch.equal(flat.tables.dynamic[2:], flags_and_scale)
    assert_same_bits(outputs[0], flat.views[0])
    assert (outputs[1] == 0).all()


def test_a_nan_or_infinite_payload_arrives():
    flat, _ = embedded_flat([dense([18])], torch.float16)
    flat.views[0].fill_(math.nan)
    flat.views[0][::2] = -math.inf
    flat.flags.fill_(1)
    grad = torch.zeros(18)
    unflatten(flat, [grad])
    assert grad[1::2].isnan().all()
    assert (grad[::2] == -math.inf).all()


def test_gradients_of_two_dtypes_are_an_error_that_names_the_slot():
    flat = reduced([dense([4])] * 2, torch.float32)
    with pytest.raises(TypeError, match="slot 1"):
        unflatten(flat, [torch.ones(4), torch.ones(4, dtype=torch.float64)])
