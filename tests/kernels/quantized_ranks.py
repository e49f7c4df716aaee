"""The ranks of a quantised reduction in one process: collectives are copies."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonddp.kernels.flat_buffer import Layout
from tritonddp.kernels.memory_order import gradient_strides
from tritonddp.kernels.quantized import reference
from tritonddp.kernels.quantized.buffer import (
    MessageLayout,
    Quantization,
    QuantizedBuffer,
    Residuals,
)

CPU = torch.device("cpu")


def quantized_buffers(
    like: Sequence[Tensor],
    quantized: Sequence[bool],
    world_size: int,
    feedback: bool = True,
    header: int = 3,
    device: torch.device = CPU,
    is_direct: bool = False,
) -> list[QuantizedBuffer]:
    """The buffer of each rank for gradients like these, with ``header`` bytes for each rank's."""
    layouts = [
        Layout.of(
            [tensor.shape for tensor in like],
            [gradient_strides(tensor) for tensor in like],
            1,
            header * world_size,
        )
        for _ in range(world_size)
    ]
    numels, headers = layouts[0].numels, layouts[0].headers
    message = MessageLayout(numels, quantized, world_size, headers, is_direct)
    flats = []
    for rank, layout in enumerate(layouts):
        residuals = Residuals.zeros(message, rank, device) if feedback else None
        quantization = Quantization(message, rank, residuals)
        flats.append(QuantizedBuffer(quantization, layout, torch.float32, device))
    return flats


def exchange(flats: Sequence[QuantizedBuffer]) -> None:
    """The all-to-all."""
    size = len(flats)
    for rank, flat in enumerate(flats):
        if flat.message_layout.is_direct:
            for other, each in enumerate(flats):
                if other != rank:
                    flat.received.view(size, -1)[other].copy_(each.message)
            continue
        rows = [each.message.view(size, -1)[rank] for each in flats]
        flat.received.copy_(torch.cat(rows))


def gather(flats: Sequence[QuantizedBuffer]) -> None:
    """The all-gather."""
    if flats[0].message_layout.is_direct:
        return
    gathered = torch.cat([flat.reduced for flat in flats])
    for flat in flats:
        flat.gathered.copy_(gathered)


def all_reduce(
    flats: Sequence[QuantizedBuffer],
    grads: Sequence[Sequence[Tensor | None]],
    used: Sequence[Sequence[bool]] | None = None,
    scale: float = 1.0,
    kernels: Any = reference,
) -> list[list[Tensor]]:
    """The sum of ``grads[rank][slot]``, as each rank gets it."""
    size, slots = len(flats), len(flats[0].layout.numels)
    for rank, flat in enumerate(flats):
        headers = bytearray(flat.layout.headers)
        each = len(headers) // size
        headers[rank * each : (rank + 1) * each] = bytes([rank + 1] * each)
        flags = [True] * slots if used is None else used[rank]
        kernels.quantize(flat, grads[rank], flags, scale, headers)
    exchange(flats)
    for flat in flats:
        kernels.reduce_parts(flat)
    gather(flats)
    results = []
    for flat in flats:
        # NaN where nothing is written: nobody has used the parameter.
        targets = [
            torch.empty_strided(shape, strides, device=flat.flags.device).fill_(torch.nan)
            for shape, strides in zip(flat.layout.shapes, flat.layout.strides, strict=True)
        ]
        kernels.dequantize(flat, targets)
        results.append(targets)
    return results
