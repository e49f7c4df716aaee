"""The kernels that sum over ranks, in Triton's interpreter, against their plain-torch twins.

The ranks' buffers are all in this process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

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
from torch import Tensor

from tritonddp.kernels import launch, reference
from tritonddp.kernels import reduce_unflatten as triton
from tritonddp.kernels.complex import ComplexBuffer
from tritonddp.kernels.device_tables import DeviceTables
from tritonddp.kernels.dispatch import _for_complex, in_triton, select
from tritonddp.kernels.flat_buffer import DTYPES, FlatBuffer, Layout, Marks

# The interpreter is numpy, which warns of the infinities and NaNs that are the point here.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

KERNELS = {"triton": triton, "reference": reference}
RUNS = pytest.mark.parametrize("kernels", KERNELS)
FACTORS = [1 / 3, 0.0, -0.0, 1 + 2.0**-40, 1e300, math.nan]


def factor_of(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def packed(
    slots, wire, ranks: int, flags=None, headers=0, marks=None
) -> tuple[list[FlatBuffer], list[Arena]]:
    """What each rank has packed."""
    flats, arenas = [], []
    for rank in range(ranks):
        flat, arena = embedded_flat(
            slots, wire, headers=headers, marks=Marks(rank, ranks) if marks else None
        )
        for slot, view in enumerate(flat.views):
            content = values(view.numel(), wire, 100 * rank + slot)
            view.copy_(content.as_strided(view.shape, view.stride()))
        flat.flags.copy_(torch.tensor([1.0] * len(slots) if flags is None else flags[rank]))
        flat.headers.zero_()
        flat.marks.zero_()
        flats.append(flat)
        arenas.append(arena)
    return flats, arenas


def result(like: FlatBuffer) -> tuple[FlatBuffer, Arena]:
    """Where the sum goes: full of poison."""
    layout = like.layout
    slots = list(zip(layout.shapes, layout.strides, strict=True))
    flat, arena = embedded_flat(slots, like.data.dtype, headers=layout.headers, marks=layout.marks)
    flat.tables = DeviceTables(flat, block=256)
    return flat, arena


def peers_of(kernels: str, flats: Sequence[FlatBuffer]) -> Tensor | list[Tensor]:
    data = [flat.data for flat in flats]
    return data if kernels == "reference" else torch.tensor([each.data_ptr() for each in data])


def run(kernels: str, flat, flats, grads, factor=None, shares=False) -> None:
    module, peers = KERNELS[kernels], peers_of(kernels, flats)
    module.reduce_unflatten(flat, peers, grads, factor, shares)


def all_reduced(flats: Sequence[FlatBuffer]) -> FlatBuffer:
    """As an all-reduce leaves it that adds in fp32, or fp64, and rounds once."""
    wire = flats[0].data.dtype
    total = flats[0].data.to(torch.promote_types(wire, torch.float32))
    for flat in flats[1:]:
        total = total + flat.data
    twin, _ = result(flats[0])
    twin.data.copy_(total)
    return twin


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("wire", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_gradient_has_the_bits_of_an_all_reduce_and_unflatten(dtype, wire, aligned):
    ranks = 2
    flats, arenas = packed(SLOTS, wire, ranks, headers=3)
    before = [raw(arena.memory).clone() for arena in arenas]
    factor = factor_of(1 / 3)
    # Of two ranks a sum in the wire's dtype, in whatever precision it is added.
    summed = result(flats[0])[0]
    torch.add(flats[0].data, flats[1].data, out=summed.data)
    expected, _ = embedded_gradients(SLOTS, dtype)
    reference.unflatten(summed, expected, factor)
    for kernels in KERNELS:
        flat, memory = result(flats[0])
        grads, gradient_arenas = embedded_gradients(SLOTS, dtype, aligned)
        run(kernels, flat, flats, grads, factor)
        for slot, (grad, twin) in enumerate(zip(grads, expected, strict=True)):
            assert_same_bits(grad, twin, f"{kernels}, slot {slot} {SLOTS[slot]}")
            gradient_arenas[slot].assert_guards_intact(f"gradient {slot}")
        assert_same_bits(flat.trailer, summed.trailer, f"{kernels}, trailer")
        payload = raw(flat.payload)
        assert (payload == POISON[wire.itemsize]).all(), "the payload of the result was written"
        assert_gaps_intact(flat)
        memory.assert_guards_intact("the flat buffer")
        assert flat.tables.aligned is (aligned or kernels == "reference")
    for arena, bits in zip(arenas, before, strict=True):
        assert torch.equal(raw(arena.memory), bits), "what a rank has packed was written"


@pytest.mark.parametrize("ranks", [1, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("wire", DTYPES, ids=str)
def test_any_number_of_ranks_is_added_up_in_order_and_rounded_once(wire, ranks):
    slots = [dense([300]), dense([17]), dense([0]), dense([])]
    flats, _ = packed(slots, wire, ranks)
    expected = all_reduced(flats)
    for kernels in KERNELS:
        flat, memory = result(flats[0])
        grads, arenas = embedded_gradients(slots, wire)
        run(kernels, flat, flats, grads)
        for slot, grad in enumerate(grads):
            assert_same_bits(grad, expected.views[slot], f"{kernels}, slot {slot}")
            arenas[slot].assert_guards_intact(f"gradient {slot}")
        assert_same_bits(flat.trailer, expected.trailer, f"{kernels}, trailer")
        memory.assert_guards_intact("the flat buffer")


@RUNS
@pytest.mark.parametrize(
    ("wire", "terms", "expected"),
    [
        (torch.float32, [1e8, 1.0, -1e8], 0.0),  # in another order 1
        (torch.bfloat16, [256.0, 1.0, 1.0], 258.0),  # rounded each time 256
        (torch.float16, [60_000.0, 60_000.0, -60_000.0], 60_000.0),  # no infinity in between
        (torch.float16, [60_000.0, 60_000.0, 0.0], math.inf),  # factor or not
        (torch.float64, [1e300, 1.0, -1e300], 0.0),
        (torch.float32, [-0.0, -0.0, -0.0], -0.0),
    ],
)
def test_sums_are_rounded_once_to_the_wires_dtype_and_only_then_scaled(
    kernels, wire, terms, expected
):
    slots = [dense([20])]
    flats, _ = packed(slots, wire, 3)
    for flat, term in zip(flats, terms, strict=True):
        flat.views[0].fill_(term)
    flat, _ = result(flats[0])
    grad = torch.ones(20, dtype=torch.float64)
    run(kernels, flat, flats, [grad], factor_of(0.25))
    assert_same_bits(grad, torch.full((20,), expected / 4, dtype=torch.float64))


@RUNS
@pytest.mark.parametrize("wire", DTYPES, ids=str)
def test_what_is_not_finite_on_one_rank_is_so_in_the_sum(kernels, wire):
    flats, _ = packed([dense([18])], wire, 3)
    for flat in flats:
        flat.views[0].fill_(1)
    flats[1].views[0][:3] = torch.tensor([math.nan, math.inf, -math.inf])
    flats[2].views[0][2:4] = torch.tensor([math.inf, -math.inf])
    grad = torch.zeros(18)
    run(kernels, result(flats[0])[0], flats, [grad])
    assert_same_bits(grad[:5], torch.tensor([math.nan, math.inf, math.nan, -math.inf, 3.0]))


@RUNS
@pytest.mark.parametrize("wire", DTYPES, ids=str)
def test_flags_are_summed_and_gradients_that_no_rank_used_keep_every_bit(kernels, wire):
    slots = [dense([300]), dense([40]), dense([17]), dense([]), dense([33])]
    flags = [[1, 0, 0, 1, 0], [0, 0, 0, 1, 1], [0, 0, 0, 1, 0]]
    flats, _ = packed(slots, wire, 3, flags)
    expected, (flat, _) = all_reduced(flats), result(flats[0])
    grads, arenas = embedded_gradients(slots, torch.float32)
    for arena in arenas:
        raw(arena.memory).fill_(POISON[4])
    run(kernels, flat, flats, [*grads[:4], None])
    assert flat.flags.tolist() == [1, 0, 0, 3, 1]
    for slot, arena in enumerate(arenas):
        if slot in (0, 3):
            assert_same_bits(grads[slot], expected.views[slot].float(), f"slot {slot}")
        else:  # unused, or without a gradient
            assert (raw(arena.memory) == POISON[4]).all(), f"slot {slot} was written"
        arena.assert_guards_intact(f"gradient {slot}")


@RUNS
@pytest.mark.parametrize("count", [1, 300])
@pytest.mark.parametrize("wire", DTYPES, ids=str)
def test_headers_and_marks_of_all_ranks_arrive(kernels, wire, count):
    slots = [dense([5]), dense([40]), dense([0])]
    ranks = 3
    flats, _ = packed(slots, wire, ranks, headers=ranks * count, marks=True)
    headers = [(7 * place + 255) % 256 for place in range(ranks * count)]
    for rank, flat in enumerate(flats):
        own = slice(rank * count, (rank + 1) * count)
        flat.headers[own] = torch.tensor(headers[own], dtype=wire)
    flats[0].mark(1)
    flats[2].mark(slice(None))
    flat, memory = result(flats[0])
    raw(flat.data).fill_(POISON[wire.itemsize])
    run(kernels, flat, flats, [None] * 3)
    assert flat.flags.tolist() == [ranks] * 3
    assert flat.headers.tolist() == headers
    assert flat.marked() == {0: [2], 1: [0, 2], 2: [2]}
    assert_gaps_intact(flat)
    memory.assert_guards_intact("the flat buffer")


@RUNS
@pytest.mark.parametrize("value", [None, *FACTORS], ids=str)
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_that_live_in_the_buffer_are_what_all_reduce_and_unflatten_leave(
    kernels, wire, value
):
    slots = [dense([300]), dense([17]), dense([40]), dense([0])]
    flags = [[1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 0, 0]]
    flats, _ = packed(slots, wire, 3, flags, headers=2)
    factor = None if value is None else factor_of(value)
    expected = all_reduced(flats)
    if factor is not None:  # which leaves alone what no rank used, but for the sum
        reference.unflatten(expected, expected.views, factor)
    flat, memory = result(flats[0])
    run(kernels, flat, flats, flat.views, factor)
    for slot, view in enumerate(flat.views):
        assert_same_bits(view, expected.views[slot], f"slot {slot}")
    assert_same_bits(flat.trailer, expected.trailer, "trailer")
    if kernels == "triton":  # the twin adds gaps up, too, which have zeros
        assert_gaps_intact(flat)
    memory.assert_guards_intact("the flat buffer")


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("in_place", [False, True], ids=["copies", "views"])
def test_two_shots_have_the_bits_of_one(in_place, ranks):
    slots = [dense([1000]), dense([70]), dense([0]), dense([17, 9], [1, 0]), dense([])]
    flags = [[1, 0, 1, 1, 1]] * ranks
    found: dict[str, list[Tensor]] = {}
    for kernels in KERNELS:
        for shares in (False, True):
            flats, arenas = packed(slots, torch.bfloat16, ranks, flags)
            flat, memory = result(flats[0])
            grads, gradient_arenas = embedded_gradients(slots, torch.float32)
            for rank in range(ranks if shares else 0):
                before = [raw(arena.memory).clone() for arena in arenas]
                KERNELS[kernels].reduce_share(flat, peers_of(kernels, flats), rank)
                for other in set(range(ranks)) - {rank}:
                    assert torch.equal(raw(arenas[other].memory), before[other])
            targets = flat.views if in_place else grads
            run(kernels, flat, flats, targets, factor_of(0.3), shares)
            for each, arena in zip(flats, arenas, strict=True):
                arena.assert_guards_intact("what a rank has packed")
                if kernels == "triton":
                    assert_gaps_intact(each)
            for arena in (memory, *gradient_arenas):
                arena.assert_guards_intact("the flat buffer, or a gradient")
            found[f"{kernels}, shares {shares}"] = [*targets, flat.trailer]
    expected = found.pop("reference, shares False")
    for name, tensors in found.items():
        for slot, (tensor, twin) in enumerate(zip(tensors, expected, strict=True)):
            assert_same_bits(tensor, twin, f"{name}, slot {slot}")


def test_a_rank_writes_its_share_alone_and_all_shares_are_the_whole():
    slots, ranks = [dense([1000]), dense([70])], 3
    sums = all_reduced(packed(slots, torch.float32, ranks)[0])
    flats, _ = packed(slots, torch.float32, ranks)
    flat, _ = result(flats[0])
    peers = peers_of("triton", flats)
    places = torch.zeros(flat.layout.flags_offset)
    for rank in range(ranks):
        before = flats[rank].data.clone()
        triton.reduce_share(flat, peers, rank)
        written = raw(flats[rank].data) != raw(before)
        assert not written[flat.layout.flags_offset :].any(), "the trailer was written"
        places += written[: flat.layout.flags_offset]
        assert_same_bits(
            flats[rank].data[written.nonzero().flatten()], sums.data[written.nonzero().flatten()]
        )
    assert places.max() == 1
    assert places.sum() > 1000  # but where a sum is as what was there


@pytest.mark.parametrize("ranks", range(1, 10))
def test_the_second_shot_looks_for_a_chunk_where_the_first_has_summed_it(ranks):
    for num_chunks in range(60):
        owners = [
            rank for rank in range(ranks) for _ in range(*triton.share_of(num_chunks, ranks, rank))
        ]
        assert owners == [((at + 1) * ranks - 1) // num_chunks for at in range(num_chunks)]


@pytest.mark.parametrize("count", [1, 30])
def test_any_number_of_gradients_is_one_launch_and_a_later_one_prepares_nothing(count):
    slots = [dense([5 + slot]) for slot in range(count)]
    flats, _ = packed(slots, torch.bfloat16, 2)
    others, _ = packed(slots, torch.bfloat16, 2)
    for each in others:
        each.payload.fill_(1)
    flat, _ = result(flats[0])
    grads, _ = embedded_gradients(slots, torch.float32)
    before = launch.launches
    run("triton", flat, flats, grads, factor_of(0.5))
    assert launch.launches - before == 1
    prepared, uploads = dict(flat.tables.launches), flat.tables.uploads
    run("triton", flat, others, grads, factor_of(3))  # other buffers, another factor
    assert all((grad == 6).all() for grad in grads)
    assert flat.tables.launches == prepared
    assert flat.tables.uploads == uploads


def test_launches_of_one_buffer_are_told_apart_by_all_that_is_compiled_in():
    slots = [dense([1000]), dense([17])]
    (flat, _), (twin, _) = (result(packed(slots, torch.bfloat16, 1)[0][0]) for _ in range(2))
    for ranks, shares, in_place, dtype, aligned in (
        (2, False, False, torch.float32, True),
        (3, False, False, torch.float32, True),
        (3, True, False, torch.float32, True),
        (3, True, False, torch.float32, False),
        (3, True, False, torch.bfloat16, True),
        (3, False, False, torch.bfloat16, True),
        (3, False, True, torch.bfloat16, True),
        (2, True, True, torch.bfloat16, True),
    ):
        targets = []
        for kernels, each in (("triton", flat), ("reference", twin)):
            flats, _ = packed(slots, torch.bfloat16, ranks, [[1, 0]] * ranks)
            for rank in range(ranks if shares else 0):
                KERNELS[kernels].reduce_share(each, peers_of(kernels, flats), rank)
            grads, _ = embedded_gradients(slots, dtype, aligned)
            targets.append(each.views if in_place else grads)
            run(kernels, each, flats, targets[-1], factor_of(0.5), shares)
        for grad, expected in zip(*targets, strict=True):
            assert_same_bits(grad, expected, f"{ranks} ranks, {shares=}, {in_place=}, {dtype}")
    # The interpreter does as well with the code of aligned gradients for others; a GPU would not.
    launches = (each.launches for each in flat.tables._tables)
    prepared = {key for key in itertools.chain(*launches) if triton._launch in key}
    assert len(prepared) == 8


def test_a_buffer_without_gradients_and_headers_needs_no_launch():
    flats, _ = packed([], torch.float32, 2)
    flat, _ = result(flats[0])
    before = launch.launches
    run("triton", flat, flats, [])
    triton.reduce_share(flat, peers_of("triton", flats), 0)
    assert launch.launches == before


@RUNS
def test_gradients_without_elements_still_have_flags(kernels):
    flats, _ = packed([dense([0]), dense([3, 0])], torch.float32, 2, headers=1)
    flat, _ = result(flats[0])
    run(kernels, flat, flats, [torch.empty(0), torch.empty(3, 0)])
    assert flat.trailer.tolist() == [2, 2, 0]


@RUNS
def test_a_factor_of_another_kind_is_an_error_and_nothing_is_written(kernels):
    flats, _ = packed([dense([20])], torch.float32, 2)
    flat, memory = result(flats[0])
    grad = torch.full((20,), 7.0)
    with pytest.raises(TypeError, match=r"one torch\.float64 element on cpu, but is torch\.float3"):
        run(kernels, flat, flats, [grad], torch.ones(1))
    assert (grad == 7).all()
    assert (raw(memory.memory) == POISON[4]).all()


@pytest.mark.parametrize(
    ("peers", "found"),
    [
        (torch.zeros(2), r"torch\.float32 of shape \(2,\) on cpu"),
        (torch.zeros(2, 1, dtype=torch.int64), r"torch\.int64 of shape \(2, 1\) on cpu"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), r"torch\.int64 of shape \(2,\) on meta"),
    ],
    ids=["dtype", "shape", "device"],
)
def test_addresses_of_another_kind_are_an_error(peers, found):
    flats, _ = packed([dense([20])], torch.float32, 2)
    flat, _ = result(flats[0])
    with pytest.raises(TypeError, match=rf"addresses .* on cpu, but are {found}"):
        triton.reduce_unflatten(flat, peers, [torch.ones(20)])
    with pytest.raises(TypeError, match=rf"addresses .* on cpu, but are {found}"):
        triton.reduce_share(flat, peers, 0)


@pytest.mark.parametrize("in_place", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("shares", [False, True])
@RUNS
def test_complex_gradients_are_summed_by_their_parts(kernels, shares, in_place):
    slots = [dense([3, 5], [1, 0]), dense([40]), dense([]), dense([7])]
    shapes, strides = zip(*slots, strict=True)
    layout = Layout.of(shapes, strides, 16, headers=2)
    cpu = torch.device("cpu")
    flats = [ComplexBuffer(layout, torch.complex64, cpu) for _ in range(3)]
    for rank, each in enumerate(flats):
        for view in each.views:
            view.copy_(torch.randn(view.shape, dtype=torch.complex64))
        each.flags.copy_(torch.tensor([1, rank, 1, 0]))
    expected = [sum(each.views[slot] for each in flats) for slot in range(4)]
    flat = ComplexBuffer(layout, torch.complex64, cpu)
    grads = flat.views if in_place else [torch.zeros_like(view) for view in flat.views]
    ours = _for_complex(in_triton())
    chosen = ours if kernels == "triton" else select(cpu, torch.complex64)
    peers = peers_of(kernels, flats)
    if shares:
        for rank in range(3):
            chosen.reduce_share(flat, peers, rank)
    chosen.reduce_unflatten(flat, peers, grads, factor_of(2.0), shares)
    for slot, grad in enumerate(grads[:3]):
        assert torch.equal(grad, 2 * expected[slot])
    # No rank used it: in the buffer there is the sum, as an all-reduce leaves it.
    assert torch.equal(grads[3], expected[3] if in_place else torch.zeros(7, dtype=grads[3].dtype))
    assert flat.flags.tolist() == [3, 3, 3, 0]
