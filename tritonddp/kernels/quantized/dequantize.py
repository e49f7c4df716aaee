"""Dequantize: scale, cast and scatter the sums of all ranks into all gradients, in one launch.

The twin in plain torch is in ``reference.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritonddp.kernels import launch
from tritonddp.kernels.flatten import INTERPRETED, TRITON_DTYPES, narrow
from tritonddp.kernels.launch import Launcher
from tritonddp.kernels.quantized.buffer import QuantizedBuffer
from tritonddp.kernels.quantized.quantize import QuantizedTables


@triton.jit(
    do_not_specialize=["quantized_chunks", "part_blocks", "exact_offset", "part_bytes"],
    do_not_specialize_on_alignment=["factor"],
)
def dequantize_kernel(  # type: ignore[no-untyped-def]
    chunks,
    dynamic,
    message,
    flags,
    factor,
    quantized_chunks,
    part_blocks,
    exact_offset,
    part_bytes,
    TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    EMULATE: tl.constexpr,
    LIMIT: tl.constexpr,
    CODE: tl.constexpr,
    WRITE: tl.constexpr,
    READ: tl.constexpr,
):
    """Run one program per chunk; mask, tail, flag and factor as in ``unflatten_kernel``."""
    row = chunks + tl.program_id(0).to(tl.int64) * 5
    slot = tl.load(row)
    address = tl.load(dynamic + slot)
    if address == 0:
        return
    if tl.load(flags + slot) == 0.0:
        return
    target = address.to(tl.pointer_type(TARGET))
    if ALIGNED:
        target = tl.multiple_of(target, 16)
    target += tl.multiple_of(tl.load(row + 1), 16)
    part = tl.load(row + 2)
    place = tl.load(row + 3)
    count = tl.load(row + 4)
    multiplier = tl.load(factor).to(tl.float32)
    body = (count // 16) * 16
    begin = message + tl.multiple_of(part * part_bytes, 16)

    if tl.program_id(0) >= quantized_chunks:
        source = (begin + exact_offset).to(tl.pointer_type(tl.float32))
        source = tl.multiple_of(source, 16) + tl.multiple_of(place, 16)
        line = tl.arange(0, BLOCK)
        y = tl.load(source + line, mask=line < body, other=0.0) * multiplier
        tl.store(target + line, narrow(y, TARGET, EMULATE), mask=line < body)
        if body < count:
            rest = body + tl.arange(0, 16)
            z = tl.load(source + rest, mask=rest < count, other=0.0) * multiplier
            tl.store(target + rest, narrow(z, TARGET, EMULATE), mask=rest < count)
        return

    blocks = tl.arange(0, BLOCK // 256)
    places = blocks[:, None] * 256 + tl.arange(0, 256)[None, :]
    there = blocks * 256 < count
    number = READ(tl.multiple_of(begin + place * CODE, 16), there, BLOCK // 256)
    scales = (begin + part_blocks.to(tl.int64) * CODE).to(tl.pointer_type(tl.float32))
    scale = tl.load(scales + place + blocks, mask=there, other=0.0)
    x = narrow(number * scale[:, None] * multiplier, TARGET, EMULATE)
    if not ALIGNED:  # no access is wide, so a separate store for the tail only costs registers
        body = count
    tl.store(target + places, x, mask=places < body)
    if body < count:
        tl.store(target + places, x, mask=(places >= body) & (places < count))


_launch = Launcher(dequantize_kernel)


def dequantize(
    flat: QuantizedBuffer, grads: Sequence[Tensor | None], factor: Tensor | None = None
) -> None:
    """Write ``cast(factor * sum)`` of the sums in ``flat.gathered`` into ``grads``.

    Uses one launch on the current stream, which must have waited for the all-gather; no launch if
    there is nothing to write. For arguments and skipped gradients see ``reference.dequantize``. The
    host does not read the factor. Raises the errors of ``unflatten``.
    """
    tables = flat.tables or QuantizedTables.of(flat)
    if factor is None:
        factor = tables.one
    else:
        flat.check_factor(factor)
    dtype = tables.update(grads)
    if dtype is None or tables.num_chunks == 0:
        return
    prepared = tables.launches.get((_launch, dtype, tables.aligned))
    if prepared is None:
        prepared = _prepare(flat, tables, dtype, tables.aligned)
        tables.launches[_launch, dtype, tables.aligned] = prepared
    run, rest = prepared
    launch.run(tables.device_index, run, factor, *rest)


def compile_for(flat: QuantizedBuffer, dtype: torch.dtype) -> None:
    """Compile all kernels that :func:`dequantize` may need for this gradient dtype."""
    for aligned in (True, False):
        _prepare(flat, QuantizedTables.of(flat), dtype, aligned)


def _prepare(
    flat: QuantizedBuffer, tables: QuantizedTables, dtype: torch.dtype, aligned: bool
) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launch for gradients of this dtype and alignment, as in ``unflatten``."""
    layout = flat.message_layout
    tensors = (tables.chunks, tables.dynamic, flat.gathered, flat.flags, tables.one)
    offsets = (layout.part_blocks, layout.exact_offset, layout.part_bytes)
    constexprs = (TRITON_DTYPES[dtype], tables.block, aligned, INTERPRETED, *layout.code.constexprs)
    integers = (tables.quantized_chunks, *offsets)
    run = _launch.bind(tables.num_chunks, tensors, integers, constexprs, tables.num_warps)
    return launch.without(len(tensors) - 1, run)
