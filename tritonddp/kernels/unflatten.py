"""Unflatten: scale, cast and scatter a reduced bucket into all its gradients, in one launch.

It needs fewer launches than one copy per gradient. If ``.grad`` is a view of the bucket, it is
scaled in place, or nothing is launched. The same in plain torch is in ``reference.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritonddp import _torch
from tritonddp.kernels import launch
from tritonddp.kernels.device_tables import DeviceTables
from tritonddp.kernels.flat_buffer import FlatBuffer
from tritonddp.kernels.flatten import (
    INTERPRETED,
    TRITON_DTYPES,
    narrow,
    sum_of_squares,
    widen,
)
from tritonddp.kernels.launch import Launcher
from tritonddp.kernels.reference import compute_dtype


@triton.jit(do_not_specialize=["flags_offset"])
def unflatten_kernel(  # type: ignore[no-untyped-def]
    chunks,
    dynamic,
    bucket,
    factor,
    squares,
    flags_offset,
    TARGET: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """One program per chunk; mask, tail and hints as in ``flatten_kernel``.

    The flag (whether any rank used the parameter) and the factor are read on the device, so the
    host does not wait for them. There is always a factor: 1.0 changes no number, not even -0.0,
    and its cost is hidden by the memory accesses. With ``IN_PLACE`` gradients are views of the
    bucket, and a factor of 1.0 leaves nothing to do.

    Unless ``squares`` is ``None``, each program writes the sum of the squares of its chunk of the
    gradient there, whether it wrote to the gradient or not.
    """
    # (Not in fp64, where Triton 3.7 would spill two registers for sm_100.)
    if IN_PLACE and COMPUTE == tl.float32 and squares is None:  # noqa: SIM102, SIM300  constexprs
        if tl.load(factor) == 1.0:
            return
    row = chunks + tl.program_id(0).to(tl.int64) * 4
    slot = tl.load(row)
    address = tl.load(dynamic + slot)
    if address == 0:
        if squares is not None:
            tl.store(squares + tl.program_id(0), 0.0)
        return
    flag = widen(tl.load(bucket + flags_offset + slot), COMPUTE, EMULATE)
    if flag == 0.0:
        if squares is not None:
            kept = address.to(tl.pointer_type(TARGET)) + tl.load(row + 1)
            line = tl.arange(0, BLOCK)
            z = tl.load(kept + line, mask=line < tl.load(row + 3), other=0.0)
            total = sum_of_squares(z, line < BLOCK, COMPUTE, EMULATE)
            tl.store(squares + tl.program_id(0), total)
        return
    target = address.to(tl.pointer_type(TARGET))
    if ALIGNED:
        target = tl.multiple_of(target, 16)
    target += tl.multiple_of(tl.load(row + 1), 16)
    source = bucket + tl.multiple_of(tl.load(row + 2), 16)
    count = tl.load(row + 3)
    scale = widen(tl.load(factor), COMPUTE, EMULATE)

    body = (count // 16) * 16
    offsets = tl.arange(0, BLOCK)
    inside = offsets < body
    x = widen(tl.load(source + offsets, mask=inside, other=0.0), COMPUTE, EMULATE)
    places = target + offsets
    x_out = narrow(x * scale, TARGET, EMULATE)
    if IN_PLACE and squares is not None:  # the value is in place already, unless it is scaled
        written = tl.where(scale == 1.0, 0, count)
        tl.store(places, x_out, mask=offsets < (written // 16) * 16)
    else:
        tl.store(places, x_out, mask=inside)
    if squares is not None:
        total = sum_of_squares(x_out, inside, COMPUTE, EMULATE)
    if body < count:
        rest = body + tl.arange(0, 16)
        y = widen(tl.load(source + rest, mask=rest < count, other=0.0), COMPUTE, EMULATE)
        if COMPUTE == tl.float64:  # noqa: SIM300
            # Read again: to keep it, Triton 3.6 would spill two registers for sm_90.
            scale = tl.load(factor)
        rest_places = target + rest
        y_out = narrow(y * scale, TARGET, EMULATE)
        if IN_PLACE and squares is not None:
            tl.store(rest_places, y_out, mask=rest < tl.where(scale == 1.0, 0, count))
        else:
            tl.store(rest_places, y_out, mask=rest < count)
        if squares is not None:
            total += sum_of_squares(y_out, rest < count, COMPUTE, EMULATE)
    if squares is not None:
        tl.store(squares + tl.program_id(0), total)


_launch = Launcher(unflatten_kernel)


def unflatten(
    flat: FlatBuffer, grads: Sequence[Tensor | None], factor: Tensor | None = None
) -> None:
    """Write ``cast(factor * payload)`` of the reduced ``flat`` into ``grads``.

    One launch on the current stream, which must have waited for the collective; none if there is
    nothing to write. Arguments are those of ``reference.unflatten``. Gradients have the strides of
    their slots. The factor is ready on the current stream, and the host does not read it. There is
    one sum of squares per chunk.

    Raises:
        ValueError: there is not one gradient per slot.
        TypeError: the gradients are not of one dtype, or not on the buffer's device; or the factor
            is not one fp64 element on that device.
    """
    tables = flat.tables or DeviceTables.of(flat)
    if factor is None:
        factor = tables.one
    elif (
        factor.dtype is not torch.float64
        or factor.numel() != 1
        or factor.device != flat.data.device
    ):
        flat.check_factor(factor)  # raises
    dtype = tables.update(grads)
    if dtype is None or tables.num_chunks == 0:
        return
    key = _launch, dtype, tables.aligned, factor.data_ptr() % 16 == 0, grads is flat.views
    prepared = tables.launches.get(key)
    if prepared is None:
        prepared = tables.launches[key] = _prepare(flat, tables, dtype, factor, grads is flat.views)
    run, rest, sums = prepared
    if sums is not None:
        flat.squares.unflattened = sums  # type: ignore[union-attr]
    # The same as launch.run(), without one more call.
    if tables.device_index is None or tables.device_index == _torch.current_device():
        run(factor, *rest)
    else:
        with torch.cuda.device(tables.device_index):
            run(factor, *rest)
    launch.launches += 1


def _prepare(
    flat: FlatBuffer, tables: DeviceTables, dtype: torch.dtype, factor: Tensor, in_place: bool
) -> tuple[Callable[..., None], tuple[Any, ...], Tensor | None]:
    """The launch for gradients of this dtype and alignment, its last arguments, and ``squares``.

    The launch has to be called with the factor, which may be another tensor each time, and then the
    last arguments. One compiled kernel fits the storage of all factors: only the first element is
    read. The third result is the tensor for sums of squares, or ``None``.
    """
    compute = compute_dtype(dtype, flat.data.dtype)
    sums = None
    if flat.squares is not None and flat.squares.of_unflattened:
        sums = torch.empty(tables.num_chunks, dtype=compute, device=flat.data.device)
    tensors = (tables.chunks, tables.dynamic, flat.data)
    integers = (flat.layout.flags_offset,)
    dtypes = TRITON_DTYPES[dtype], TRITON_DTYPES[compute]
    constexprs = (*dtypes, tables.block, tables.aligned, in_place, INTERPRETED)
    run = _launch.prepare(
        tables.num_chunks, (*tensors, factor, sums), integers, constexprs, tables.num_warps
    )
    return partial(run, *tensors), (sums, *integers, *constexprs), sums
