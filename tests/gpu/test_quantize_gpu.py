"""The compiled quantising kernels on a GPU against their plain-torch twins on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

# The same buffers, arenas and values as the interpreter tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from guarded_ranks import Guarded, assert_same_messages, assert_same_residuals
from poisoned import assert_same_bits, dense, embedded_gradients, raw
from quantized_ranks import all_reduce, exchange, gather, quantized_buffers

from tritonddp.kernels import launch
from tritonddp.kernels.quantized import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FP8 = pytest.param(
    torch.float8_e4m3fn,
    marks=pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
        reason="needs compute capability 8.9",
    ),
)
NUMBERS = pytest.mark.parametrize("numbers", [torch.int8, FP8], ids=str)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SLOTS = [
    *[dense([numel]) for numel in (0, 1, 15, 16, 17, 255, 256, 257, 5000, 100_001)],
    *[dense([17, 900], [1, 0]), dense([33]), dense([20_000]), dense([])],
]
QUANTIZED = [True] * 11 + [False] * 3


@pytest.fixture
def kernels():
    # Not imported with this module: tests/kernels imports them for the interpreter, and whoever
    # comes first decides for the process.
    from tritonddp.kernels.flatten import INTERPRETED
    from tritonddp.kernels.quantized import dequantize, quantize, reduce_parts

    if INTERPRETED:
        pytest.skip("the kernels are interpreted in this process: run `pytest -m gpu`")
    return SimpleNamespace(
        quantize=quantize.quantize,
        reduce_parts=reduce_parts.reduce_parts,
        dequantize=dequantize.dequantize,
    )


@NUMBERS
def test_gradients_that_are_not_finite_are_marked_for_all_ranks(kernels, numbers):
    flats = quantized_buffers(
        [each.cuda() for each in like()],
        QUANTIZED,
        numbers,
        3,
        device=torch.device("cuda"),
        has_marks=True,
    )
    for step in range(3):
        for rank, flat in enumerate(flats):
            grads = [torch.ones_like(each, device="cuda") for each in like()]
            if step == 1 and rank > 0:
                grads[9][100_000], grads[12][19_999] = torch.inf, torch.nan
            headers = bytes(3 * rank) + bytes([7] * 3) + bytes(3 * (2 - rank))
            kernels.quantize(flat, grads, [True] * len(SLOTS), 1 / 3, headers)
        exchange(flats)
        for flat in flats:
            assert flat.marked() == ({9: [1, 2], 12: [1, 2]} if step == 1 else {})
            kernels.reduce_parts(flat)
            assert flat.flags.tolist() == [3] * len(SLOTS)
            assert flat.headers.tolist() == [7] * 9


def like():
    return [torch.empty_strided(shape, stride) for shape, stride in SLOTS]


@pytest.mark.parametrize(
    ("world_size", "feedback"), [(1, True), (2, True), (3, False), (8, True), (8, False)]
)
@NUMBERS
def test_all_ranks_have_the_bits_of_the_reference(kernels, numbers, world_size, feedback):
    mine = Guarded(like(), QUANTIZED, numbers, world_size, feedback, "cuda")
    twins = Guarded(like(), QUANTIZED, numbers, world_size, feedback)
    slots = range(len(SLOTS))
    for step, special in enumerate((False, True, False)):
        torch.manual_seed(step)
        grads = [embedded_gradients(SLOTS, torch.float32)[0] for _ in range(world_size)]
        for rank, each in enumerate(grads):
            if not special:
                for grad in each:
                    grad.normal_()
            elif rank:  # or every block has an infinity
                each[9].normal_()
        grads[0][8] = None
        used = [[slot != 8 and (rank + slot) % 3 != 1 for slot in slots] for rank in range(8)]
        on_gpu = [[grad if grad is None else grad.cuda() for grad in each] for each in grads]
        before = launch.launches
        results = all_reduce(mine.flats, on_gpu, used, 1 / 3, kernels)
        assert launch.launches - before == 3 * world_size
        expected = all_reduce(twins.flats, grads, used, 1 / 3, reference)
        for flat, twin in zip(mine.flats, twins.flats, strict=True):
            assert_same_residuals(flat, twin)
            assert flat.flags.tolist() == twin.flags.tolist()
            assert flat.headers.tolist() == twin.headers.tolist()
        for slot in slots:
            for rank in range(world_size):
                assert_same_bits(results[rank][slot], expected[rank][slot], f"slot {slot}")
        mine.assert_guards_intact()


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@NUMBERS
def test_gradients_of_any_dtype_come_and_go_as_by_the_reference(kernels, numbers, dtype, aligned):
    mine = Guarded(like(), QUANTIZED, numbers, 1, device="cuda")
    twins = Guarded(like(), QUANTIZED, numbers, 1)
    (flat,), (twin,) = mine.flats, twins.flats
    grads, arenas = embedded_gradients(SLOTS, dtype, aligned, "cuda")
    before = [raw(arena.memory).clone() for arena in arenas]
    used = [slot != 7 for slot in range(len(SLOTS))]
    kernels.quantize(flat, grads, used, 1 / 3, b"\1\2\3")
    reference.quantize(twin, embedded_gradients(SLOTS, dtype)[0], used, 1 / 3, b"\1\2\3")
    assert flat.tables.aligned is aligned
    assert_same_messages(flat.message.cpu(), twin.message, twin)
    assert_same_residuals(flat, twin)
    for arena, bits_before in zip(arenas, before, strict=True):
        assert torch.equal(raw(arena.memory), bits_before), "a gradient was written"
    for each, flats in ((kernels, [flat]), (reference, [twin])):
        exchange(flats)
        each.reduce_parts(flats[0])
        gather(flats)
    for value in (None, 1 / 3, 1e-39):
        factor = None if value is None else torch.tensor([value], dtype=torch.float64)
        targets, arenas = embedded_gradients(SLOTS, dtype, aligned, "cuda")
        expected, _ = embedded_gradients(SLOTS, dtype)
        kernels.dequantize(flat, targets, factor if factor is None else factor.cuda())
        reference.dequantize(twin, expected, factor)
        for slot, arena in enumerate(arenas):
            assert_same_bits(targets[slot], expected[slot], f"factor {value}, slot {slot}")
            arena.assert_guards_intact(f"gradient {slot}")
    mine.assert_guards_intact()


def test_everything_runs_on_the_current_stream_and_the_host_does_not_wait(kernels):
    grad = torch.zeros(1_000_000, device="cuda")
    (flat,) = quantized_buffers([grad], [True], torch.int8, 1, device=torch.device("cuda"))
    factor = torch.ones(1, dtype=torch.float64, device="cuda")

    def chain():
        kernels.quantize(flat, [grad], [True], 1.0, bytes(3))
        flat.received.copy_(flat.message)
        kernels.reduce_parts(flat)
        flat.gathered.copy_(flat.reduced)
        kernels.dequantize(flat, [grad], factor)

    chain()  # compiled, so that nothing below waits
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        grad.fill_(127)
        factor.fill_(2)
        chain()
        assert not stream.query(), (
            "the host waited for the stream, or the test's sleep is too short"
        )
    assert (grad == 0).all(), "ran on another stream"
    stream.synchronize()
    assert (grad == 254).all()
