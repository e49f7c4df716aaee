"""Reduce and unflatten: sum the buffers of all ranks, scale, cast and scatter, in one launch.

For ranks that can read each other's memory, as GPUs do over NVLink. Compared with an all-reduce and
``unflatten.py`` it saves a launch and a pass over memory, since the sum is written directly to the
gradients. In *one shot* each rank reads the whole buffers of all ranks, where a rank of a ring
reads two buffers: for small buckets, or few ranks. In *two shots* each rank first sums its share of
the buffer, and then reads the shares of the others: :func:`reduce_share`. The same in plain torch
is in ``reference.py``.

These kernels do not wait for other ranks. The caller has to order a launch after the flatten of all
ranks, and before their next flatten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritonddp.kernels import launch
from tritonddp.kernels.device_tables import DeviceTables
from tritonddp.kernels.flat_buffer import FlatBuffer
from tritonddp.kernels.flatten import FLAG_BLOCK, INTERPRETED, TRITON_DTYPES, narrow, widen
from tritonddp.kernels.launch import Launcher
from tritonddp.kernels.reference import compute_dtype

# Threads of a program. So each thread has 8 elements of a chunk, 16 bytes of the narrowest dtype.
# With half as many threads, 8 ranks would need up to 93 registers.
THREADS = 256
_WARPS = THREADS // (32 if torch.version.hip is None else 64)


@triton.jit
def sum_over_ranks(  # type: ignore[no-untyped-def]
    peers,
    offset,
    offsets,
    mask,
    WIRE: tl.constexpr,
    TOTAL: tl.constexpr,
    RANKS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Elements ``offset + offsets`` of the buffers of ``RANKS`` ranks, added in rank order.

    Summed in ``TOTAL``, then rounded once to the wire dtype. Elements outside the mask are zero.
    """
    source = tl.multiple_of(tl.load(peers).to(tl.pointer_type(WIRE)), 16) + offset
    total = widen(tl.load(source + offsets, mask=mask, other=0.0), TOTAL, EMULATE)
    for rank in tl.static_range(1, RANKS):
        source = tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(WIRE)), 16) + offset
        total += widen(tl.load(source + offsets, mask=mask, other=0.0), TOTAL, EMULATE)
    return narrow(total, WIRE, EMULATE)


