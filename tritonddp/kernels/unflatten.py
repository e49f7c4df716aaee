"""Unflatten: scale, cast and scatter a reduced bucket into all its gradients, in one launch.

It needs fewer launches than one copy per gradient. If ``.grad`` is a view of the bucket, it is
scaled in place, or nothing is launched. The twin in plain torch is in ``reference.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritonddp import _torch
from tritonddp._device import record_use
from tritonddp.kernels import launch
from tritonddp.kernels.device_tables import ADDRESS_OF, ALIGNMENT, DeviceTables
from tritonddp.kernels.flat_buffer import FlatBuffer
from tritonddp.kernels.flatten import INTERPRETED, TRITON_DTYPES, narrow, widen
from tritonddp.kernels.launch import Launcher
from tritonddp.kernels.reference import compute_dtype

_DATA_OF = attrgetter("data")


# A factor may be one element of a larger tensor, so it is at any multiple of 8.
@triton.jit(do_not_specialize=["flags_offset"], do_not_specialize_on_alignment=["factor"])
def unflatten_kernel(  # type: ignore[no-untyped-def]
    chunks,
    dynamic,
    bucket,
    factor,
    flags_offset,
    TARGET: tl.constexpr,
    WIRE: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Run one program per chunk; mask, tail and hints as in ``flatten_kernel``.

    The flag (whether any rank used the parameter) and the factor are read on the device, so the
    host does not wait for them. There is always a factor: 1.0 changes no number, not even -0.0, and
    its cost is hidden by the memory accesses. With ``IN_PLACE`` gradients are views of the bucket,
    and a factor of 1.0 leaves nothing to do.

    If ``bucket`` and ``dynamic`` are ``None``, the chunks belong to several buffers, see
    :class:`JointUnflatten`: they contain the addresses of everything else.
    """
    # Not in fp64, where Triton 3.7 would spill two registers for sm_100.
    if IN_PLACE and COMPUTE == tl.float32:  # noqa: SIM102, SIM300  constexprs
        if tl.load(factor) == 1.0:
            return
    row = chunks + tl.program_id(0).to(tl.int64) * (5 if bucket is None else 4)
    first = tl.multiple_of(tl.load(row + 1), 16)
    count = tl.load(row + 3)
    if bucket is None:
        entry = tl.load(row).to(tl.pointer_type(tl.int64))
        source = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(WIRE)), 16)
        used = tl.load(row + 4).to(tl.pointer_type(WIRE))
    else:
        slot = tl.load(row)
        entry = dynamic + slot
        source = bucket + tl.multiple_of(tl.load(row + 2), 16)
        used = bucket + flags_offset + slot
    if IN_PLACE:
        target = source
    else:
        address = tl.load(entry)
        if address == 0:
            return
        target = address.to(tl.pointer_type(TARGET))
        if ALIGNED:
            target = tl.multiple_of(target, 16)
        target += first
    if widen(tl.load(used), COMPUTE, EMULATE) == 0.0:
        return
    scale = widen(tl.load(factor), COMPUTE, EMULATE)

    body = (count // 16) * 16
    offsets = tl.arange(0, BLOCK)
    inside = offsets < body
    x = widen(tl.load(source + offsets, mask=inside, other=0.0), COMPUTE, EMULATE)
    tl.store(target + offsets, narrow(x * scale, TARGET, EMULATE), mask=inside)
    if body < count:
        rest = body + tl.arange(0, 16)
        y = widen(tl.load(source + rest, mask=rest < count, other=0.0), COMPUTE, EMULATE)
        if COMPUTE == tl.float64:  # noqa: SIM300
            # Load it again: keeping it, Triton 3.6 would spill two registers for sm_90.
            scale = tl.load(factor)
        tl.store(target + rest, narrow(y * scale, TARGET, EMULATE), mask=rest < count)


_launch = Launcher(unflatten_kernel)


def unflatten(
    flat: FlatBuffer, grads: Sequence[Tensor | None], factor: Tensor | None = None
) -> None:
    """Write ``cast(factor * payload)`` of the reduced ``flat`` into ``grads``.

    Uses one launch on the current stream, which must have waited for the collective; no launch if
    there is nothing to write. For arguments see ``reference.unflatten``. Gradients have the strides
    of their slots. The factor is ready on the current stream, and the host does not read it.

    Raises:
        ValueError: the number of gradients is not the number of slots.
        TypeError: the gradients differ in dtype, or are not on the buffer's device; or the
            factor is not one fp64 element on that device.
    """
    tables = flat.tables or DeviceTables.of(flat)
    if factor is not None:
        flat.check_factor(factor)
    if in_place := grads is flat.views and tables.check_places(flat, list(map(ADDRESS_OF, grads))):
        dtype = flat.dtype if flat.views else None
    else:
        dtype = tables.update(grads)
    if dtype is None or tables.num_chunks == 0:
        return
    aligned = in_place or tables.aligned
    key = _launch, flat.data.data_ptr(), dtype, aligned, in_place, factor is None
    found = tables.launches.get(key)
    if found is None:
        found = tables.launches[key] = _prepare(flat, tables, dtype, aligned, in_place, factor)
    run, rest = found
    given = () if factor is None else (factor, *rest)
    launch.run(tables.device_index, run, *given)


def compile_for(flat: FlatBuffer, dtype: torch.dtype, in_place: bool, is_joint: bool) -> None:
    """Compile all kernels that :func:`unflatten` may need for this gradient dtype.

    With ``is_joint``, also those for :class:`JointUnflatten`.
    """
    tables = DeviceTables.of(flat)
    for aligned in {True, in_place}:
        _prepare(flat, tables, dtype, aligned, in_place, None)
        if is_joint:
            kind = dtype, flat.data.dtype, aligned, in_place
            _bind(tables, 1, (tables.chunks, None, None), 0, kind, None)


def _prepare(
    flat: FlatBuffer,
    tables: DeviceTables,
    dtype: torch.dtype,
    aligned: bool,
    in_place: bool,
    factor: Tensor | None,
) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the launch for gradients of this dtype and alignment, and its last arguments."""
    kind = dtype, flat.data.dtype, aligned, in_place
    tensors = tables.chunks, tables.dynamic, flat.data
    return _bind(tables, tables.num_chunks, tensors, flat.layout.flags_offset, kind, factor)


def _bind(
    tables: DeviceTables,
    programs: int,
    tensors: tuple[Tensor | None, ...],
    flags_offset: int,
    kind: tuple[torch.dtype, torch.dtype, bool, bool],
    factor: Tensor | None,
) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return a launch of the kernel, and its last arguments.

    Without a factor, call it without arguments. Otherwise call it with the factor, which may be
    another tensor each time, and the last arguments. One compiled kernel fits the storage of all
    factors: only the first element is read.

    Args:
        tables: tables of a buffer, which provide a factor of 1 and the program size.
        programs: number of programs, one per chunk.
        tensors: ``chunks``, ``dynamic`` and ``bucket``.
        flags_offset: see :class:`Layout`.
        kind: dtypes of gradients and wire, ``ALIGNED``, ``IN_PLACE``.
        factor: fp64 ``(1,)``, or ``None`` for 1.
    """
    dtype, wire, aligned, in_place = kind
    compute = compute_dtype(dtype, wire)
    dtypes = TRITON_DTYPES[dtype], TRITON_DTYPES[wire], TRITON_DTYPES[compute]
    run = _launch.bind(
        programs,
        (*tensors, tables.one if factor is None else factor),
        (flags_offset,),
        (*dtypes, tables.block, aligned, in_place, INTERPRETED),
        num_warps=tables.num_warps,
    )
    return (run, ()) if factor is None else launch.without(len(tensors), run)


class JointUnflatten:
    """Unflattens several buffers in one launch, with the same bits as :func:`unflatten` for each.

    The buffers have one wire dtype and device, and their memory does not move. The object is
    created once, not while a CUDA graph is captured, and kept while the buffers remain the same.
    """

    def __init__(self, flats: Sequence[FlatBuffer]) -> None:
        self._flats = list(flats)
        self._tables: list[DeviceTables] = [
            flat.tables or DeviceTables.of(flat) for flat in self._flats
        ]
        self._former: list[Tensor] = []  # chunks that CUDA graphs may read
        self._chunks = self._build()

    @property
    def memory(self) -> list[Tensor]:
        """All tensors of this object that kernels read."""
        return [self._chunks, *self._former]

    def _build(self) -> Tensor:
        """Return the chunks of all buffers: int64 ``(num_chunks, 5)``, one row per program.

        Columns: address of the table entry that holds the gradient's address, first element within
        the gradient, address of that element in the buffer, number of elements, address of the used
        flag.
        """
        self._places = [flat.data.data_ptr() for flat in self._flats]
        self._launches: dict[tuple[Any, ...], Any] = {}
        kinds = {(flat.data.dtype, flat.data.device) for flat in self._flats}
        programs = {(tables.block, tables.num_warps) for tables in self._tables}
        self._fits = len(kinds) == len(programs) == 1 and not any(
            place % ALIGNMENT for place in self._places
        )
        rows = []
        for flat, tables, first in zip(self._flats, self._tables, self._places, strict=True):
            slot, start, offset, count = tables.chunks.unbind(1)
            size = flat.data.element_size()
            entry = tables.dynamic.data_ptr() + slot * tables.dynamic.element_size()
            used = first + (flat.layout.flags_offset + slot) * size
            rows.append(torch.stack([entry, start, first + offset * size, count, used], dim=1))
        return torch.cat(rows)

    def __call__(
        self, grads: Sequence[Sequence[Tensor | None]], factor: Tensor | None = None
    ) -> None:
        """Write ``cast(factor * payload)`` of each reduced buffer into its gradients.

        Uses one launch on the current stream if all gradients have one dtype and all or none are
        views of the buffers; otherwise one launch per buffer.

        Args:
            grads: for each buffer, one gradient per slot: see :func:`unflatten`, also for errors.
            factor: one fp64 element on the device; ``None`` for 1.
        """
        flats, aligned = self._flats, True
        first_kind, is_mixed, has_none = (None, False), False, False
        for flat, tables, each in zip(flats, self._tables, grads, strict=True):
            # Inlined from unflatten() and DeviceTables.update(), to save the calls.
            dtype: Any
            try:
                addresses, dtype = list(map(ADDRESS_OF, each)), each[0].dtype  # type: ignore[arg-type, union-attr]
            except (TypeError, IndexError):
                addresses, dtype = [], tables.update(each)
            in_place = each is flat.views and (
                tables.in_place == (flat.data.data_ptr(), addresses)
                or tables.check_places(flat, addresses)
            )
            if (
                not in_place
                and addresses
                and (addresses != tables.addresses or dtype is not tables.dtype)
            ):
                tables.change(each, addresses=addresses)
            if dtype is None and not in_place:
                has_none = True  # compatible with gradients of any dtype, but not with views
            elif first_kind == (None, False):
                first_kind = dtype, in_place
            elif first_kind != (dtype, in_place):
                is_mixed = True
            aligned = aligned and (in_place or tables.aligned)
        if self._places != list(map(ADDRESS_OF, map(_DATA_OF, flats))):
            self._move()
        dtype, in_place = first_kind
        if dtype is None or is_mixed or (has_none and in_place) or not self._fits:
            for flat, each in zip(flats, grads, strict=True):
                unflatten(flat, each, factor)
            return
        if factor is not None:
            flats[0].check_factor(factor)
        if not len(self._chunks):
            return
        kind = dtype, flats[0].data.dtype, aligned, in_place
        key = kind, factor is None
        found = self._launches.get(key)
        if found is None:
            rows, tables = self._chunks, self._tables[0]
            found = self._launches[key] = _bind(
                tables, len(rows), (rows, None, None), 0, kind, factor
            )
        run, rest = found
        arguments = () if factor is None else (factor, *rest)
        # Inlined from launch.run(), to save the call.
        index = self._tables[0].device_index
        if index is None or index == _torch.current_device():
            run(*arguments)
        else:
            with torch.cuda.device(index):
                run(*arguments)
        launch.launches += 1

    def _move(self) -> None:
        """Rebuild the chunks after the memory of a buffer has moved."""
        if any(tables.is_captured for tables in self._tables):
            self._former.append(self._chunks)
        record_use(self._chunks)
        self._chunks = self._build()
