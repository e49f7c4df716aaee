"""Sum the part that this rank owns over all ranks, and quantize the sums, in one launch.

Residuals (earlier quantization errors of the sums) are added. In plain torch this would take three
passes over memory per rank, plus ten passes. The twin in plain torch is in ``reference.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from tritonddp.kernels import device_tables, launch
from tritonddp.kernels.flatten import FLAG_BLOCK
from tritonddp.kernels.launch import Launcher
from tritonddp.kernels.quantized.blocks import encode, error_of
from tritonddp.kernels.quantized.buffer import QuantizedBuffer
from tritonddp.kernels.quantized.code import BLOCK
from tritonddp.kernels.quantized.quantize import QuantizedTables


@triton.jit(
    do_not_specialize=[
        *("slots", "num_headers", "block_programs", "exact_programs", "owned_blocks"),
        *("part_blocks", "exact_offset", "part_exact", "part_bytes", "stride"),
    ]
)
def reduce_parts_kernel(  # type: ignore[no-untyped-def]
    received,
    residuals,
    flags,
    headers,
    slots,
    num_headers,
    block_programs,
    exact_programs,
    owned_blocks,
    part_blocks,
    exact_offset,
    part_exact,
    part_bytes,
    stride,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAG_BLOCK: tl.constexpr,
    FEEDBACK: tl.constexpr,
    LIMIT: tl.constexpr,
    CODE: tl.constexpr,
    WRITE: tl.constexpr,
    READ: tl.constexpr,
):
    """Run one program per ``BLOCK`` quantized or exact elements, and per ``FLAG_BLOCK`` trailers.

    Each program writes to the row of rank 0, in a place that no other program reads. Sums start
    with residuals, or with -0.0, the zero that changes no number (``tl.full`` would make it 0.0).
    Loops are unrolled, so that several loads are in flight. They are not pipelined, since that
    would make the loads narrower.
    """
    program = tl.program_id(0)
    if program >= block_programs + exact_programs:
        place = (program - block_programs - exact_programs).to(tl.int64) * FLAG_BLOCK
        place += tl.arange(0, FLAG_BLOCK)
        trailers = received + part_bytes
        count = tl.zeros((FLAG_BLOCK,), tl.float32)
        for rank in tl.range(0, RANKS, num_stages=1, loop_unroll_factor=4):
            flag = trailers + tl.cast(rank, tl.int64) * stride + place
            count += tl.load(flag, mask=place < slots, other=0).to(tl.float32)
        tl.store(flags + place, count, mask=place < slots)
        size = tl.maximum(num_headers // RANKS, 1)
        header = trailers + (place // size) * stride + slots + place % size
        value = tl.load(header, mask=place < num_headers, other=0).to(tl.float32)
        tl.store(headers + place, value, mask=place < num_headers)
        return
    if program >= block_programs:
        line = (program - block_programs).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        own = (received + exact_offset).to(tl.pointer_type(tl.float32))
        own = tl.multiple_of(own, 16) + line
        # Always a multiple of 16, which the compiler cannot deduce.
        mask = line < (part_exact // 16) * 16
        total = tl.zeros((BLOCK,), tl.float32) * -1.0
        for rank in tl.range(0, RANKS, num_stages=1, loop_unroll_factor=4):
            step = tl.multiple_of(tl.cast(rank, tl.int64) * (stride // 4), 4)
            total += tl.load(own + step, mask=mask, other=0.0)
        tl.store(own, total, mask=mask)
        return

    first = program.to(tl.int64) * (BLOCK // 256)
    own_numbers = received + first * CODE
    own_scales = received + part_blocks.to(tl.int64) * CODE + first * 4
    residual = residuals + first * 256
    blocks = tl.arange(0, BLOCK // 256)
    places = blocks[:, None] * 256 + tl.arange(0, 256)[None, :]
    there = blocks < owned_blocks - first
    if FEEDBACK:
        x = tl.load(residual + places, mask=there[:, None], other=0.0)
    else:
        x = tl.zeros((BLOCK // 256, 256), tl.float32) * -1.0
    some = tl.zeros((BLOCK // 256,), tl.int32)
    for rank in tl.range(0, RANKS, num_stages=1, loop_unroll_factor=4):
        begin = tl.multiple_of(tl.cast(rank, tl.int64) * stride, 16)
        number_in = READ(own_numbers + begin, there, BLOCK // 256)
        scales = (own_scales + begin).to(tl.pointer_type(tl.float32))
        scale_in = tl.load(scales + blocks, mask=there, other=0.0)
        some |= scale_in.to(tl.int32, bitcast=True)
        x += number_in * scale_in[:, None]
    spoken = some != 0  # no scale is -0.0
    x = tl.where(spoken[:, None], x, 0.0)
    number, scale = encode(x, LIMIT)
    WRITE(own_numbers, number, there)
    tl.store(own_scales.to(tl.pointer_type(tl.float32)) + blocks, scale, mask=there)
    if FEEDBACK:
        # Other residuals are left in memory: keeping them in registers would cost 16 registers.
        changed = there & spoken & (scale == scale)
        tl.store(residual + places, error_of(x, number, scale), mask=changed[:, None])


_launch = Launcher(reduce_parts_kernel)


def reduce_parts(flat: QuantizedBuffer) -> None:
    """Sum the parts of all ranks, in rank order, into ``flat.reduced``, and read the trailers.

    Uses one launch on the current stream, which must have waited for the all-to-all. For everything
    else see ``reference.reduce_parts``.
    """
    tables = flat.tables or QuantizedTables.of(flat)
    reduced = flat.sums_left_out
    found = tables.launches.get((_launch,))
    if found is None or found[0] is not reduced:
        found = tables.launches[(_launch,)] = reduced, _prepare(flat, reduced)
    prepared = found[1]
    if prepared is not None:
        launch.run(tables.device_index, prepared)


def compile_for(flat: QuantizedBuffer) -> None:
    """Compile the kernel of :func:`reduce_parts`."""
    _prepare(flat, flat.sums_left_out)


def _prepare(flat: QuantizedBuffer, reduced: Tensor | None) -> Callable[[], None] | None:
    """Return the launch for this buffer and these residuals; ``None`` if there is no sum."""
    layout, block = flat.message_layout, device_tables.BLOCK
    slots, num_headers = len(flat.layout.numels), flat.layout.headers
    owned_blocks = layout.owned_blocks(flat.rank)
    block_programs = -(-owned_blocks * BLOCK // block)
    exact_programs = -(-layout.part_exact // block)
    trailer_programs = -(-max(slots, num_headers) // FLAG_BLOCK)
    programs = block_programs + exact_programs + trailer_programs
    if programs == 0:
        return None
    blocks, exact = layout.part_blocks, layout.part_exact
    offsets = (blocks, layout.exact_offset, exact, layout.part_bytes, layout.stride)
    return _launch.bind(
        programs,
        (flat.received, flat.received if reduced is None else reduced, flat.flags, flat.headers),
        (slots, num_headers, block_programs, exact_programs, owned_blocks, *offsets),
        (layout.world_size, block, FLAG_BLOCK, reduced is not None, *layout.code.constexprs),
    )
