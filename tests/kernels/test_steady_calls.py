"""What a buffer prepares when it is first used: later calls cost little, and notice what changed.

Functions of the package are counted, not timed: the numbers are the same on every machine.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import steady_step
import torch
from poisoned import assert_same_bits, dense, embedded_gradients, values
from quantized_ranks import quantized_buffers
from stub_kernel import StubKernel

from tritonddp import _torch
from tritonddp.kernels import device_tables, launch, reference
from tritonddp.kernels import flatten as flatten_module
from tritonddp.kernels import unflatten as unflatten_module
from tritonddp.kernels.flat_buffer import DTYPES, FlatBuffer, Layout, Marks
from tritonddp.kernels.quantized import dequantize as dequantize_module
from tritonddp.kernels.quantized import quantize as quantize_module
from tritonddp.kernels.quantized import reduce_parts as reduce_parts_module

COUNT = 12  # gradients
VECTORS = [dense([64])] * COUNT
BOTH = [dense([8, 8]), dense([64])] * (COUNT // 2)
USED = [True] * COUNT
HEADERS = bytes([7, 0, 255])
ONE = torch.ones(1, dtype=torch.float64)


def flat_of(slots=VECTORS, wire=torch.float32, alignment=1, marks=None) -> FlatBuffer:
    shapes, strides = [shape for shape, _ in slots], [stride for _, stride in slots]
    layout = Layout.of(shapes, strides, alignment, len(HEADERS), marks)
    return FlatBuffer(layout, wire, torch.device("cpu"))


def gradients(slots=VECTORS, dtype=torch.float32, seed=0) -> list[torch.Tensor | None]:
    return [
        values(math.prod(shape), dtype, seed + slot).as_strided(shape, stride)
        for slot, (shape, stride) in enumerate(slots)
    ]


def calls(function: Callable[..., Any], *arguments: Any) -> int:
    """Functions of the package that the third of three calls has called, itself among them."""
    for _ in range(2):
        function(*arguments)
    return steady_step.calls(partial(function, *arguments)).total()


MODULES = {
    "addresses": device_tables,
    "flatten": flatten_module,
    "unflatten": unflatten_module,
    "quantize": quantize_module,
    "reduce_parts": reduce_parts_module,
    "dequantize": dequantize_module,
}


@pytest.fixture
def kernels() -> Iterator[dict[str, StubKernel]]:
    """Kernels of a GPU that are launched on tensors on the CPU, and do nothing."""
    with contextlib.ExitStack() as stack:
        fakes = {name: StubKernel() for name in MODULES}
        for name, module in MODULES.items():
            stack.enter_context(mock.patch.object(module._launch, "kernel", fakes[name]))
        yield fakes


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


def test_every_bit_of_a_scaled_gradient_is_what_a_number_makes_of_it():
    # A tensor without dimensions takes the place of the number: NaN, -0.0 and subnormals too.
    generator = torch.Generator().manual_seed(0)
    for wire, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        limit = 2 ** (8 * bits.itemsize - 1)
        grads = [
            torch.randint(-limit, limit - 1, (64,), generator=generator).to(bits).view(wire)
            for _ in range(COUNT)
        ]
        flat = flat_of(wire=wire)
        for scale in (1.0, 1 / 3, -2.0, 2.0**-130, 1 + 2.0**-40, 1e300, math.inf):
            reference.flatten(flat, grads, USED, scale, HEADERS)
            for view, grad in zip(flat.views, grads, strict=True):
                expected = grad.clone().mul_(scale)
                assert torch.equal(view.view(bits), expected.view(bits)), (wire, scale)


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


def test_what_torch_has_refused_it_is_not_asked_again_for_as_long_as_it_comes(monkeypatch):
    flat, cat, asked = flat_of(), torch.cat, []
    monkeypatch.setattr(torch, "cat", lambda *a, **kw: asked.append(1) or cat(*a, **kw))
    for grads, expected in [
        (gradients(), [1, 1, 1]),
        ([*gradients()[1:], None], [1, 0, 0]),  # it takes torch as long as ten copies to refuse
        ([*gradients()[1:], flat.views[-1]], [0, 0, 0]),
        (gradients(), [0, 1, 1]),
        (flat.views, [1, 0, 0]),
    ]:
        for times in expected:
            asked.clear()
            reference.flatten(flat, grads, USED, 0.5, HEADERS)
            assert len(asked) == times


# The kernels of a GPU.


@pytest.mark.parametrize("marks", [None, Marks(0, 2)], ids=["plain", "marks"])
def test_launches_of_a_steady_step_are_one_function_each(kernels, marks):
    flat, grads = flat_of(alignment=16, marks=marks), gradients()
    before = launch.launches
    assert calls(flatten_module.flatten, flat, grads, USED, 0.5, HEADERS) == 1
    assert calls(unflatten_module.unflatten, flat, grads) == 1
    assert calls(unflatten_module.unflatten, flat, grads, ONE) == 1
    assert calls(unflatten_module.unflatten, flat, flat.views, ONE) == 1
    assert launch.launches - before == 12
    assert flat.tables.uploads == 1


def test_a_launch_is_made_where_its_tensors_are(kernels, monkeypatch):
    monkeypatch.setattr(_torch, "current_device", lambda: 0)
    devices: list[Any] = []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        devices.append(
            (index, len(kernels["flatten"].launched), len(kernels["unflatten"].launched))
        )
        yield
        devices.append(
            (index, len(kernels["flatten"].launched), len(kernels["unflatten"].launched))
        )

    monkeypatch.setattr(torch.cuda, "device", device)
    flat, grads = flat_of(alignment=16), gradients()
    for index in (None, 0, 1):
        flatten_module.flatten(flat, grads, USED, 0.5, HEADERS)
        unflatten_module.unflatten(flat, grads)
        flat.tables.device_index = index
    assert devices == []
    flatten_module.flatten(flat, grads, USED, 0.5, HEADERS)
    unflatten_module.unflatten(flat, grads)
    assert devices == [(1, 3, 3), (1, 4, 3), (1, 4, 3), (1, 4, 4)]


def test_each_variant_of_a_flatten_is_prepared_once_and_taken_again(kernels):
    flat = flat_of(alignment=16)
    fp32, fp16 = gradients(), gradients(dtype=torch.float16)
    odd, _ = embedded_gradients(VECTORS, torch.float32, aligned=False)
    none = [None] * COUNT
    for _ in range(2):
        for grads in (fp32, fp16, odd, [*odd[:1], None, *odd[2:]], [None, *fp32[1:]], none):
            flatten_module.flatten(flat, grads, USED, 0.5, HEADERS)
    # Zeros are compiled as gradients of the wire dtype are.
    assert [number for number, *_ in kernels["flatten"].launched] == [1, 2, 3, 3, 1, 1] * 2
    tables = flat.tables
    for *_, arguments in kernels["flatten"].launched:
        bound = (tables.chunks, tables.dynamic, flat.data)
        assert arguments[:3] == tuple(each.data_ptr() for each in bound)
        assert len(arguments) == 10 + 7
    variants = [key for key in tables.launches if key is not device_tables._launch]
    assert len(variants) == 4


def test_other_residuals_are_given_to_the_next_launch(kernels):
    grads, names = gradients(), ("quantize", "reduce_parts")
    (flat,) = quantized_buffers(grads, USED, 1)
    for _ in range(2):
        for _ in range(2):
            quantize_module.quantize(flat, grads, USED, 0.5, HEADERS)
            reduce_parts_module.reduce_parts(flat)
            residuals, last = flat.residuals, [kernels[name].launched[-1][2] for name in names]
            assert last[0][3] == residuals.sent.data_ptr()
            assert last[1][1] == residuals.reduced.data_ptr()
        flat.residuals.sent = flat.residuals.sent.clone()
        flat.residuals.reduced = flat.residuals.reduced.clone()
