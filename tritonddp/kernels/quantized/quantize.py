"""Quantize: write the gradients of a bucket, and its trailer, into the message, in one launch.

Gradients are scaled, and residuals (earlier quantization errors) are added. In torch that would
take ten passes over memory, and several launches for each gradient. The twin in plain torch, with
the number format, is in ``reference.py``; the layout of the message is in ``buffer.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritonddp.kernels import launch
from tritonddp.kernels.device_tables import DeviceTables
from tritonddp.kernels.flat_buffer import FlatBuffer
from tritonddp.kernels.flatten import FLAG_BLOCK, INTERPRETED, TRITON_DTYPES, widen
from tritonddp.kernels.launch import Launcher
from tritonddp.kernels.quantized.blocks import encode, error_of
from tritonddp.kernels.quantized.buffer import QuantizedBuffer
from tritonddp.kernels.quantized.code import BLOCK


@triton.jit(
    do_not_specialize=[
        *("slots", "trailer", "own_header", "scale_place", "quantized_chunks", "num_chunks"),
        *("part_blocks", "exact_offset", "part_bytes", "stride"),
    ]
)
def quantize_kernel(  # type: ignore[no-untyped-def]
    chunks,
    dynamic,
    message,
    residuals,
    slots,
    trailer,
    own_header,
    scale_place,
    quantized_chunks,
    num_chunks,
    part_blocks,
    exact_offset,
    part_bytes,
    stride,
    SOURCE: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAG_BLOCK: tl.constexpr,
    FEEDBACK: tl.constexpr,
    SHARE: tl.constexpr,
    ALIGNED: tl.constexpr,
    EMULATE: tl.constexpr,
    LIMIT: tl.constexpr,
    CODE: tl.constexpr,
    WRITE: tl.constexpr,
    READ: tl.constexpr,
):
    """Run one program per chunk, then for each part one per ``FLAG_BLOCK`` of its trailer.

    Masks and hints are as in ``flatten_kernel``. Only gradients have a tail, which is read into its
    place in the last block. The message and residuals have room for whole blocks.
    """
    program = tl.program_id(0)
    if program >= num_chunks:
        per_part = tl.cdiv(trailer, FLAG_BLOCK)
        part = ((program - num_chunks) // per_part).to(tl.int64)
        place = ((program - num_chunks) % per_part) * FLAG_BLOCK + tl.arange(0, FLAG_BLOCK)
        word = slots + place + tl.where(place < slots, 0, own_header)
        value = tl.load(dynamic + word, mask=place < trailer, other=0)
        target = message + part * stride + part_bytes + place
        tl.store(target, value.to(tl.uint8), mask=place < trailer)
        return
    row = chunks + program.to(tl.int64) * 5
    slot = tl.load(row)
    address = tl.load(dynamic + slot)
    source = address.to(tl.pointer_type(SOURCE))
    if ALIGNED:
        source = tl.multiple_of(source, 16)
    source += tl.multiple_of(tl.load(row + 1), 16)
    part = tl.load(row + 2)
    place = tl.load(row + 3)
    count = tl.load(row + 4)
    scale = tl.load(dynamic + scale_place).to(tl.float64, bitcast=True).to(tl.float32)
    present = address != 0
    # Not an additional term of the masks: the interpreter of Triton 3.9 cannot load with the
    # conjunction of a block and a scalar.
    readable = tl.where(present, count, 0)
    body = (readable // 16) * 16
    begin = message + tl.multiple_of(part * stride, 16)

    if program >= quantized_chunks:
        target = (begin + exact_offset).to(tl.pointer_type(tl.float32))
        target = tl.multiple_of(target, 16) + tl.multiple_of(place, 16)
        line = tl.arange(0, BLOCK)
        y = widen(tl.load(source + line, mask=line < body, other=0.0), tl.float32, EMULATE)
        y = tl.where(present, y * scale, 0.0)  # even if scale is inf or NaN
        tl.store(target + line, y, mask=line < (count // 16) * 16)
        if (count // 16) * 16 < count:
            # New names: the compiler does not allow another shape under the same name.
            rest = (count // 16) * 16 + tl.arange(0, 16)
            z = tl.load(source + rest, mask=rest < readable, other=0.0)
            z = tl.where(present, widen(z, tl.float32, EMULATE) * scale, 0.0)
            tl.store(target + rest, z, mask=rest < count)
        return

    blocks = tl.arange(0, BLOCK // 256)
    places = blocks[:, None] * 256 + tl.arange(0, 256)[None, :]
    there = blocks * 256 < count
    x = widen(tl.load(source + places, mask=places < body, other=0.0), tl.float32, EMULATE)
    if body < readable:
        last = tl.load(source + places, mask=(places >= body) & (places < readable), other=0.0)
        x = tl.where(places < body, x, widen(last, tl.float32, EMULATE))
    x = tl.where(present, x * scale, 0.0)
    if FEEDBACK:
        residual = residuals + (part * part_blocks + place) * 256 + places
        used = tl.load(dynamic + slots + slot) != 0
        own = blocks * 256 < tl.where(used, count, 0)
        if SHARE:
            own = own & (tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1) != 0)
        x = x + tl.load(residual, mask=own[:, None], other=0.0)
    number, block_scale = encode(x, LIMIT)
    if FEEDBACK:
        # Other residuals are left in memory: keeping them in registers would cost 16 registers.
        changed = own & (block_scale == block_scale)
        tl.store(residual, error_of(x, number, block_scale), mask=changed[:, None])
    WRITE(tl.multiple_of(begin + place * CODE, 16), number, there)
    scales = (begin + part_blocks.to(tl.int64) * CODE).to(tl.pointer_type(tl.float32))
    tl.store(scales + place + blocks, block_scale, mask=there)


_launch = Launcher(quantize_kernel)


class QuantizedTables(DeviceTables):
    """The tables of a quantized buffer; shared by ``quantize`` and ``dequantize``.

    Attributes:
        chunks: int64 ``(num_chunks, 5)``: slot, first element within the gradient, part of the
            message, place in it (see :class:`~tritonddp.kernels.quantized.buffer.Piece`), number of
            elements (1 to ``block``). No chunk crosses the border of a part.
        quantized_chunks: number of chunks of quantized gradients, which are first.
    """

    def _rows(self, flat: FlatBuffer, block: int) -> Tensor:
        assert isinstance(flat, QuantizedBuffer)
        if block < BLOCK:
            raise ValueError(f"block should be at least {BLOCK}, but is {block}")
        layout, first = flat.message_layout, flat.first_slot
        quantized: list[tuple[int, ...]] = []
        exact: list[tuple[int, ...]] = []
        for slot, start, numel, part, place in layout.pieces(
            first, first + len(flat.layout.numels), block
        ):
            rows = quantized if layout.quantized[slot] else exact
            rows.append((slot - first, start, part, place, numel))
        self.quantized_chunks = len(quantized)
        return torch.tensor(quantized + exact, dtype=torch.int64, device="cpu").view(-1, 5)


def quantize(
    flat: QuantizedBuffer,
    grads: Sequence[Tensor | None],
    used: Sequence[bool],
    scale: float,
    headers: Sequence[int] = (),
) -> None:
    """Write ``scale * grad`` of every gradient, used flags and headers into ``flat.message``.

    Uses one launch on the current stream, which should be the stream that produced the gradients.
    For arguments and residuals see ``reference.quantize``; for errors see
    :meth:`DeviceTables.update`.
    """
    tables = flat.tables or QuantizedTables.of(flat)
    dtype = tables.update(grads, used, scale, headers)
    sent = flat.left_out
    found = tables.launches.get((_launch, dtype, tables.aligned))
    if found is None or found[0] is not sent:
        found = sent, _prepare(flat, tables, dtype, tables.aligned, sent)
        tables.launches[_launch, dtype, tables.aligned] = found
    prepared = found[1]
    if prepared is None:
        return
    launch.run(tables.device_index, prepared)


def compile_for(flat: QuantizedBuffer, dtype: torch.dtype) -> None:
    """Compile all kernels that :func:`quantize` may need for this gradient dtype, or for none."""
    tables = QuantizedTables.of(flat)
    tables.usual_dtype = dtype
    tables.compile()
    for aligned in (True, False):
        _prepare(flat, tables, dtype, aligned, flat.left_out)


def _prepare(
    flat: QuantizedBuffer,
    tables: QuantizedTables,
    dtype: torch.dtype | None,
    aligned: bool,
    sent: Tensor | None,
) -> Callable[[], None] | None:
    """Return the launch for gradients of this dtype and alignment; ``None`` if not needed.

    ``sent`` are residuals.
    """
    layout, slots = flat.message_layout, len(flat.layout.numels)
    trailer = 0 if flat.is_part else slots + layout.header
    programs = tables.num_chunks + layout.parts * -(-trailer // FLAG_BLOCK)
    if programs == 0:
        return None
    own_header, scale_place = flat.rank * layout.header, 2 * slots + flat.layout.headers
    chunks = (tables.quantized_chunks, tables.num_chunks)
    offsets = (layout.part_blocks, layout.exact_offset, layout.part_bytes, layout.stride)
    source = TRITON_DTYPES[dtype or tables.usual_dtype]
    kind = (sent is not None, flat.is_share, aligned)
    return _launch.bind(
        programs,
        (tables.chunks, tables.dynamic, flat.message, tables.one if sent is None else sent),
        (slots, trailer, own_header, scale_place, *chunks, *offsets),
        (source, tables.block, FLAG_BLOCK, *kind, INTERPRETED, *layout.code.constexprs),
        num_warps=tables.num_warps,
    )
