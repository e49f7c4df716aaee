"""The quantizing kernels in plain torch: used on the CPU, and in tests as the reference for Triton.

Names, signatures and resulting bits match the Triton kernels in this folder. A block of values v
becomes

    scale = max|v| / limit          the last 8 of the 24 bits of its significand are cut off
    number = round(v / scale)       to nearest even

in fp32; ``code.py`` defines the limit. No number has more than 8 significant bits, so ``number *
scale`` is exact, and a fused multiply-add gives the same sum as two operations. The product does
not overflow. If the scale would be subnormal, it is 0 and the block is all zeros, because its
numbers could not be distinguished. A block that contains NaN or Inf has the scale NaN and numbers
that are 0.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from itertools import compress
from operator import not_

import torch
from torch import Tensor

from tritonddp._torch import foreach_copy_, foreach_zero_
from tritonddp.kernels import reference
from tritonddp.kernels.quantized.buffer import Piece, QuantizedBuffer
from tritonddp.kernels.quantized.code import BLOCK, BlockCode

# Number of blocks per operation: 1 MiB of fp32, which stays in the cache from one operation to the
# next. Fewer blocks would need more calls.
_BLOCKS = 1_024
# Pieces with at least this many elements on average get one call each.
_LARGE = 8_192

_LARGEST_SUBNORMAL = torch.finfo(torch.float32).tiny * (1 - 2**-23)
# Mask of the bits of a scale that are kept.
_SCALE_BITS = ~0xFF


class _Chunk:
    """Consecutive blocks of a part of the message.

    Attributes:
        size: number of blocks.
        pieces: pieces of these blocks, with slots of the whole buffer.
        sizes: numbers of elements of the pieces, and of the padding of their last blocks, in order.
        gaps: for each of ``sizes``, whether it is padding.
        numbers, scales: views of the message for these blocks.
        residual: residuals of the blocks; ``None`` without error feedback.
        code: code of the blocks.
        residuals: residuals of the pieces, 1-D; empty without error feedback.
    """

    def __init__(self, flat: QuantizedBuffer, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self.sizes: list[int] = []
        self.gaps: list[bool] = []
        for piece in pieces:
            pad = -piece.numel % BLOCK
            self.sizes += [piece.numel, pad] if pad else [piece.numel]
            self.gaps += [False, True] if pad else [False]
        self.size = sum(self.sizes) // BLOCK
        part, first = pieces[0].part, pieces[0].place
        self._first = first
        rows = slice(first, first + self.size)
        self.numbers = flat.outgoing.numbers[part, rows]
        self.scales = flat.outgoing.scales[part, rows]
        self.residual = None
        self.residuals: Sequence[Tensor] = ()
        self.is_share = flat.is_share
        self.code = flat.message_layout.code
        if (left := flat.left_out) is not None:
            self.residual = left[part * flat.message_layout.part_blocks :][rows]
            self.residuals = self.without_gaps(self.residual.view(-1).split(self.sizes))

    def without_gaps(self, fragments: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the fragments that are pieces, from fragments of ``sizes`` elements."""
        return list(compress(fragments, map(not_, self.gaps)))

    def rows_of(self, piece: Piece) -> slice:
        """Return the range of these blocks that belongs to a piece."""
        first = piece.place - self._first
        return slice(first, first - (-piece.numel // BLOCK))


def _cut(flat: QuantizedBuffer) -> tuple[list[_Chunk], list[Piece]]:
    """Return chunks of the quantized gradients, and pieces of the exact ones."""
    layout = flat.message_layout
    runs: list[list[Piece]] = []
    exact: list[Piece] = []
    size = 0  # number of blocks in the last chunk
    end = flat.first_slot + len(flat.layout.numels)
    for piece in layout.pieces(flat.first_slot, end, _BLOCKS * BLOCK):
        if not layout.quantized[piece.slot]:
            exact.append(piece)
            continue
        blocks = -(-piece.numel // BLOCK)
        if not runs or runs[-1][0].part != piece.part or size + blocks > _BLOCKS:
            runs.append([])
            size = 0
        runs[-1].append(piece)
        size += blocks
    return [_Chunk(flat, run) for run in runs], exact


def quantize(
    flat: QuantizedBuffer,
    grads: Sequence[Tensor | None],
    used: Sequence[bool],
    scale: float,
    headers: Sequence[int] = (),
) -> None:
    """Write ``scale * grad`` of every gradient, used flags and headers into ``flat.message``.

    The residuals ``residuals.sent`` are added to quantized gradients, and become the new errors. A
    residual is not sent, and does not change, if its slot is not ``used``, if its block becomes
    NaN, or, in a share, if its block is all zeros.

    For arguments see ``reference.flatten``. Gradients must not be fp64, and the factor is applied
    in fp32. A part of a buffer writes no trailer.

    Raises:
        ValueError: the number of headers does not match the layout, or a header is not in
            0..255; or the number of gradients is not the number of slots.
    """
    encoded = flat.layout.encode_headers(headers)
    if len(grads) != len(flat.layout.numels):
        raise ValueError(
            f"the buffer has {len(flat.layout.numels)} slots, but got {len(grads)} gradients"
        )
    sources = {
        slot: None if grad is None else grad.as_strided((grad.numel(),), (1,))
        for slot, grad in enumerate(grads, flat.first_slot)
    }
    if flat.tables is None:
        flat.tables = _cut(flat)
    chunks, exact = flat.tables
    is_used = dict(zip(sources, used, strict=True))
    for chunk in chunks:
        _quantize_chunk(chunk, sources, is_used, scale)
    for piece in exact:
        target = flat.outgoing.exact[piece.part, piece.place :][: piece.numel]
        _gather(target, [target], [piece], sources, scale)
    if not flat.is_part:
        flat.write_trailer(used, encoded)


def reduce_parts(flat: QuantizedBuffer) -> None:
    """Sum the parts of all ranks, in rank order, into ``flat.reduced``, and read the trailers.

    Blocks are summed in fp32, with the residuals of earlier sums, ``residuals.reduced``, and
    quantized again. The residual of a block that is zero on all ranks, or becomes NaN, is not sent
    and does not change. Afterwards ``flat.flags`` and ``flat.headers`` hold the values of all
    ranks. ``flat`` is not a part of a buffer. In a direct exchange no rank owns a part, and only
    the trailers are read.
    """
    numbers, scales, exact, trailers = flat.incoming
    residuals, code = flat.sums_left_out, flat.message_layout.code
    owned = flat.message_layout.owned_blocks(flat.rank)
    silent = (scales[:, :owned] == 0).all(0)
    has_silent = bool(silent.any())
    for first in range(0, owned, _BLOCKS):
        blocks = slice(first, min(first + _BLOCKS, owned))
        total, other, _ = _scratch(blocks.stop - first)
        residual = None if residuals is None else residuals[blocks]
        _sum(code, numbers[:, blocks], scales[:, blocks], total, other, residual)
        kept = None
        if has_silent:
            kept = silent[blocks]
            total[kept] = 0
        _encode(code, total, other, numbers[0, blocks], scales[0, blocks], residual, kept)
    if not flat.message_layout.is_direct:
        for rank in range(1, len(exact)):
            exact[0].add_(exact[rank])
    slots = len(flat.flags)
    flat.flags.copy_(trailers[:, :slots].sum(0))
    flat.headers.copy_(trailers[:, slots:].reshape(-1))


def dequantize(
    flat: QuantizedBuffer, grads: Sequence[Tensor | None], factor: Tensor | None = None
) -> None:
    """Write ``cast(factor * sum)`` of the sums in ``flat.gathered`` into ``grads``.

    For arguments and skipped gradients see ``reference.unflatten``. ``flat`` is not a part of a
    buffer, gradients have the strides of their slots, and the factor is applied in fp32.

    Raises:
        TypeError: the factor is not one fp64 element on the buffer's device.
    """
    _write_means(flat, factor)
    reference.unflatten(flat, grads)


def _write_means(flat: QuantizedBuffer, factor: Tensor | None) -> None:
    """Write the mean of all gradients to ``flat.data``."""
    multiplier = 1.0
    if factor is not None:
        flat.check_factor(factor)
        multiplier = factor.item()
    layout = flat.message_layout
    numbers, scales, exact, _ = flat.result
    if layout.is_direct:
        other = _scratch(_BLOCKS)[1]
        for first in range(0, layout.blocks, _BLOCKS):
            blocks = slice(first, min(first + _BLOCKS, layout.blocks))
            target = flat.data[first * BLOCK : blocks.stop * BLOCK].view(-1, BLOCK)
            _sum(layout.code, numbers[:, blocks], scales[:, blocks], target, other[: len(target)])
            if multiplier != 1:
                target.mul_(multiplier)
        target = flat.data[layout.blocks * BLOCK :]
        torch.add(*exact[:, : len(target)], out=target).mul_(multiplier)
        return
    for part in range(layout.world_size):
        begin = part * layout.part_blocks
        for first in range(0, layout.owned_blocks(part), _BLOCKS):
            last = min(first + _BLOCKS, layout.owned_blocks(part))
            target = flat.data[(begin + first) * BLOCK : (begin + last) * BLOCK].view(-1, BLOCK)
            layout.code.read(target, numbers[part, first:last])
            target.mul_(scales[part, first:last, None])
            if multiplier != 1:
                target.mul_(multiplier)
    target = flat.data[layout.blocks * BLOCK :]
    for values, piece in zip(exact, target.split(max(1, layout.part_exact)), strict=False):
        torch.mul(values[: len(piece)], multiplier, out=piece)


def _quantize_chunk(
    chunk: _Chunk, sources: Mapping[int, Tensor | None], used: Mapping[int, bool], scale: float
) -> None:
    values, other, line = _scratch(chunk.size)
    fragments: Sequence[Tensor] = line.split(chunk.sizes)
    if len(fragments) > len(chunk.pieces):
        foreach_zero_(list(compress(fragments, chunk.gaps)))
        fragments = chunk.without_gaps(fragments)
    residual, kept = chunk.residual, None
    unused = [piece for piece in chunk.pieces if not used[piece.slot]]
    residuals = () if unused or chunk.is_share else chunk.residuals
    is_added = _gather(line, fragments, chunk.pieces, sources, scale, residuals)
    if residual is not None:
        if chunk.is_share:
            silent = ~values.any(1)
            kept = silent if silent.any() else None
        elif unused:
            kept = torch.zeros(len(values), dtype=torch.bool, device="cpu")
            for piece in unused:
                kept[chunk.rows_of(piece)] = True
        if kept is not None:
            values.add_(residual.masked_fill(kept[:, None], 0))
        elif not is_added:
            values.add_(residual)
    _encode(chunk.code, values, other, chunk.numbers, chunk.scales, residual, kept)


def _gather(
    line: Tensor,
    targets: Sequence[Tensor],
    pieces: Sequence[Piece],
    sources: Mapping[int, Tensor | None],
    scale: float,
    residuals: Sequence[Tensor] = (),
) -> bool:
    """Write ``scale`` times these pieces of the gradients into ``targets``, views of ``line``.

    Add their ``residuals`` if that needs no further pass over memory. Return True if they were
    added.
    """
    present, there, absent = [], [], []
    for piece, target in zip(pieces, targets, strict=True):
        source = sources[piece.slot]
        if source is None:
            absent.append(target)
        else:
            if piece.numel != len(source):
                source = source[piece.start :][: piece.numel]
            present.append(source)
            there.append(target)
    is_large = len(pieces) == 1 or len(line) >= _LARGE * len(pieces)
    is_large = is_large and {each.dtype for each in present} == {line.dtype}
    divisor = _divisor(scale) if is_large and residuals and not absent else None
    if divisor is not None:
        for source, target, residual in zip(present, there, residuals, strict=True):
            torch.addcdiv(residual, source, divisor, out=target)
        return True
    if is_large:
        for source, target in zip(present, there, strict=True):
            torch.mul(source, scale, out=target)
    elif there:
        foreach_copy_(there, present)
        line.mul_(scale)
    if absent:
        foreach_zero_(absent)
    return False


def _divisor(scale: float) -> Tensor | None:
    """Return the inverse of ``scale`` if it is a power of two, else ``None``.

    Dividing by it then rounds like multiplying by ``scale``.

    Torch can divide and add in one pass, with two roundings on every machine. Its function that
    multiplies and adds rounds only once on some machines.
    """
    fraction, exponent = math.frexp(scale)
    if fraction != 0.5 or abs(exponent) > 100:
        return None
    return torch.tensor(1 / scale, dtype=torch.float32, device="cpu")


def _encode(
    code: BlockCode,
    values: Tensor,
    other: Tensor,
    numbers: Tensor,
    scales: Tensor,
    residual: Tensor | None,
    kept: Tensor | None = None,
) -> None:
    """Quantize ``values``, fp32 ``(n, 256)``, into ``numbers`` and ``scales``.

    ``residual`` gets the errors, but does not change for blocks that are ``kept`` or not finite.
    ``values`` is overwritten; ``other`` is scratch memory of the same kind.
    """
    amax = torch.amax(torch.abs(values, out=other), dim=1)
    scale = amax / code.limit
    scale.view(torch.int32).bitwise_and_(_SCALE_BITS)
    divisor = torch.threshold(scale, _LARGEST_SUBNORMAL, 1)
    torch.threshold_(scale, _LARGEST_SUBNORMAL, 0)
    if not math.isfinite(amax.max().item()):
        broken = ~amax.isfinite()
        scale[broken] = torch.nan
        divisor[broken] = 1
        values[broken] = 0
        kept = broken if kept is None else kept | broken
    scales.copy_(scale)
    torch.div(values, divisor[:, None], out=other)
    code.write(numbers, other.round_())
    if residual is None:
        return
    before = residual if kept is None else residual[kept]
    torch.addcmul(values, other, scale[:, None], value=-1, out=residual)
    if kept is not None:
        residual[kept] = before


def _sum(
    code: BlockCode,
    numbers: Tensor,
    scales: Tensor,
    total: Tensor,
    other: Tensor,
    start: Tensor | None = None,
) -> None:
    """Sum ``start`` and the blocks of all ranks, in rank order, into ``total``.

    ``other`` is scratch memory.
    """
    for rank, (of_rank, scale) in enumerate(zip(numbers, scales[..., None], strict=True)):
        code.read(other, of_rank)
        if rank:
            total.addcmul_(other, scale)
        elif start is None:
            torch.mul(other, scale, out=total)
        else:
            torch.addcmul(start, other, scale, out=total)


_thread = threading.local()


def _scratch(blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return two scratch tensors for ``blocks`` blocks, and a 1-D view of the first.

    The memory belongs to the thread, and is valid until the next call.
    """
    try:
        memory = _thread.memory
    except AttributeError:
        memory = _thread.memory = torch.empty(2, _BLOCKS, BLOCK, dtype=torch.float32, device="cpu")
    values, other = memory[:, :blocks]
    return values, other, values.view(-1)
