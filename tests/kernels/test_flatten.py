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
    flatten(embedded_flat([], wire)[0], [], [], 1.0)
    assert launch.launches == before
    flatten(flat, [torch.empty(0)] * len(slots), used, 1.0)
    assert launch.launches - before == 1
    assert flat.tables.num_chunks == 0
    assert flat.flags.tolist() == list(map(float, used))
    assert_gaps_intact(flat)
    memory.assert_guards_intact("the flat buffer")


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
