"""The compiled kernels on a GPU: their bits, and their launches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from against_twins import *  # noqa: F403
from against_twins import Place
from poisoned import dense, embedded_flat, embedded_gradients
from quantized_ranks import quantized_buffers

from tritonddp.kernels import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    # Not imported with this module: its first import decides whether kernels are interpreted.
    from tritonddp.kernels.flatten import INTERPRETED

    if INTERPRETED:
        pytest.skip("the kernels are interpreted in this process: run `pytest -m gpu`")
    call = getattr(request.node, "callspec", None)
    case = {} if call is None else call.params
    if (case.get("size"), case.get("feedback")) in ((1, False), (3, True), (4, True)):
        pytest.skip("tests/kernels has these ranks; a kernel takes half a second to compile")
    return Place(is_compiled=True)


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
    # Many uploads are queued, and each launch must read its own table.
    slots = [dense([5000])] * 4
    flat, _ = embedded_flat(slots, torch.float32, "cuda")
    grads = [[torch.full((5000,), 4.0 * i + j, device="cuda") for j in range(4)] for i in range(50)]
    place.flatten(flat, grads[0], [True] * 4, 1.0)
    results = []
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for i in range(50):
        place.flatten(flat, grads[i], [True] * 4, 1.0 + i)
        results.append(torch.stack([view[4999] for view in flat.views]))
    for i, result in enumerate(results):
        assert result.tolist() == [(4.0 * i + j) * (1.0 + i) for j in range(4)], f"launch {i}"


def copying(place: Place, grad: torch.Tensor, factor: torch.Tensor) -> Callable[[], None]:
    flat, _ = embedded_flat([dense(grad.shape)], torch.float32, "cuda")

    def run() -> None:
        place.flatten(flat, [grad], [True], 1.0)
        place.unflatten(flat, [grad], factor)

    return run


def quantizing(place: Place, grad: torch.Tensor, factor: torch.Tensor) -> Callable[[], None]:
    (flat,) = quantized_buffers([grad], [True], 1, device=torch.device("cuda"))

    def run() -> None:
        place.quantize(flat, [grad], [True], 1.0, bytes(3))
        flat.received.copy_(flat.message)
        place.reduce_parts(flat)
        flat.gathered.copy_(flat.reduced)
        place.dequantize(flat, [grad], factor)

    return run


@pytest.mark.parametrize("kernels", [copying, quantizing])
def test_kernels_run_on_the_current_stream_and_the_host_does_not_wait(place, kernels):
    grad = torch.zeros(1_000_000, device="cuda")
    # Part of a table, as in the reducer: its address is not a multiple of 16.
    factor = torch.ones(4, dtype=torch.float64, device="cuda")[1]
    run = kernels(place, grad, factor)
    run()  # compiles the kernels, so that nothing below waits
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        grad.fill_(127)
        factor.fill_(2)
        run()
        is_behind = not stream.query()
        assert is_behind, "the host waited for the stream, or the test's sleep is too short"
    assert (grad == 0).all(), "ran on another stream"
    stream.synchronize()
    assert (grad == 254).all()
