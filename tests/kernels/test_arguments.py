"""Arguments that do not fit a buffer are errors, and nothing is written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from quantized_ranks import quantized_buffers

from tritonddp.kernels import reference
from tritonddp.kernels.device_tables import DeviceTables
from tritonddp.kernels.flat_buffer import FlatBuffer, Layout
from tritonddp.kernels.flatten import flatten
from tritonddp.kernels.quantized import reference as quantized_reference
from tritonddp.kernels.quantized.buffer import Quantization, QuantizedBuffer
from tritonddp.kernels.quantized.dequantize import dequantize
from tritonddp.kernels.quantized.quantize import QuantizedTables, quantize
from tritonddp.kernels.unflatten import JointUnflatten, unflatten

CPU = torch.device("cpu")
ONES, LARGE, HALF = torch.ones(4), torch.ones(5), torch.ones(4, dtype=torch.float16)
TWO = torch.tensor([2.0], dtype=torch.float64)
USED, HEADERS = [True, True], bytes(2)


def flat_of(alignment: int = 16) -> FlatBuffer:
    layout = Layout.of([(4,)] * 2, [(1,)] * 2, alignment, len(HEADERS))
    return FlatBuffer(layout, torch.float32, CPU)


def on_another_device(flat: FlatBuffer) -> None:
    flat.tables = DeviceTables(flat)
    flat.tables._device_number = 0  # as on a GPU: meta tensors have the number of the CPU
    flatten(flat, [ONES, ONES.to("meta")], USED, 1.0, HEADERS)


def in_bf16(flat: QuantizedBuffer) -> None:
    quantization = Quantization(flat.message_layout, 0, None)
    QuantizedBuffer(quantization, flat.layout, torch.bfloat16, CPU)


Case = tuple[str, Callable[[Any], object]]
DENSE: list[Case] = [
    (r"0 headers", lambda flat: reference.flatten(flat.part(0, 1), [ONES], [True], 1.0, HEADERS)),
    (r"power of two.*24", lambda flat: DeviceTables(flat, 24)),
    (r"slot 1 starts at element 4 .*alignment=16", lambda flat: DeviceTables(flat_of(1))),
    (r"slot 1 is on meta, but its buffer is on cpu", on_another_device),
    (r"slot 1 is torch\.float16", lambda flat: flatten(flat, [ONES, HALF], USED, 1.0, HEADERS)),
    (r"size of a gradient", lambda flat: reference.unflatten(flat, [ONES, LARGE], TWO)),
    (r"3 slots|argument", lambda flat: JointUnflatten([flat, flat])([[ONES] * 2])),
]
for run in (flatten, reference.flatten):
    DENSE += [
        (r"2 slots, but got 1", lambda flat, run=run: run(flat, [ONES], [True], 1.0, HEADERS)),
        (r"got 3 flags", lambda flat, run=run: run(flat, [ONES] * 2, [True] * 3, 1.0, HEADERS)),
        (r"2 headers, but got 3", lambda flat, run=run: run(flat, [ONES] * 2, USED, 1.0, bytes(3))),
        (r"header 1 .* is 256", lambda flat, run=run: run(flat, [ONES] * 2, USED, 1.0, [0, 256])),
    ]
for back in (unflatten, reference.unflatten):
    DENSE.append(
        (r"one torch\.float64 element", lambda flat, run=back: run(flat, [ONES] * 2, ONES))
    )
QUANTIZED: list[Case] = [
    (r"at least 256, but is 128", lambda flat: QuantizedTables(flat, block=128)),
    (r"torch\.float32, not torch\.bfloat16", in_bf16),
    (r"slot 1 is torch\.float16", lambda flat: quantize(flat, [ONES, HALF], USED, 1.0, HEADERS)),
    (r"one torch\.float64 element", lambda flat: dequantize(flat, [ONES] * 2, torch.ones(1))),
    (r"2 headers, but got 3", lambda flat: quantize(flat, [ONES] * 2, USED, 1.0, bytes(3))),
]
for run in (quantize, quantized_reference.quantize):
    QUANTIZED.append((r"2 slots", lambda flat, run=run: run(flat, [ONES], [True], 1.0, HEADERS)))


def test_calls_with_a_flat_buffer() -> None:
    for message, call in DENSE:
        flat = flat_of()
        flat.data.zero_()
        flat.flags.fill_(1)
        before = flat.data.clone()
        with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
            call(flat)
        assert torch.equal(flat.data, before), message


def test_the_twin_notices_a_gradient_whose_size_has_changed() -> None:
    flat = flat_of(alignment=1)
    reference.flatten(flat, [ONES] * 2, USED, 1.0, HEADERS)
    with (
        pytest.warns(UserWarning, match="resized"),
        pytest.raises(RuntimeError, match="the size of a gradient differs"),
    ):
        reference.flatten(flat, [ONES, LARGE], USED, 1.0, HEADERS)


def test_calls_with_a_quantized_buffer() -> None:
    for message, call in QUANTIZED:
        (flat,) = quantized_buffers([ONES, ONES], [True, False], 1, header=len(HEADERS))
        with pytest.raises((TypeError, ValueError), match=message):
            call(flat)
        assert not flat.message.any(), message
