"""Kernels against their twins in plain torch, in the interpreter or compiled: see :class:`Place`.

A module that imports these tests defines the fixture ``place``.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from poisoned import (
    POISON,
    SLOTS,
    Arena,
    assert_gaps_intact,
    assert_same_bits,
    dense,
    embedded_flat,
    embedded_gradients,
    raw,
    values,
)
from quantized_ranks import (
    Guarded,
    all_reduce,
    assert_same_messages,
    assert_same_residuals,
    exchange,
    gather,
)
from torch import Tensor

from tritonddp.kernels import launch, reference
from tritonddp.kernels.flat_buffer import DTYPES, FlatBuffer
from tritonddp.kernels.quantized import reference as quantized_reference


class Place:
    """Where the kernels of a GPU run: in Triton's interpreter or, if ``is_compiled``, on a GPU."""

    def __init__(self, is_compiled: bool = False) -> None:
        # Not imported with this module: its first import decides whether kernels are interpreted.
        from tritonddp.kernels import flatten, unflatten
        from tritonddp.kernels.quantized import dequantize, quantize, reduce_parts

        self.flatten, self.unflatten = flatten.flatten, unflatten.unflatten
        self.quantize, self.reduce_parts = quantize.quantize, reduce_parts.reduce_parts
        self.dequantize = dequantize.dequantize
        self.device, self.is_compiled = "cuda" if is_compiled else "cpu", is_compiled
        self.many = 100_001 if is_compiled else 1_000  # elements of a large gradient

    def flat(
        self, slots: Any, wire: torch.dtype, headers: int = 0, block: int = 256
    ) -> tuple[FlatBuffer, Arena]:
        """A buffer that interpreted kernels cut into chunks of ``block`` elements."""
        from tritonddp.kernels.device_tables import DeviceTables

        flat, arena = embedded_flat(slots, wire, self.device, headers)
        flat.tables = DeviceTables(flat, None if self.is_compiled else block)
        return flat, arena

    def factor(self, value: float | None) -> Tensor | None:
        """On the device."""
        return None if value is None else torch.tensor([value], dtype=torch.float64).to(self.device)


PAIRS = pytest.mark.parametrize(
    ("dtype", "wire"), [(dtype, wire) for dtype in DTYPES for wire in DTYPES], ids=str
)
WIRE = pytest.mark.parametrize("wire", DTYPES, ids=str)
ALIGNED = pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
# Some are out of the range of fp32, and some are different only in fp64.
FACTORS = [1 / 3, -2.0, 0.0, -0.0, 1 + 2.0**-40, 2.0**-130, 1e300, -1e-300, math.inf, math.nan]


def fill(*flats: FlatBuffer, flags: Any = None) -> None:
    """Write a possible result of an all-reduce into the buffers."""
    for flat in flats:
        for slot, view in enumerate(flat.views):
            content = values(view.numel(), flat.data.dtype, slot).to(view.device)
            view.copy_(content.as_strided(view.shape, view.stride()))
        flat.flags.copy_(torch.tensor([1.0] * len(flat.views) if flags is None else flags))


def assert_same_views(flat: FlatBuffer, twin: FlatBuffer) -> None:
    for slot, (view, expected) in enumerate(zip(flat.views, twin.views, strict=True)):
        assert_same_bits(view, expected, f"slot {slot} {tuple(view.shape)}")


def assert_intact(flat: FlatBuffer, memory: Arena) -> None:
    assert_gaps_intact(flat)
    memory.assert_guards_intact("the flat buffer")


@ALIGNED
@PAIRS
def test_flatten_has_the_bits_of_the_reference(place, dtype, wire, aligned):
    grads, arenas = embedded_gradients(SLOTS, dtype, aligned, place.device)
    twins, _ = embedded_gradients(SLOTS, dtype)
    flat, memory = place.flat(SLOTS, wire)
    expected, _ = embedded_flat(SLOTS, wire)
    used = [slot % 3 != 1 for slot in range(len(SLOTS))]
    place.flatten(flat, grads, used, 1 / 3)
    reference.flatten(expected, twins, used, 1 / 3)
    assert flat.tables.aligned is aligned
    assert_same_views(flat, expected)
    assert flat.flags.tolist() == list(map(float, used))
    assert_intact(flat, memory)
    for slot, arena in enumerate(arenas):
        assert_same_bits(grads[slot], twins[slot], f"gradient {slot} was written")
        arena.assert_guards_intact(f"gradient {slot}")


