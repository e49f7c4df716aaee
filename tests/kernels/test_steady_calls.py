"""A buffer prepares its calls at the first use, and notices each change in later calls."""

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from poisoned import assert_same_bits, dense, values

from tritonddp import _torch
from tritonddp.kernels import flatten as flatten_module
from tritonddp.kernels import launch, reference
from tritonddp.kernels import unflatten as unflatten_module
from tritonddp.kernels.flat_buffer import DTYPES, FlatBuffer, Layout

COUNT = 12  # gradients
SLOTS = [dense([8, 8]), dense([64])] * (COUNT // 2)
USED = [True] * COUNT
HEADERS = bytes([7, 0, 255])


def flat_of(wire=torch.float32, alignment=1) -> FlatBuffer:
    shapes, strides = zip(*SLOTS, strict=True)
    return FlatBuffer(
        Layout.of(shapes, strides, alignment, len(HEADERS)), wire, torch.device("cpu")
    )


def gradients(dtype=torch.float32, seed=0) -> list[torch.Tensor | None]:
    return [
        values(math.prod(shape), dtype, seed + slot).as_strided(shape, stride)
        for slot, (shape, stride) in enumerate(SLOTS)
    ]


def steps(dtype, flat) -> Iterator[tuple[Any, ...]]:
    """Arguments of ``flatten``: in each step one argument has changed."""
    grads, others = gradients(dtype), gradients(dtype, 50)
    missing = [*grads[:3], None, *grads[4:]]
    placed = [*grads[:2], flat.views[2], *grads[3:]]
    unused, changed = list(USED), bytearray(HEADERS)
    yield grads, USED, 0.5, HEADERS
    yield others, unused, 0.5, changed
    unused[4] = False
    yield others, unused, 0.5, changed
    changed[1] = 9
    yield others, unused, 0.5, changed
    for headers in (bytes([1, 2, 3]), [4, 5, 6]):
        yield others, unused, 1 / 3, headers
    for given in (missing, missing, grads, placed, placed, flat.views):
        yield given, unused, 1 / 3, HEADERS
    for given in ([None, *grads[1:]], [None] * COUNT):
        yield given, USED, 1 / 3, HEADERS
    for scale in (1, 1.0, 0.0, -0.0, 1e300, math.inf, math.nan, 1.0):
        yield grads, USED, scale, HEADERS
    odd = [torch.empty(65, dtype=dtype)[1:].copy_(grad.view(-1)) for grad in grads]
    yield [g.as_strided(*slot, 1) for g, slot in zip(odd, SLOTS, strict=True)], USED, 1.0, HEADERS
    for other in (torch.float32, torch.float64, torch.float16):
        yield gradients(other), USED, 0.5, HEADERS
    yield grads, USED, 0.5, HEADERS


@pytest.mark.parametrize("wire", DTYPES, ids=str)
@pytest.mark.parametrize("run", [reference.flatten, flatten_module.flatten], ids=["twin", "triton"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_buffer_notices_each_change_of_its_arguments(run, wire):
    flat = flat_of(wire, alignment=16)
    for number, (grads, used, scale, headers) in enumerate(steps(wire, flat)):
        fresh = flat_of(wire, alignment=16)
        for view, twin in zip(flat.views, fresh.views, strict=True):
            twin.copy_(view)
        twins = [
            twin if grad is view else grad
            for grad, view, twin in zip(grads, flat.views, fresh.views, strict=True)
        ]
        run(flat, grads, used, scale, headers)
        flatten_one_by_one(fresh, twins, used, scale, headers)
        for slot, (view, twin) in enumerate(zip(flat.views, fresh.views, strict=True)):
            assert_same_bits(view, twin, f"step {number}, slot {slot}")
        assert_same_bits(
            flat.data[flat.layout.flags_offset :], fresh.data[flat.layout.flags_offset :]
        )
        flat.data.mul_(2)  # as a collective does


def flatten_one_by_one(flat, grads, used, scale, headers) -> None:
    wire = flat.data.dtype
    for view, grad in zip(flat.views, grads, strict=True):
        if grad is None:
            view.zero_()
        elif grad.dtype is wire:
            view.copy_(grad * scale)
        else:
            view.copy_(grad.to(reference.compute_dtype(grad.dtype, wire)) * scale)
    flat.flags.copy_(torch.tensor(used))
    flat.headers.copy_(torch.tensor(list(headers)))


def test_a_gradient_that_is_its_view_is_not_copied_onto_itself():
    # Autograd would count the copy as a change in place.
    flat = flat_of()
    versions = [view._version for view in flat.views]
    for _ in range(3):
        reference.flatten(flat, flat.views, USED, 0.5, HEADERS)
    assert [view._version for view in flat.views] == versions


def test_a_launch_is_made_on_the_device_of_its_tensors(monkeypatch):
    entered = []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        yield
        entered.append("left")

    monkeypatch.setattr(_torch, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    flat, grads = flat_of(alignment=16), gradients()
    for index in (None, 0, 1):
        flatten_module.flatten(flat, grads, USED, 0.5, HEADERS)
        unflatten_module.unflatten(flat, grads)
        flat.tables.device_index = index
    assert entered == []
    flatten_module.flatten(flat, grads, USED, 0.5, HEADERS)
    unflatten_module.unflatten(flat, grads)
    launch.run(1, lambda: entered.append("run"))
    assert entered == [*[1, "left"] * 2, 1, "run", "left"]


def test_a_launch_waits_for_a_kernel_that_is_compiled_in_the_background():
    class Compiled(dict):
        __hash__ = object.__hash__

    compiled = Compiled({(3, 1, 1): lambda *arguments: arguments[1:]})
    kernel = SimpleNamespace(warmup=lambda *_, **__: SimpleNamespace(result=lambda: compiled))
    prepared = launch.Launcher(kernel).bind(3, [torch.zeros(8)], (), ())
    assert prepared(7) == (7,)
