"""The compiled kernels on a GPU against their plain-torch twins on the CPU."""

from __future__ import annotations

import sys
from math import inf, nan
from pathlib import Path

import pytest
import torch

# The same arenas and values as the interpreter tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

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

from tritonddp.kernels import launch, reference
from tritonddp.kernels.device_tables import DeviceTables
from tritonddp.kernels.dispatch import select
from tritonddp.kernels.flat_buffer import DTYPES, FlatBuffer, Marks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def kernels():
    # Not imported with this module: tests/kernels imports them for the interpreter, and whoever
    # comes first decides for the process.
    from tritonddp.kernels.flatten import INTERPRETED

    if INTERPRETED:
        pytest.skip("the kernels are interpreted in this process: run `pytest -m gpu`")
    return select(torch.device("cuda"))


def strided(flat: FlatBuffer) -> None:
    """Fill a flat buffer as an all-reduce leaves it, all flags set."""
    for slot, view in enumerate(flat.views):
        content = values(view.numel(), flat.data.dtype, slot).to(view.device)
        view.copy_(content.as_strided(view.shape, view.stride()))
    flat.flags.fill_(1)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("wire", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flatten_has_the_bits_of_the_reference(kernels, dtype, wire, aligned):
    grads, arenas = embedded_gradients(SLOTS, dtype, aligned, "cuda")
    twins, _ = embedded_gradients(SLOTS, dtype)
    before = [raw(arena.memory).clone() for arena in arenas]
    flat, memory = embedded_flat(SLOTS, wire, "cuda")
    expected, _ = embedded_flat(SLOTS, wire)
    used = [slot % 3 != 1 for slot in range(len(SLOTS))]
    kernels.flatten(flat, grads, used, 1 / 3)
    reference.flatten(expected, twins, used, 1 / 3)
    assert flat.tables.aligned is aligned
    for slot, (view, twin) in enumerate(zip(flat.views, expected.views, strict=True)):
        assert_same_bits(view, twin, f"slot {slot} {SLOTS[slot]}")
    assert flat.flags.tolist() == list(map(float, used))
    assert_gaps_intact(flat)
    memory.assert_guards_intact("the flat buffer")
    for arena, bits_before in zip(arenas, before, strict=True):
        assert torch.equal(raw(arena.memory), bits_before), "a gradient was written"


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("wire", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unflatten_has_the_bits_of_the_reference(kernels, dtype, wire, aligned):
    flat, _ = embedded_flat(SLOTS, wire, "cuda")
    twin, _ = embedded_flat(SLOTS, wire)
    strided(flat)
    strided(twin)
    grads, arenas = embedded_gradients(SLOTS, dtype, aligned, "cuda")
    expected, _ = embedded_gradients(SLOTS, dtype)
    unused = 8
    flat.flags[unused] = 0
    raw(arenas[unused].memory).fill_(POISON[dtype.itemsize])
    kernels.unflatten(flat, grads)
    reference.unflatten(twin, expected)
    assert flat.tables.aligned is aligned
    for slot, arena in enumerate(arenas):
        if slot != unused:
            assert_same_bits(grads[slot], expected[slot], f"slot {slot} {SLOTS[slot]}")
        arena.assert_guards_intact(f"gradient {slot}")
    assert (raw(arenas[unused].memory) == POISON[dtype.itemsize]).all(), "an unused one was written"


@pytest.mark.parametrize("count", [1, 200, 12 * 1024])
@pytest.mark.parametrize("wire", DTYPES, ids=str)
def test_headers_are_written_behind_the_flags(kernels, wire, count):
    slots = [dense([5000]), dense([17])]
    grads, _ = embedded_gradients(slots, torch.float32, True, "cuda")
    flat, memory = embedded_flat(slots, wire, "cuda", headers=count)
    headers = bytes((7 * place + 255) % 256 for place in range(count))
    before = launch.launches
    for given in (headers, headers[::-1]):
        kernels.flatten(flat, grads, [True, False], 0.5, given)
        assert flat.flags.tolist() == [1, 0]
        assert flat.headers.tolist() == list(given)
    assert launch.launches - before == 2
    assert_gaps_intact(flat)
    memory.assert_guards_intact("the flat buffer")


@pytest.mark.parametrize("value", [inf, -inf, nan], ids=str)
@pytest.mark.parametrize("wire", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_that_are_not_finite_are_marked(kernels, dtype, wire, value):
    slots = [dense([5000]), dense([0]), dense([17]), dense([300, 257], [1, 0])]
    flat, memory = embedded_flat(slots, wire, "cuda", headers=3, marks=Marks(9, 12))
    for slot, place in ((0, 0), (0, 2047), (0, 2048), (0, 4999), (2, 16), (3, 77_099)):
        for broken in (True, False):
            grads = [
                torch.ones(shape, dtype=dtype, device="cuda").as_strided(shape, stride)
                for shape, stride in slots
            ]
            if broken:
                grads[slot].as_strided((grads[slot].numel(),), (1,))[place] = value
            kernels.flatten(flat, grads, [True] * 4, 0.5, [1, 2, 3])
            assert flat.marked() == ({slot: [9]} if broken else {}), (slot, place)
    assert flat.flags.tolist() == [1] * 4
    assert flat.headers.tolist() == [1, 2, 3]
    assert_gaps_intact(flat)
    memory.assert_guards_intact("the flat buffer")


@pytest.mark.parametrize("value", [1 / 3, -0.0, 1 + 2.0**-40, 2.0**-130, 1e300, inf, nan], ids=str)
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("wire", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaled_gradients_have_the_bits_of_the_reference(kernels, dtype, wire, aligned, value):
    flat, _ = embedded_flat(SLOTS, wire, "cuda")
    twin, _ = embedded_flat(SLOTS, wire)
    strided(flat)
    strided(twin)
    before = raw(flat.data).clone()
    grads, arenas = embedded_gradients(SLOTS, dtype, aligned, "cuda")
    expected, _ = embedded_gradients(SLOTS, dtype)
    factor = torch.tensor([value], dtype=torch.float64)
    kernels.unflatten(flat, grads, factor.cuda())
    reference.unflatten(twin, expected, factor)
    for slot, arena in enumerate(arenas):
        assert_same_bits(grads[slot], expected[slot], f"slot {slot} {SLOTS[slot]}")
        arena.assert_guards_intact(f"gradient {slot}")
    assert torch.equal(raw(flat.data), before), "the flat buffer was written"


@pytest.mark.parametrize("value", [1 / 3, 1 + 2.0**-40, nan], ids=str)
@pytest.mark.parametrize("wire", DTYPES, ids=str)
def test_gradients_that_live_in_the_buffer_are_scaled_once_and_there(kernels, wire, value):
    slots = [dense([300_007]), *SLOTS]
    flat, memory = embedded_flat(slots, wire, "cuda")
    twin, _ = embedded_flat(slots, wire)
    strided(flat)
    strided(twin)
    factor = torch.tensor([value], dtype=torch.float64)
    kernels.unflatten(flat, flat.views, factor.cuda())
    reference.unflatten(twin, twin.views, factor)
    for slot, (view, expected) in enumerate(zip(flat.views, twin.views, strict=True)):
        assert_same_bits(view, expected, f"slot {slot} {slots[slot]}")
    assert_gaps_intact(flat)
    memory.assert_guards_intact("the flat buffer")


def test_a_factor_on_the_host_is_refused_and_not_followed(kernels):
    flat, _ = embedded_flat([dense([20])], torch.float32, "cuda")
    with pytest.raises(TypeError, match=r"one torch\.float64 element on cuda:0, but is .* on cpu"):
        kernels.unflatten(flat, [torch.ones(20, device="cuda")], torch.ones(1).double())


def test_the_host_does_not_wait_for_the_factor(kernels):
    slots = [dense([100_000])]
    flat, _ = embedded_flat(slots, torch.float32, "cuda")
    flat.views[0].fill_(3)
    flat.flags.fill_(1)
    outputs = [torch.zeros(100_000, device="cuda")]
    # A place within a table, as the reducer may have it: not a multiple of 16 bytes.
    factor = torch.ones(4, dtype=torch.float64, device="cuda")[1]
    kernels.unflatten(flat, outputs, factor)  # compiled, so that nothing below waits
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    factor.fill_(2)
    kernels.unflatten(flat, outputs, factor)
    assert not torch.cuda.current_stream().query(), (
        "the host waited for the stream, or the test's sleep is too short"
    )
    assert (outputs[0] == 6).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beside_a_misaligned_one", [False, True])
def test_in_place_scaling_scales_once(kernels, dtype, beside_a_misaligned_one):
    # Misaligned, loads and stores may be laid out differently over the threads of a program.
    slots = [dense([300_007]), dense([33]), dense([4])]
    flat, memory = embedded_flat(slots, dtype, "cuda")
    expected, _ = embedded_flat(slots, dtype)
    strided(flat)
    twins = [view.cpu() for view in flat.views]
    grads = list(flat.views)
    if beside_a_misaligned_one:
        odd = Arena(4, dtype, aligned=False, device="cuda")
        odd.inside().copy_(grads[2])
        grads[2] = odd.inside()
    kernels.flatten(flat, grads, [True] * 3, 0.3)
    reference.flatten(expected, twins, [True] * 3, 0.3)
    assert flat.tables.aligned is not beside_a_misaligned_one
    for slot in range(3):
        assert_same_bits(flat.views[slot], expected.views[slot], f"slot {slot}")
    assert_gaps_intact(flat)
    memory.assert_guards_intact("the flat buffer")


def test_missing_gradients_become_zeros(kernels):
    slots = [dense([5000]), dense([17]), dense([0])]
    flat, _ = embedded_flat(slots, torch.bfloat16, "cuda")
    kernels.flatten(flat, [None, torch.ones(17, device="cuda"), None], [False, True, False], 0.5)
    assert flat.views[0].count_nonzero() == 0
    assert (flat.views[1] == 0.5).all()
    assert flat.flags.tolist() == [0, 1, 0]


def test_a_second_launch_compiles_nothing_and_uploads_nothing(kernels):
    from tritonddp.kernels import flatten as module

    slots = [dense([5000]), dense([33])]
    flat, _ = embedded_flat(slots, torch.float32, "cuda")
    grads, _ = embedded_gradients(slots, torch.float32, True, "cuda")
    kernels.flatten(flat, grads, [True, True], 0.5)
    variants, uploads, before = (
        len(module._launch._compiled),
        flat.tables.uploads,
        launch.launches,
    )
    kernels.flatten(flat, grads, [True, True], 0.5)
    assert len(module._launch._compiled) == variants > 0
    assert flat.tables.uploads == uploads
    assert launch.launches - before == 1


def test_an_unflatten_with_a_factor_is_the_code_of_one_without(kernels):
    from tritonddp.kernels import unflatten as module

    slots = [dense([5000]), dense([33])]
    flat, _ = embedded_flat(slots, torch.float32, "cuda")
    grads, _ = embedded_gradients(slots, torch.float32, True, "cuda")
    kernels.unflatten(flat, grads)
    variants, uploads = len(module._launch._compiled), flat.tables.uploads
    kernels.unflatten(flat, grads, torch.ones(1, dtype=torch.float64, device="cuda"))
    assert len(module._launch._compiled) == variants > 0
    assert flat.tables.uploads == uploads


def test_uploads_behind_a_busy_stream_do_not_overwrite_each_other(kernels):
    # The host runs ahead by many uploads: each launch must see its own table.
    slots = [dense([5000])] * 4
    flat, _ = embedded_flat(slots, torch.float32, "cuda")
    grads = [[torch.full((5000,), 4.0 * i + j, device="cuda") for j in range(4)] for i in range(50)]
    DeviceTables.of(flat)
    kernels.flatten(flat, grads[0], [True] * 4, 1.0)
    results = []
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for i in range(50):
        kernels.flatten(flat, grads[i], [True] * 4, 1.0 + i)
        results.append(torch.stack([view[4999] for view in flat.views]))
    for i, result in enumerate(results):
        assert result.tolist() == [(4.0 * i + j) * (1.0 + i) for j in range(4)], f"launch {i}"


def test_everything_runs_on_the_current_stream(kernels):
    slots = [dense([100_000]), dense([33])]
    flat, _ = embedded_flat(slots, torch.float32, "cuda")
    grads, _ = embedded_gradients(slots, torch.float32, True, "cuda")
    outputs = [torch.zeros_like(grad) for grad in grads]
    kernels.flatten(flat, grads, [True, True], 1.0)  # compiled, so that nothing below waits
    kernels.unflatten(flat, outputs)
    for tensor in outputs:
        tensor.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        for grad in grads:
            grad.fill_(3)
        kernels.flatten(flat, grads, [True, True], 2.0)
        kernels.unflatten(flat, outputs)
        assert not stream.query(), (
            "the host waited for the stream, or the test's sleep is too short"
        )
    assert all((output == 0).all() for output in outputs), "ran on another stream"
    stream.synchronize()
    assert all((output == 6).all() for output in outputs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one_works_and_stays_not_current(kernels):
    slots = [dense([5000])]
    flat, _ = embedded_flat(slots, torch.float32, "cuda:1")
    grads = [torch.ones(5000, device="cuda:1")]
    with torch.cuda.device(0):
        kernels.flatten(flat, grads, [True], 0.5)
        assert torch.cuda.current_device() == 0
    assert (flat.views[0] == 0.5).all()
