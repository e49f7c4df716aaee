"""The compiled kernels on a GPU: their bits, and how the host launches them."""

from __future__ import annotations

import pytest
import torch
from against_twins import *  # noqa: F403
from against_twins import Place
from poisoned import dense, embedded_flat, embedded_gradients
from quantized_ranks import quantized_buffers

from tritonddp.kernels import launch
from tritonddp.kernels.device_tables import DeviceTables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    # Not imported with this module: tests/kernels imports them for the interpreter, and whoever
    # comes first decides for the process.
    from tritonddp.kernels.flatten import INTERPRETED

    if INTERPRETED:
        pytest.skip("the kernels are interpreted in this process: run `pytest -m gpu`")
    call = getattr(request.node, "callspec", None)
    case = {} if call is None else call.params
    if (case.get("size"), case.get("feedback")) in ((1, False), (3, True), (4, True)):
        pytest.skip("tests/kernels has these ranks; a kernel takes half a second to compile")
    return Place.of("cuda", block=None, quantized_block=None, many=100_001)


def test_a_factor_on_the_host_is_refused_and_not_followed(place):
    flat, _ = embedded_flat([dense([20])], torch.float32, "cuda")
    with pytest.raises(TypeError, match=r"one torch\.float64 element on cuda:0, but is .* on cpu"):
        place.unflatten(flat, [torch.ones(20, device="cuda")], torch.ones(1).double())


def test_the_host_does_not_wait_for_the_factor(place):
    slots = [dense([100_000])]
    flat, _ = embedded_flat(slots, torch.float32, "cuda")
    flat.views[0].fill_(3)
    flat.flags.fill_(1)
    outputs = [torch.zeros(100_000, device="cuda")]
    # A place within a table, as the reducer may have it: not a multiple of 16 bytes.
    factor = torch.ones(4, dtype=torch.float64, device="cuda")[1]
    place.unflatten(flat, outputs, factor)  # compiled, so that nothing below waits
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    factor.fill_(2)
    place.unflatten(flat, outputs, factor)
    assert not torch.cuda.current_stream().query(), (
        "the host waited for the stream, or the test's sleep is too short"
    )
    assert (outputs[0] == 6).all()


def test_a_second_launch_compiles_nothing_and_uploads_nothing(place):
    slots = [dense([5000]), dense([33])]
    flat, _ = embedded_flat(slots, torch.float32, "cuda")
    grads, _ = embedded_gradients(slots, torch.float32, True, "cuda")
    factor = torch.ones(1, dtype=torch.float64, device="cuda")

    def launch_all():
        place.flatten(flat, grads, [True, True], 0.5)
        place.unflatten(flat, grads)
        place.unflatten(flat, grads, factor)

    launch_all()
    prepared, uploads, before = dict(flat.tables.launches), flat.tables.uploads, launch.launches
    launch_all()
    assert flat.tables.launches == prepared
    assert flat.tables.uploads == uploads
    assert launch.launches - before == 3


def test_uploads_behind_a_busy_stream_do_not_overwrite_each_other(place):
    # The host runs ahead by many uploads: each launch must see its own table.
    slots = [dense([5000])] * 4
    flat, _ = embedded_flat(slots, torch.float32, "cuda")
    grads = [[torch.full((5000,), 4.0 * i + j, device="cuda") for j in range(4)] for i in range(50)]
    DeviceTables.of(flat)
    place.flatten(flat, grads[0], [True] * 4, 1.0)
    results = []
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for i in range(50):
        place.flatten(flat, grads[i], [True] * 4, 1.0 + i)
        results.append(torch.stack([view[4999] for view in flat.views]))
    for i, result in enumerate(results):
        assert result.tolist() == [(4.0 * i + j) * (1.0 + i) for j in range(4)], f"launch {i}"


def test_everything_runs_on_the_current_stream(place):
    slots = [dense([100_000]), dense([33])]
    flat, _ = embedded_flat(slots, torch.float32, "cuda")
    grads, _ = embedded_gradients(slots, torch.float32, True, "cuda")
    outputs = [torch.zeros_like(grad) for grad in grads]
    place.flatten(flat, grads, [True, True], 1.0)  # compiled, so that nothing below waits
    place.unflatten(flat, outputs)
    for tensor in outputs:
        tensor.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        for grad in grads:
            grad.fill_(3)
        place.flatten(flat, grads, [True, True], 2.0)
        place.unflatten(flat, outputs)
        assert not stream.query(), (
            "the host waited for the stream, or the test's sleep is too short"
        )
    assert all((output == 0).all() for output in outputs), "ran on another stream"
    stream.synchronize()
    assert all((output == 6).all() for output in outputs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one_works_and_stays_not_current(place):
    slots = [dense([5000])]
    flat, _ = embedded_flat(slots, torch.float32, "cuda:1")
    grads = [torch.ones(5000, device="cuda:1")]
    with torch.cuda.device(0):
        place.flatten(flat, grads, [True], 0.5)
        assert torch.cuda.current_device() == 0
    assert (flat.views[0] == 0.5).all()


def test_quantizing_runs_on_the_current_stream_and_the_host_does_not_wait(place):
    grad = torch.zeros(1_000_000, device="cuda")
    (flat,) = quantized_buffers([grad], [True], 1, device=torch.device("cuda"))
    factor = torch.ones(1, dtype=torch.float64, device="cuda")

    def chain():
        place.quantize(flat, [grad], [True], 1.0, bytes(3))
        flat.received.copy_(flat.message)
        place.reduce_parts(flat)
        flat.gathered.copy_(flat.reduced)
        place.dequantize(flat, [grad], factor)

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
