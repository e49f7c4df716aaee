"""What a buffer prepares when it is first used: later calls notice whatever has changed."""

import contextlib
import math
from collections.abc import Iterator
from functools import partial
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
VECTORS = [dense([64])] * COUNT
BOTH = [dense([8, 8]), dense([64])] * (COUNT // 2)
USED = [True] * COUNT
HEADERS = bytes([7, 0, 255])


def flat_of(slots=VECTORS, wire=torch.float32, alignment=1) -> FlatBuffer:
    shapes, strides = [shape for shape, _ in slots], [stride for _, stride in slots]
    layout = Layout.of(shapes, strides, alignment, len(HEADERS))
    return FlatBuffer(layout, wire, torch.device("cpu"))


def gradients(slots=VECTORS, dtype=torch.float32, seed=0) -> list[torch.Tensor | None]:
    return [
        values(math.prod(shape), dtype, seed + slot).as_strided(shape, stride)
        for slot, (shape, stride) in enumerate(slots)
    ]


# The CPU's twins.


def steps(slots, dtype, flat) -> Iterator[tuple[Any, ...]]:
    """Arguments of ``flatten``, each but for one thing those before."""
    grads, others = gradients(slots, dtype), gradients(slots, dtype, 50)
    missing = [*grads[:3], None, *grads[4:]]
    placed = [*grads[:2], flat.views[2], *grads[3:]]
    unused = [slot != 4 for slot in range(COUNT)]
    yield grads, USED, 0.5, HEADERS
    yield grads, USED, 0.5, bytes(HEADERS)
    yield others, USED, 0.5, HEADERS
    yield others, unused, 0.5, HEADERS
    yield others, unused, 1 / 3, HEADERS
    yield others, unused, 1 / 3, bytes([1, 2, 3])
    yield others, unused, 1 / 3, [4, 5, 6]
    yield missing, unused, 1 / 3, HEADERS
    yield missing, unused, 1 / 3, HEADERS
    yield grads, unused, 1 / 3, HEADERS
    yield placed, unused, 1 / 3, HEADERS
    yield placed, unused, 1 / 3, HEADERS
    yield flat.views, unused, 1 / 3, HEADERS
    yield [None, *grads[1:]], USED, 1 / 3, HEADERS
    yield [None] * COUNT, USED, 1 / 3, HEADERS
    for scale in (1, 1.0, 0.0, -0.0, 1e300, math.inf, math.nan, 1.0):
        yield grads, USED, scale, HEADERS
    odd = [torch.empty(65, dtype=dtype)[1:].copy_(grad.view(-1)) for grad in grads]
    yield [g.as_strided(*slot, 1) for g, slot in zip(odd, slots, strict=True)], USED, 1.0, HEADERS
    # From here on of other dtypes: fp32 and fp64, one of which is not that of the others.
    for other in (torch.float32, torch.float64, torch.float16):
        yield gradients(slots, other), USED, 0.5, HEADERS
    yield grads, USED, 0.5, HEADERS


@pytest.mark.parametrize("wire", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [VECTORS, BOTH], ids=["vectors", "both"])
@pytest.mark.parametrize("run", [reference.flatten, flatten_module.flatten], ids=["twin", "triton"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_buffer_notices_whatever_changes_from_one_step_to_the_next(run, slots, wire):
    flat = flat_of(slots, wire, alignment=16)
    for number, (grads, used, scale, headers) in enumerate(steps(slots, wire, flat)):
        fresh = flat_of(slots, wire, alignment=16)
        for view, twin in zip(flat.views, fresh.views, strict=True):
            twin.copy_(view)
        twins = [
            twin if grad is view else grad
            for grad, view, twin in zip(grads, flat.views, fresh.views, strict=True)
        ]
        run(flat, grads, used, scale, headers)
        plainly_flatten(fresh, twins, used, scale, headers)
        for slot, (view, twin) in enumerate(zip(flat.views, fresh.views, strict=True)):
            assert_same_bits(view, twin, f"step {number}, slot {slot}")
        assert_same_bits(
            flat.data[flat.layout.flags_offset :], fresh.data[flat.layout.flags_offset :]
        )


def plainly_flatten(flat, grads, used, scale, headers) -> None:
    """Gradient by gradient, by numbers."""
    wire = flat.data.dtype
    for view, grad in zip(flat.views, grads, strict=True):
        if grad is None:
            view.zero_()
        else:
            compute = reference.compute_dtype(grad.dtype, wire)
            if grad.dtype is wire:
                view.copy_(grad * scale)
            else:
                view.copy_(grad.to(compute) * scale)
    flat.flags.copy_(torch.tensor(used))
    flat.headers.copy_(torch.tensor(list(headers)))


@pytest.mark.parametrize("sizes", [(63,), (65,), (64, 64)], ids=str)
def test_the_twin_still_refuses_what_does_not_fit_when_it_has_flattened_before(sizes):
    flat = flat_of()
    for _ in range(2):
        reference.flatten(flat, gradients(), USED, 0.5, HEADERS)
    wrong = [*gradients()[: COUNT - 1], *map(torch.ones, sizes)]
    with (
        pytest.warns(UserWarning, match="resized"),
        pytest.raises(RuntimeError, match="not of the"),
    ):
        reference.flatten(flat, wrong, USED, 0.5, HEADERS)
    for bad in (b"", bytes(4), [1, 2, 256]):
        with pytest.raises(ValueError, match="header"):
            reference.flatten(flat, gradients(), USED, 0.5, bad)
    with pytest.raises(ValueError, match="12 slots, but 11 flags"):
        reference.flatten(flat, gradients(), USED[1:], 0.5, HEADERS)
    part = flat.part(0, 2)
    for _ in range(2):
        with pytest.raises(ValueError, match="room for 0 headers, but 3 came"):
            reference.flatten(part, gradients()[:2], USED[:2], 0.5, HEADERS)


def test_the_trailer_is_written_anew_after_the_collective_has_been_there():
    flat = flat_of()
    for run in (
        flat.write_trailer,
        lambda *a: reference.flatten(flat, gradients(), a[0], 1.0, a[1]),
    ):
        for _ in range(3):
            run(USED, HEADERS)
            assert flat.flags.tolist() == [1] * COUNT
            assert flat.headers.tolist() == list(HEADERS)
            flat.data.mul_(2)


@pytest.mark.parametrize("what", ["flags", "headers"])
@pytest.mark.parametrize("run", [None, reference.flatten, flatten_module.flatten])
def test_what_owners_of_flags_and_headers_change_in_place_is_noticed(run, what):
    flat, used, headers = flat_of(alignment=16), list(USED), bytearray(HEADERS)
    write = (
        partial(run, flat, gradients())
        if run
        else lambda used, _, also: flat.write_trailer(used, also)
    )
    for place in range(3):
        write(used, 1.0, headers)
        if what == "flags":
            used[place] = False
        else:
            headers[place] = 9
        write(used, 1.0, headers)
        assert flat.flags.tolist() == used
        assert flat.headers.tolist() == list(headers)


@pytest.mark.parametrize("slots", [VECTORS, BOTH], ids=["vectors", "both"])
def test_a_gradient_in_its_place_is_not_copied_onto_itself(slots):
    # Autograd would take it for written to by somebody.
    flat = flat_of(slots)
    versions = [view._version for view in flat.views]
    for _ in range(3):
        reference.flatten(flat, flat.views, USED, 0.5, HEADERS)
    assert [view._version for view in flat.views] == versions


# The kernels of a GPU.


def test_a_launch_is_made_where_its_tensors_are(monkeypatch):
    entered, seen = [], []

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
    assert entered == [1, "left"] * 2
    launch.run(1, lambda: seen.append(list(entered)))
    assert seen == [[*[1, "left"] * 2, 1]]


def test_a_kernel_that_compiles_in_the_background_is_waited_for():
    compiled = {(3, 1, 1): lambda *arguments: arguments[1:]}
    launched = SimpleNamespace(result=lambda: HashableDict(compiled))
    kernel = SimpleNamespace(warmup=lambda *_, **__: launched)
    prepared = launch.Launcher(kernel).bind(3, [torch.zeros(8)], (), ())
    assert prepared(7) == (7,)


class HashableDict(dict):
    """In the place of a compiled kernel: by its grid, what launches it."""

    __hash__ = object.__hash__