@ALIGNED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_that_is_its_bucket_view_is_scaled_once_in_place(place, dtype, aligned):
    # For misaligned gradients, threads may load and store different elements.
    slots = [*SLOTS, dense([3 * place.many]), dense([33]), dense([4])]
    flat, memory = place.flat(slots, dtype)
    expected, _ = embedded_flat(slots, dtype)
    fill(flat)
    twins, grads = [view.cpu().clone() for view in flat.views], list(flat.views)
    if not aligned:
        odd = Arena(4, dtype, aligned=False, device=place.device)
        odd.inside().copy_(grads[-1])
        grads[-1] = odd.inside()
    place.flatten(flat, grads, [True] * len(slots), 0.3)
    reference.flatten(expected, twins, [True] * len(slots), 0.3)
    assert flat.tables.aligned is aligned
    assert_same_views(flat, expected)
    assert_intact(flat, memory)


@WIRE
@pytest.mark.parametrize("scale", [0.5, math.inf, math.nan], ids=str)
def test_missing_gradients_become_zeros_whatever_the_scale(place, wire, scale):
    slots = [dense([37]), dense([300]), dense([]), dense([place.many]), dense([0])]
    flat, memory = place.flat(slots, wire)
    ones, used = torch.ones(300, device=place.device), [False, True, False, True, False]
    for grads in ([None, ones, None, None, None], [None] * 5):
        place.flatten(flat, grads, used, scale)
        for slot, (view, grad) in enumerate(zip(flat.views, grads, strict=True)):
            expected = torch.zeros_like(view) if grad is None else (grad * scale).to(wire)
            assert_same_bits(view, expected, f"slot {slot}")
        assert flat.flags.tolist() == used
        assert_intact(flat, memory)


@pytest.mark.parametrize("count", [1, 126, 200, 265, 12 * 1024])  # a program writes 128
@WIRE
def test_headers_are_written_after_the_flags_in_the_same_launch(place, wire, count):
    slots = [dense([20]), dense([0]), dense([5000]), dense([17])]
    grads, _ = embedded_gradients(slots, torch.float32, True, place.device)
    twins, _ = embedded_gradients(slots, torch.float32)
    flat, memory = place.flat(slots, wire, headers=count)
    expected, _ = embedded_flat(slots, wire, headers=count)
    used, headers = [True, False, True, False], [(7 * at + 255) % 256 for at in range(count)]
    for given in (headers, bytes(reversed(headers))):
        before = launch.launches
        place.flatten(flat, grads, used, 1 / 3, given)
        assert launch.launches - before == 1
        reference.flatten(expected, twins, used, 1 / 3, given)
        assert flat.flags.tolist() == used
        assert flat.headers.tolist() == list(given)
        assert_intact(flat, memory)
        assert_same_views(flat, expected)


@pytest.mark.parametrize("other", DTYPES, ids=str)
@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_pattern_is_cast_as_torch_does(place, narrow, other):
    pattern = torch.arange(-(2**15), 2**15).to(torch.int16).view(narrow)
    given = pattern.to(place.device)
    slots = [dense([len(pattern)])]
    (flat, _), (twin, _) = place.flat(slots, other, block=8192), embedded_flat(slots, other)
    place.flatten(flat, [given], [True], 0.7)
    reference.flatten(twin, [pattern], [True], 0.7)
    assert_same_views(flat, twin)
    flat, _ = place.flat(slots, narrow, block=8192)
    flat.views[0].copy_(pattern)
    flat.flags.fill_(1)
    grad = torch.zeros(len(pattern), dtype=other, device=place.device)
    place.unflatten(flat, [grad])
    assert_same_bits(grad, pattern.to(other))