@triton.jit(do_not_specialize=["num_chunks", "flags_offset", "trailer"])
def reduce_unflatten_kernel(  # type: ignore[no-untyped-def]
    chunks,
    dynamic,
    bucket,
    peers,
    factor,
    num_chunks,
    flags_offset,
    trailer,
    TARGET: tl.constexpr,
    TOTAL: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAG_BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    SHARES: tl.constexpr,
    ALIGNED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """One program per chunk, then one per ``FLAG_BLOCK`` elements of the ``trailer``.

    Mask, tail and hints as in ``flatten_kernel``. Each program sums the flag of its gradient
    itself. Only the write depends on the flag, so the gradient is read without waiting for it. With
    ``SHARES`` a chunk is read from the one rank that has summed it.
    """
    wire = bucket.dtype.element_ty
    program = tl.program_id(0)
    if program >= num_chunks:
        place = (program - num_chunks).to(tl.int64) * FLAG_BLOCK + tl.arange(0, FLAG_BLOCK)
        inside = place < trailer
        value = sum_over_ranks(peers, flags_offset, place, inside, wire, TOTAL, RANKS, EMULATE)
        tl.store(bucket + flags_offset + place, value, mask=inside)
        return
    row = chunks + program.to(tl.int64) * 4
    slot = tl.load(row)
    address = tl.load(dynamic + slot)
    if address == 0:
        return
    target = address.to(tl.pointer_type(TARGET))
    if ALIGNED:
        target = tl.multiple_of(target, 16)
    target += tl.multiple_of(tl.load(row + 1), 16)
    offset = tl.multiple_of(tl.load(row + 2), 16)
    count = tl.load(row + 3)
    flag = sum_over_ranks(peers, flags_offset + slot, 0, True, wire, TOTAL, RANKS, EMULATE)
    used = widen(flag, TOTAL, EMULATE) != 0.0
    scale = widen(tl.load(factor), COMPUTE, EMULATE)
    if IN_PLACE:
        writable = count
        scale = tl.where(used, scale, 1.0)
    else:
        writable = tl.where(used, count, 0)  # not a term of the masks, see flatten_kernel
    sources = peers
    if SHARES:
        sources += ((program + 1) * RANKS - 1) // num_chunks  # the inverse of share_of()
    TERMS: tl.constexpr = 1 if SHARES else RANKS

    body = (count // 16) * 16
    offsets = tl.arange(0, BLOCK)
    x = sum_over_ranks(sources, offset, offsets, offsets < body, wire, TOTAL, TERMS, EMULATE)
    x = narrow(widen(x, COMPUTE, EMULATE) * scale, TARGET, EMULATE)
    tl.store(target + offsets, x, mask=offsets < (writable // 16) * 16)
    if body < count:
        rest = body + tl.arange(0, 16)
        y = sum_over_ranks(sources, offset, rest, rest < count, wire, TOTAL, TERMS, EMULATE)
        y = narrow(widen(y, COMPUTE, EMULATE) * scale, TARGET, EMULATE)
        tl.store(target + rest, y, mask=rest < writable)


@triton.jit(do_not_specialize=["first", "rank"])
def reduce_share_kernel(  # type: ignore[no-untyped-def]
    chunks,
    peers,
    first,
    rank,
    WIRE: tl.constexpr,
    TOTAL: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """One program per chunk from ``first`` on: the sum overwrites the buffer of ``rank``.

    Each thread writes only elements that it has read itself.
    """
    row = chunks + (first + tl.program_id(0)).to(tl.int64) * 4
    offset = tl.multiple_of(tl.load(row + 2), 16)
    count = tl.load(row + 3)
    target = tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(WIRE)), 16) + offset
    body = (count // 16) * 16
    offsets = tl.arange(0, BLOCK)
    x = sum_over_ranks(peers, offset, offsets, offsets < body, WIRE, TOTAL, RANKS, EMULATE)
    tl.store(target + offsets, x, mask=offsets < body)
    if body < count:
        rest = body + tl.arange(0, 16)
        y = sum_over_ranks(peers, offset, rest, rest < count, WIRE, TOTAL, RANKS, EMULATE)
        tl.store(target + rest, y, mask=rest < count)


_launch = Launcher(reduce_unflatten_kernel)
_share_launch = Launcher(reduce_share_kernel)


def reduce_unflatten(
    flat: FlatBuffer,
    peers: Tensor,
    grads: Sequence[Tensor | None],
    factor: Tensor | None = None,
    shares: bool = False,
) -> None:
    """Write ``cast(factor * sum over ranks)`` into ``grads``, and the summed trailer into ``flat``.

    One launch on the current stream; none for a buffer without gradients and headers. Arguments
    are those of ``reference.reduce_unflatten``, but for this one:

    Args:
        peers: int64 ``(world_size,)`` on the buffer's device: addresses of the buffers of the
            ranks, in their order, multiples of 16. Fast for up to 8 ranks. A kernel is compiled for
            each number of ranks.

    Raises:
        ValueError: there is not one gradient per slot.
        TypeError: the gradients are not of one dtype, or not on the buffer's device; or ``peers``
            (checked when a launch is prepared) or the factor have another dtype, shape or device.
    """
    tables = flat.tables or DeviceTables.of(flat)
    if factor is None:
        factor = tables.one
    else:
        flat.check_factor(factor)
    dtype, in_place = tables.update(grads), grads is flat.views
    aligned = tables.aligned, peers.data_ptr() % 16 == 0, factor.data_ptr() % 16 == 0
    key = _launch, dtype, aligned, peers.numel(), shares, in_place
    prepared = tables.launches.get(key)
    if prepared is None:
        if not flat.layout.numels and not flat.layout.headers:
            return
        prepared = _prepare(flat, tables, dtype, peers, factor, shares, in_place)
        tables.launches[key] = prepared
    run, rest = prepared
    launch.run(tables.device_index, run, peers, factor, *rest)


def _prepare(
    flat: FlatBuffer,
    tables: DeviceTables,
    dtype: torch.dtype | None,
    peers: Tensor,
    factor: Tensor,
    shares: bool,
    in_place: bool,
) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The launch for gradients of this dtype, without ``peers``, the factor, and later arguments.

    Both may be another tensor in each launch, as in ``unflatten``.
    """
    _check(flat, peers)
    layout, wire = flat.layout, flat.data.dtype
    target, compute = dtype or wire, compute_dtype(dtype or wire, wire)
    trailer = layout.marks_offset + flat.marks.numel() - layout.flags_offset
    tensors = (tables.chunks, tables.dynamic, flat.data)
    integers = (tables.num_chunks, layout.flags_offset, trailer)
    dtypes = (target, compute_dtype(wire, wire), compute)
    constexprs = (
        *(TRITON_DTYPES[each] for each in dtypes),
        *(tables.block, FLAG_BLOCK, peers.numel(), shares, tables.aligned, in_place, INTERPRETED),
    )
    run = _launch.prepare(
        tables.num_chunks + -(-trailer // FLAG_BLOCK),
        (*tensors, peers, factor),
        integers,
        constexprs,
        _WARPS,
    )
    return partial(run, *tensors), (*integers, *constexprs)


def reduce_share(flat: FlatBuffer, peers: Tensor, rank: int) -> None:
    """Sum the share of ``rank`` over all ranks, in place, in the buffer of ``rank``.

    The first of two shots; the second is ``reduce_unflatten(..., shares=True)``, ordered after the
    first shot of all ranks, whose buffers have the same layout. The trailer belongs to no share.
    One launch on the current stream; none if the share is empty.

    Raises:
        TypeError: see :func:`reduce_unflatten`.
    """
    tables = flat.tables or DeviceTables.of(flat)
    key = _share_launch, peers.numel(), rank, peers.data_ptr() % 16 == 0
    prepared = tables.launches.get(key)
    if prepared is None:
        _check(flat, peers)
        first, end = share_of(tables.num_chunks, peers.numel(), rank)
        if first == end:
            return
        wire = flat.data.dtype
        dtypes = (TRITON_DTYPES[wire], TRITON_DTYPES[compute_dtype(wire, wire)])
        constexprs = (*dtypes, tables.block, peers.numel(), INTERPRETED)
        run = _share_launch.prepare(
            end - first, (tables.chunks, peers), (first, rank), constexprs, _WARPS
        )
        prepared = tables.launches[key] = partial(run, tables.chunks), (first, rank, *constexprs)
    run, rest = prepared
    launch.run(tables.device_index, run, peers, *rest)


def share_of(num_chunks: int, ranks: int, rank: int) -> tuple[int, int]:
    """First chunk and end of the share of ``rank``."""
    return num_chunks * rank // ranks, num_chunks * (rank + 1) // ranks


def _check(flat: FlatBuffer, peers: Tensor) -> None:
    """Raise a TypeError if ``peers`` is no tensor of addresses that a kernel can read."""
    if peers.dtype is not torch.int64 or peers.device != flat.data.device or peers.dim() != 1:
        raise TypeError(
            f"the addresses of the ranks' buffers should be torch.int64 of one dimension on "
            f"{flat.data.device}, but are {peers.dtype} of shape {tuple(peers.shape)} on "
            f"{peers.device}"
        )
