"""The compiled kernels that sum over ranks against their plain-torch twins on the CPU.

One card is enough: what the ranks have packed is all in its memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# The same arenas and values as the interpreter tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from poisoned import (
    POISON,
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
from tritonddp.kernels.dispatch import select
from tritonddp.kernels.flat_buffer import FlatBuffer, Marks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
PAIRS = pytest.mark.parametrize(
    ("dtype", "wire"), [(F32, F32), (F32, BF16), (BF16, BF16), (F16, F16), (F64, F64)], ids=str
)


@pytest.fixture
def kernels():
    # Imported late, for the reason that test_kernels_gpu.py gives.
    from tritonddp.kernels.flatten import INTERPRETED

    if INTERPRETED:
        pytest.skip("the kernels are interpreted in this process: run `pytest -m gpu`")
    return select(torch.device("cuda"))


def packed(slots, wire, ranks, device="cuda", flags=None, **others) -> list[FlatBuffer]:
    """What each rank has packed; on the CPU the same."""
    flats = []
    for rank in range(ranks):
        flat, _ = embedded_flat(slots, wire, device, **others)
        for slot, view in enumerate(flat.views):
            content = values(view.numel(), wire, 100 * rank + slot).to(device)
            view.copy_(content.as_strided(view.shape, view.stride()))
        flat.flags.copy_(torch.tensor([1.0] * len(slots) if flags is None else flags[rank]))
        flat.headers.zero_()
        flat.marks.zero_()
        flats.append(flat)
    return flats


def peers_of(flats: list[FlatBuffer]) -> torch.Tensor:
    return torch.tensor([flat.data.data_ptr() for flat in flats], device="cuda")


@pytest.mark.parametrize(
    ("ranks", "aligned"), [(2, True), (2, False), (8, True)], ids=["2", "2-misaligned", "8"]
)
@PAIRS
def test_a_sum_over_ranks_has_the_bits_of_the_reference(kernels, dtype, wire, ranks, aligned):
    flats, twins = packed(SLOTS, wire, ranks), packed(SLOTS, wire, ranks, "cpu")
    flat, memory = embedded_flat(SLOTS, wire, "cuda")
    twin, _ = embedded_flat(SLOTS, wire)
    grads, arenas = embedded_gradients(SLOTS, dtype, aligned, "cuda")
    expected, _ = embedded_gradients(SLOTS, dtype)
    factor = torch.tensor([1 / 3], dtype=torch.float64)
    before = launch.launches
    kernels.reduce_unflatten(flat, peers_of(flats), grads, factor.cuda())
    assert launch.launches - before == 1
    reference.reduce_unflatten(twin, [each.data for each in twins], expected, factor)
    assert flat.tables.aligned is aligned
    for slot, arena in enumerate(arenas):
        assert_same_bits(grads[slot], expected[slot], f"slot {slot} {SLOTS[slot]}")
        arena.assert_guards_intact(f"gradient {slot}")
    assert_same_bits(flat.trailer, twin.trailer)
    assert (raw(flat.payload).cpu() == POISON[wire.itemsize]).all(), "the payload was written"
    assert_gaps_intact(flat)
    memory.assert_guards_intact("the flat buffer")


@pytest.mark.parametrize("shares", [False, True], ids=["one shot", "two shots"])
@pytest.mark.parametrize("wire", [F32, BF16], ids=str)
def test_gradients_that_live_in_the_buffer_get_the_sum_in_one_shot_or_two(kernels, wire, shares):
    slots, ranks = [dense([300_007]), *SLOTS], 4
    flags = [[slot != 3 for slot in range(len(slots))]] * ranks
    flats, twins = (packed(slots, wire, ranks, each, flags) for each in ("cuda", "cpu"))
    flat, memory = embedded_flat(slots, wire, "cuda")
    twin, _ = embedded_flat(slots, wire)
    factor = torch.tensor([1 / 3], dtype=torch.float64)
    peers = peers_of(flats)
    for rank in range(ranks if shares else 0):
        kernels.reduce_share(flat, peers, rank)
    kernels.reduce_unflatten(flat, peers, flat.views, factor.cuda(), shares)
    reference.reduce_unflatten(twin, [each.data for each in twins], twin.views, factor)
    for slot, (view, expected) in enumerate(zip(flat.views, twin.views, strict=True)):
        assert_same_bits(view, expected, f"slot {slot} {slots[slot]}")
    assert_same_bits(flat.trailer, twin.trailer)
    assert_gaps_intact(flat)
    memory.assert_guards_intact("the flat buffer")


@pytest.mark.parametrize("shares", [False, True], ids=["one shot", "two shots"])
def test_a_missing_gradient_and_one_that_no_rank_used_are_left_alone(kernels, shares):
    slots, ranks = [dense([5000]), dense([33]), dense([17]), dense([0])], 3
    flats = packed(slots, F32, ranks, flags=[[1, 0, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]])
    for flat in flats:
        flat.payload.fill_(2)
    flat, _ = embedded_flat(slots, F32, "cuda")
    grads = [torch.ones(shape, device="cuda") for shape, _ in slots]
    for rank in range(ranks if shares else 0):
        kernels.reduce_share(flat, peers_of(flats), rank)
    kernels.reduce_unflatten(flat, peers_of(flats), [*grads[:2], None, grads[3]], None, shares)
    assert flat.flags.tolist() == [2, 0, 1, 0]
    assert (grads[0] == 6).all()
    assert (grads[1] == 1).all()
    assert (grads[2] == 1).all()


@pytest.mark.parametrize("wire", [F32, BF16], ids=str)
def test_headers_and_marks_of_all_ranks_arrive(kernels, wire):
    ranks, count = 3, 1000
    slots = [dense([5000]), dense([17])]
    flats = packed(slots, wire, ranks, headers=ranks * count, marks=Marks(0, ranks))
    headers = [(7 * place + 255) % 256 for place in range(ranks * count)]
    for rank, each in enumerate(flats):
        own = slice(rank * count, (rank + 1) * count)
        each.headers[own] = torch.tensor(headers[own], dtype=wire, device="cuda")
        each.marks[1, 0] = 1 << rank
    flat, memory = embedded_flat(slots, wire, "cuda", ranks * count, Marks(0, ranks))
    kernels.reduce_unflatten(flat, peers_of(flats), [None, None])
    assert flat.flags.tolist() == [3, 3]
    assert flat.headers.tolist() == headers
    assert flat.marked() == {1: [0, 1, 2]}
    assert_gaps_intact(flat)
    memory.assert_guards_intact("the flat buffer")


def test_it_runs_on_the_current_stream_and_the_host_waits_for_nothing(kernels):
    slots = [dense([100_000]), dense([33])]
    flats = packed(slots, F32, 2)
    flat, _ = embedded_flat(slots, F32, "cuda")
    grads = [torch.zeros(shape, device="cuda") for shape, _ in slots]
    peers, factor = peers_of(flats), torch.ones(1, dtype=torch.float64, device="cuda")
    kernels.reduce_unflatten(flat, peers, grads, factor)  # compiled, so that nothing below waits
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        for each in flats:
            each.payload.fill_(3)
        factor.fill_(0.5)
        kernels.reduce_unflatten(flat, peers, grads, factor)
        assert not stream.query(), (
            "the host waited for the stream, or the test's sleep is too short"
        )
    stream.synchronize()
    assert all((grad == 3).all() for grad in grads)