@ALIGNED
@PAIRS
def test_unflatten_has_the_bits_of_the_reference(place, dtype, wire, aligned):
    (flat, _), (twin, _) = place.flat(SLOTS, wire), embedded_flat(SLOTS, wire)
    unused = 8
    flags = [float(slot != unused) for slot in range(len(SLOTS))]
    fill(flat, twin, flags=flags)
    before = raw(flat.data).clone()
    for number, value in enumerate((None, *(FACTORS if aligned else FACTORS[4:6]))):
        if number == 1:  # larger chunks, because the interpreter is slow
            flat.tables = None
        grads, arenas = embedded_gradients(SLOTS, dtype, aligned, place.device)
        expected, _ = embedded_gradients(SLOTS, dtype)
        raw(arenas[unused].memory).fill_(POISON[dtype.itemsize])
        place.unflatten(flat, grads, place.factor(value))
        factor = None if value is None else torch.tensor([value], dtype=torch.float64)
        reference.unflatten(twin, expected, factor)
        assert flat.tables.aligned is aligned
        for slot, (grad, arena) in enumerate(zip(grads, arenas, strict=True)):
            if slot != unused:
                assert_same_bits(grad, expected[slot], f"factor {value}, slot {slot}")
            arena.assert_guards_intact(f"gradient {slot}")
        unused_bits = raw(arenas[unused].memory)
        assert (unused_bits == POISON[dtype.itemsize]).all(), "an unused gradient was written"
    assert torch.equal(raw(flat.data), before), "the flat buffer was written"


@pytest.mark.parametrize("value", FACTORS, ids=str)
@WIRE
def test_gradients_that_are_bucket_views_are_unflattened_in_place(place, wire, value):
    slots = [*SLOTS, dense([3 * place.many])]
    flags = [float(slot != 7) for slot in range(len(slots))]
    flat, memory = place.flat(slots, wire)
    twin, _ = embedded_flat(slots, wire)
    fill(flat, twin, flags=flags)
    launches = launch.launches
    place.unflatten(flat, flat.views, place.factor(value))
    assert launch.launches - launches == 1
    reference.unflatten(twin, twin.views, torch.tensor([value], dtype=torch.float64))
    assert_same_views(flat, twin)
    assert flat.flags.tolist() == flags
    assert_intact(flat, memory)


NARROW = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# Sizes close to a block, to a chunk and to a 16-wide tail, and whether they are quantized.
SMALL = [(dense([17, 9], [1, 0]), True), (dense([5]), False), (dense([]), False)]
SMALL += [(dense([256]), True), (dense([0]), True)]
COMPILED = [*((dense([n]), True) for n in (1, 15, 16, 17, 255, 257, 5000)), (dense([33]), False)]
COMPILED += [(dense([17, 900], [1, 0]), True), (dense([20_000]), False)]


def quantized_slots(place: Place) -> tuple[list[Any], list[bool]]:
    found = [(dense([place.many]), True), *SMALL, *(COMPILED if place.is_compiled else ())]
    return [slot for slot, _ in found], [is_quantized for _, is_quantized in found]


def like(slots: Any) -> list[Tensor]:
    return [torch.empty_strided(*slot) for slot in slots]


def guarded(place: Place, size: int, feedback: bool = True) -> tuple[Any, Any]:
    """The buffers of all ranks, for the kernels and for the twins."""
    from tritonddp.kernels.quantized.quantize import QuantizedTables

    slots, quantized = quantized_slots(place)
    mine = Guarded(like(slots), quantized, size, feedback, device=torch.device(place.device))
    twins = Guarded(like(slots), quantized, size, feedback)
    for flat in mine.flats:
        flat.tables = QuantizedTables(flat, None if place.is_compiled else 512)
    return mine, twins


