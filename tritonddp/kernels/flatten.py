"""Flatten: scale, cast and gather all gradients of a bucket, and its trailer, in one launch.

One launch is faster than one copy per gradient, and faster than ``torch.cat``, a scale and a cast,
which read and write the memory several times. The twin in plain torch is in ``reference.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritonddp import _torch
from tritonddp.kernels import launch
from tritonddp.kernels.device_tables import ADDRESS_OF, DeviceTables
from tritonddp.kernels.flat_buffer import FlatBuffer
from tritonddp.kernels.launch import Launcher
from tritonddp.kernels.reference import compute_dtype

TRITON_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


# Number of flags and headers that a program writes: one per thread. A whole BLOCK of int64 would
# need more registers, in all programs of the kernel.
FLAG_BLOCK = 128


@triton.jit
def widen(x, TO: tl.constexpr, EMULATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cast ``x`` to ``TO``, fp32 or fp64, exactly.

    Uses two steps via fp32, because not every backend converts bf16 to fp64. The interpreter reads
    subnormal bf16 wrongly, so there the bits are converted by integer operations.
    """
    if EMULATE and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True).to(TO)
    elif x.dtype == tl.bfloat16:
        return x.to(tl.float32).to(TO)
    else:
        return x.to(TO)


@triton.jit
def narrow(x, TO: tl.constexpr, EMULATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cast ``x``, fp32 or fp64, to ``TO``, rounding to nearest even.

    Casts from fp64 to 16 bits in two steps via fp32, as torch does on the CPU, to get the same
    bits. The interpreter truncates to bf16 where the hardware rounds, so there the bits are
    computed by integer operations.
    """
    if x.dtype == TO:
        return x
    elif EMULATE and TO == tl.bfloat16:  # noqa: SIM300
        y = x.to(tl.float32)
        bits = y.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(y != y, 0x7FC0, rounded)  # the addition may carry a NaN into the sign
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.float32).to(TO)


@triton.jit(do_not_specialize=["slots", "trailer", "num_chunks", "flags_offset"])
def flatten_kernel(  # type: ignore[no-untyped-def]
    chunks,
    dynamic,
    bucket,
    slots,
    trailer,
    num_chunks,
    flags_offset,
    SOURCE: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAG_BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Run one program per chunk, then one per ``FLAG_BLOCK`` of flags and headers.

    In the mask the chunk's length is rounded down to a multiple of 16: otherwise the compiler could
    not prove that 16-byte accesses are safe. The rest is a 16-wide tail. ``multiple_of`` is the
    only hint that the compiler accepts, in bytes for a pointer and in elements for an offset.
    """
    wire = bucket.dtype.element_ty
    program = tl.program_id(0)
    if program >= num_chunks:
        place = (program - num_chunks).to(tl.int64) * FLAG_BLOCK + tl.arange(0, FLAG_BLOCK)
        value = tl.load(dynamic + slots + place, mask=place < trailer, other=0)
        value = narrow(value.to(tl.float32).to(COMPUTE), wire, EMULATE)
        tl.store(bucket + flags_offset + place, value, mask=place < trailer)
        return
    row = chunks + program.to(tl.int64) * 4
    slot = tl.load(row)
    address = tl.load(dynamic + slot)
    source = address.to(tl.pointer_type(SOURCE))
    if ALIGNED:
        source = tl.multiple_of(source, 16)
    source += tl.multiple_of(tl.load(row + 1), 16)
    target = bucket + tl.multiple_of(tl.load(row + 2), 16)
    count = tl.load(row + 3)
    scale = tl.load(dynamic + slots + trailer).to(tl.float64, bitcast=True).to(COMPUTE)
    present = address != 0
    # Not an additional term of the masks: the interpreter of Triton 3.9 cannot load with the
    # conjunction of a block and a scalar.
    readable = tl.where(present, count, 0)

    body = (count // 16) * 16
    offsets = tl.arange(0, BLOCK)
    inside = offsets < body
    x = tl.load(source + offsets, mask=offsets < (readable // 16) * 16, other=0.0)
    x = tl.where(present, widen(x, COMPUTE, EMULATE) * scale, 0.0)  # even if scale is inf or NaN
    tl.store(target + offsets, narrow(x, wire, EMULATE), mask=inside)
    if body < count:
        # New names: the compiler does not allow another shape under the same name.
        rest = body + tl.arange(0, 16)
        y = tl.load(source + rest, mask=rest < readable, other=0.0)
        y = tl.where(present, widen(y, COMPUTE, EMULATE) * scale, 0.0)
        tl.store(target + rest, narrow(y, wire, EMULATE), mask=rest < count)


# Decided once per process, when @triton.jit runs.
INTERPRETED = not isinstance(flatten_kernel, triton.JITFunction)

_launch = Launcher(flatten_kernel)


def flatten(
    flat: FlatBuffer,
    grads: Sequence[Tensor | None],
    used: Sequence[bool],
    scale: float,
    headers: Sequence[int] = (),
) -> None:
    """Write ``cast(scale * grad)`` of every gradient, used flags and headers into ``flat``.

    Uses one launch on the current stream, which should be the stream that produced the gradients.
    For arguments see ``reference.flatten``; for errors see :meth:`DeviceTables.update`.
    """
    tables = flat.tables or DeviceTables.of(flat)
    # Inlined from DeviceTables.update, to save the call.
    dtype: Any
    try:
        addresses, dtype = list(map(ADDRESS_OF, grads)), grads[0].dtype  # type: ignore[arg-type, union-attr]
    except (TypeError, IndexError):  # a gradient is missing, or there are none
        dtype = tables.update(grads, used, scale, headers)
    else:
        if (
            addresses != tables.addresses
            or dtype is not tables.dtype
            or used != tables.used
            or (headers or b"") != tables.headers
            or scale != tables.scale
            or not scale
            or tables.is_captured
        ):
            tables.change(grads, used, scale, headers, addresses)
    # Compare addresses, not storages: a user may hold a view of this storage.
    key = _launch, flat.data.data_ptr(), dtype, tables.aligned
    run = tables.launches.get(key)
    if run is None:
        if not flat.layout.numels and not flat.layout.headers:
            return
        run = tables.launches[key] = _prepare(flat, tables, dtype, tables.aligned)
    # Inlined from launch.run(), to save the call.
    if tables.device_index is None or tables.device_index == _torch.current_device():
        run()
    else:
        with torch.cuda.device(tables.device_index):
            run()
    launch.launches += 1


def compile_for(flat: FlatBuffer, dtype: torch.dtype) -> None:
    """Compile all kernels that :func:`flatten` may need for this gradient dtype, or for none."""
    tables = DeviceTables.of(flat)
    tables.usual_dtype = dtype
    tables.compile()
    for aligned in (True, False):
        _prepare(flat, tables, dtype, aligned)


def _prepare(
    flat: FlatBuffer, tables: DeviceTables, dtype: torch.dtype | None, aligned: bool
) -> partial[None]:
    """Return the launch of ``flatten`` for gradients of this dtype and alignment."""
    layout = flat.layout
    source = dtype or tables.usual_dtype
    compute = compute_dtype(source, flat.data.dtype)
    kind = (TRITON_DTYPES[source], TRITON_DTYPES[compute], tables.block, FLAG_BLOCK, aligned)
    slots, num_chunks = len(layout.numels), tables.num_chunks
    trailer = slots + layout.headers
    return _launch.bind(
        num_chunks + -(-trailer // FLAG_BLOCK),
        (tables.chunks, tables.dynamic, flat.data),
        (slots, trailer, num_chunks, layout.flags_offset),
        (*kind, INTERPRETED),
        num_warps=tables.num_warps,
    )