@pytest.mark.parametrize(
    ("size", "feedback"),
    [*((size, True) for size in (1, 2, 3, 4, 8)), *((size, False) for size in (1, 3, 8))],
)
def test_all_ranks_have_the_bits_of_the_reference(place, size, feedback):
    mine, twins = guarded(place, size, feedback)
    slots, _ = quantized_slots(place)
    unused = 4
    # The second step has NaN, infinities and numbers that are too small. In the third step, some
    # ranks do not use parameters that have a residual, and no rank uses one slot.
    for step in range(3):
        torch.manual_seed(step)
        grads: list[list[Any]] = [embedded_gradients(slots, torch.float32)[0] for _ in range(size)]
        for rank, each in enumerate(grads):
            # Finite on all ranks except one: otherwise every block would have an infinity.
            for grad in each if step != 1 else each[: rank > 0]:
                grad.normal_()
            if step != 1:
                each[0][::7] = -0.0
        used = [[True] * len(slots)] * size
        if step == 2:
            used = [
                [slot != unused and (rank + slot) % 3 != 1 for slot in range(len(slots))]
                for rank in range(size)
            ]
            for each in grads:
                each[unused] = None
        there = [[g if g is None else g.to(place.device) for g in each] for each in grads]
        before, moved = launch.launches, sum(flat.tables.moves for flat in mine.flats)
        results = all_reduce(mine.flats, there, used, 1 / 3, place)
        moves = sum(flat.tables.moves for flat in mine.flats) - moved
        assert launch.launches - before == 3 * size + moves
        expected = all_reduce(twins.flats, grads, used, 1 / 3, quantized_reference)
        for flat, twin in zip(mine.flats, twins.flats, strict=True):
            assert_same_residuals(flat, twin)
            assert flat.flags.tolist() == twin.flags.tolist()
            assert flat.headers.tolist() == twin.headers.tolist()
            assert_same_bits(flat.result.scales, twin.result.scales, "scales")
        for rank in range(size):
            for slot in range(len(slots)):
                assert_same_bits(results[rank][slot], expected[rank][slot], f"slot {slot}")
                assert_same_bits(results[rank][slot], results[0][slot], f"rank {rank}")
        mine.assert_guards_intact()
        twins.assert_guards_intact()
    assert results[0][unused].isnan().all(), "it was written, though no rank has used it"


@ALIGNED
@NARROW
def test_messages_and_gradients_of_any_dtype_have_the_bits_of_the_reference(place, dtype, aligned):
    (mine, twins), (slots, _) = guarded(place, 2), quantized_slots(place)
    unused, missing = 4, 2
    grads, arenas = embedded_gradients(slots, dtype, aligned, place.device)
    given, _ = embedded_gradients(slots, dtype)
    finite = torch.randn(place.many) * 3e4  # one that stays finite
    for each in (grads, given):
        each[0].copy_(finite)
    used, headers = [slot != unused for slot in range(len(slots))], bytes([0, 7, 255, 8, 0, 1])
    for rank, (flat, twin) in enumerate(zip(mine.flats, twins.flats, strict=True)):
        place.quantize(flat, grads, used, 1 / 3, headers)
        quantized_reference.quantize(twin, given, used, 1 / 3, headers)
        assert flat.tables.aligned is aligned
        assert_same_messages(flat.message.cpu(), twin.message, twin)
        assert_same_residuals(flat, twin)
        own = [*map(int, used), *headers[3 * rank : 3 * rank + 3]]
        assert flat.outgoing.trailers.tolist() == [own] * 2
    for slot, arena in enumerate(arenas):
        assert_same_bits(grads[slot], given[slot], f"gradient {slot} was written")
        arena.assert_guards_intact(f"gradient {slot}")
    for kernels, flats in ((place, mine.flats), (quantized_reference, twins.flats)):
        exchange(flats)
        for flat in flats:
            kernels.reduce_parts(flat)
        gather(flats)
    flat, twin = mine.flats[0], twins.flats[0]
    sums = flat.message.clone()
    for value in (None, 1 / 3, -1e-40, math.inf):
        targets, arenas = embedded_gradients(slots, dtype, aligned, place.device)
        expected, _ = embedded_gradients(slots, dtype)
        raw(arenas[unused].memory).fill_(POISON[dtype.itemsize])
        targets[missing] = expected[missing] = None
        place.dequantize(flat, targets, place.factor(value))
        factor = None if value is None else torch.tensor([value], dtype=torch.float64)
        quantized_reference.dequantize(twin, expected, factor)
        for slot, arena in enumerate(arenas):
            if slot not in (unused, missing):
                assert_same_bits(targets[slot], expected[slot], f"factor {value}, slot {slot}")
            arena.assert_guards_intact(f"gradient {slot}")
        unused_bits = raw(arenas[unused].memory)
        assert (unused_bits == POISON[dtype.itemsize]).all(), "an unused gradient was written"
    assert torch.equal(flat.message, sums), "the message was written"
    mine.assert_guards_intact()
