"""The quantising kernels in plain torch: the CPU path, and the oracle of the Triton kernels.

Same names, same signatures and the same bits as in ``quantize.py``. A block of values v becomes

    scale = max|v| / limit          limit: 127 (int8), 448 (fp8), the largest number
    number = round(v / scale)       to the nearest, of two the even one

in fp32, each operation rounded by itself (no fused multiply-add). Where the scale would be
subnormal it is 0 and the block is zeros: its numbers could not be told apart. Where it is so large
that ``limit * scale`` would overflow it is a little less. A block that holds NaN or Inf has the
scale NaN, and numbers that are 0.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_

import torch
from torch import Tensor

from tritonddp._torch import foreach_copy_, foreach_zero_
from tritonddp.kernels import reference
from tritonddp.kernels.quantized.buffer import BLOCK, LIMITS, Piece, QuantizedBuffer

# Blocks that are worked on at once: 1 MiB of fp32, which stays in the cache from one operation to
# the next. Smaller ones cost more calls.
_BLOCKS = 1_024

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# One below the largest whose product with the limit is finite.
_LARGEST_SCALE = {
    dtype: torch.nextafter(
        torch.tensor(torch.finfo(torch.float32).max / limit, dtype=torch.float32),
        torch.zeros((), dtype=torch.float32),
    )
    for dtype, limit in LIMITS.items()
}


@dataclass(frozen=True)
class _Chunk:
    """Blocks ``[first, last)`` of a part of the message, which follow each other in the buffer."""

    part: int
    first: int
    last: int
    pieces: list[Piece]  # of which they consist; their slots are those of the whole buffer
    sizes: list[int]  # elements of the pieces and of what pads their last blocks, in order
    gaps: list[bool]  # which of these pad

    @classmethod
    def of(cls, pieces: list[Piece]) -> _Chunk:
        part, first = pieces[0].part, pieces[0].place
        sizes, gaps = [], []
        for piece in pieces:
            pad = -piece.numel % BLOCK
            sizes += [piece.numel, pad] if pad else [piece.numel]
            gaps += [False, True] if pad else [False]
        return cls(part, first, first + sum(sizes) // BLOCK, pieces, sizes, gaps)

    def rows_of(self, piece: Piece) -> slice:
        """Which of these blocks a piece has."""
        first = piece.place - self.first
        return slice(first, first - (-piece.numel // BLOCK))


def _cut(flat: QuantizedBuffer) -> tuple[list[_Chunk], list[Piece]]:
    """Chunks of the quantised gradients, and pieces of the others."""
    layout = flat.message_layout
    runs: list[list[Piece]] = []
    exact: list[Piece] = []
    size = 0  # of the last run, in blocks
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
    return list(map(_Chunk.of, runs)), exact


def quantize(
    flat: QuantizedBuffer,
    grads: Sequence[Tensor | None],
    used: Sequence[bool],
    scale: float,
    headers: Sequence[int] = (),
) -> None:
    """Write ``scale * grad`` of every gradient, used flags and headers into ``flat.message``.

    Quantised gradients with what quantisation has left out of them before, ``residuals.sent``,
    which becomes what it leaves out now. The residual of a slot that is not ``used`` is not sent
    and stays as it is, and so is that of a block which becomes NaN. Where the layout has marks,
    they say which gradients have such a block, or an exact number that is not finite.

    Arguments are those of ``reference.flatten``. Gradients are not of fp64, and the factor is
    applied in fp32. A part of a buffer writes no trailer.

    Raises:
        ValueError: the headers are not as many as the layout's, or not in 0..255; or there is not
            one gradient per slot.
    """
    encoded = flat.layout.encode_headers(headers)
    if len(grads) != len(flat.layout.numels):
        raise ValueError(
            f"the buffer has {len(flat.layout.numels)} slots, but {len(grads)} gradients came"
        )
    sources = {
        slot: None if grad is None else grad.as_strided((grad.numel(),), (1,))
        for slot, grad in enumerate(grads, flat.first_slot)
    }
    if flat.tables is None:
        flat.tables = _cut(flat)
    chunks, exact = flat.tables
    for chunk in chunks:
        _quantize_chunk(flat, chunk, sources, used, scale)
    for piece in exact:
        target = flat.outgoing.exact[piece.part, piece.place :][: piece.numel]
        _gather(target, [target], [piece], sources, scale)
    if flat.layout.marks is not None:
        _mark(flat, chunks, exact)
    if not flat.is_part:
        flat.write_trailer(used, encoded)


def reduce_parts(flat: QuantizedBuffer) -> None:
    """Sum the parts of all ranks, in rank order, into ``flat.reduced``, and read the trailers.

    Blocks are summed in fp32, with what quantisation has left out of the sums before,
    ``residuals.reduced``, and quantised again. The residual of a block that is zeros on all ranks
    is not sent and stays as it is, and so is that of a block which becomes NaN. Then ``flat.flags``
    and ``flat.headers`` are those of all ranks. ``flat`` is a whole buffer.
    """
    numbers, scales, exact, trailers, _ = flat.incoming
    residuals = flat.residuals
    owned = flat.message_layout.owned_blocks(flat.rank)
    for first in range(0, owned, _BLOCKS):
        blocks = slice(first, min(first + _BLOCKS, owned))
        total, other = _scratch(blocks.stop - first)
        _decode(numbers[0, blocks], scales[0, blocks], total)
        for rank in range(1, len(numbers)):
            _decode(numbers[rank, blocks], scales[rank, blocks], other)
            total.add_(other)
        residual = None if residuals is None else residuals.reduced[blocks]
        silent = (scales[:, blocks] == 0).all(0)
        if residual is not None:
            total.add_(residual)
        if silent.any():
            total[silent] = 0
        _encode(total, other, numbers[0, blocks], scales[0, blocks], residual, silent)
    for rank in range(1, len(exact)):
        exact[0].add_(exact[rank])
    slots = len(flat.flags)
    flat.flags.copy_(trailers[:, :slots].sum(0))
    flat.headers.copy_(trailers[:, slots:].reshape(-1))


def dequantize(
    flat: QuantizedBuffer, grads: Sequence[Tensor | None], factor: Tensor | None = None
) -> None:
    """Write ``cast(factor * sum)`` of the sums in ``flat.gathered`` into ``grads``.

    Arguments, and what is left untouched, are those of ``reference.unflatten``: ``flat`` is a whole
    buffer, gradients have the strides of their slots, and the factor is applied in fp32.

    Raises:
        TypeError: the factor is of another kind.
    """
    put_together(flat, factor)
    reference.unflatten(flat, grads)


def put_together(flat: QuantizedBuffer, factor: Tensor | None = None) -> None:
    """The first step of :func:`dequantize`: the mean of all gradients in ``flat.data``.

    On the CPU only, where large gradients stay there. Nothing is left of the factor then.
    """
    multiplier = 1.0
    if factor is not None:
        flat.check_factor(factor)
        multiplier = factor.item()
    layout = flat.message_layout
    numbers, scales, exact, _, _ = flat.result
    for part in range(layout.world_size):
        begin = part * layout.part_blocks
        for first in range(0, layout.owned_blocks(part), _BLOCKS):
            last = min(first + _BLOCKS, layout.owned_blocks(part))
            target = flat.data[(begin + first) * BLOCK : (begin + last) * BLOCK].view(-1, BLOCK)
            _decode(numbers[part, first:last], scales[part, first:last], target)
            if multiplier != 1:
                target.mul_(multiplier)
    target = flat.data[layout.blocks * BLOCK :]
    for values, piece in zip(exact, target.split(max(1, layout.part_exact)), strict=False):
        torch.mul(values[: len(piece)], multiplier, out=piece)


def _quantize_chunk(
    flat: QuantizedBuffer,
    chunk: _Chunk,
    sources: Mapping[int, Tensor | None],
    used: Sequence[bool],
    scale: float,
) -> None:
    values, other = _scratch(chunk.last - chunk.first)
    line = values.view(-1)
    fragments: Sequence[Tensor] = line.split(chunk.sizes)
    if len(fragments) > len(chunk.pieces):
        foreach_zero_(list(compress(fragments, chunk.gaps)))
        fragments = list(compress(fragments, map(not_, chunk.gaps)))
    _gather(line, fragments, chunk.pieces, sources, scale)
    residual = kept = None
    if flat.residuals is not None:
        first = chunk.part * flat.message_layout.part_blocks + chunk.first
        residual = flat.residuals.sent[first:][: len(values)]
        unused = [piece for piece in chunk.pieces if not used[piece.slot - flat.first_slot]]
        if not unused:
            values.add_(residual)
        else:
            kept = torch.zeros(len(values), dtype=torch.bool)
            for piece in unused:
                kept[chunk.rows_of(piece)] = True
            values.add_(residual.masked_fill(kept[:, None], 0))
    rows = slice(chunk.first, chunk.last)
    numbers, scales = flat.outgoing.numbers[chunk.part], flat.outgoing.scales[chunk.part]
    _encode(values, other, numbers[rows], scales[rows], residual, kept)


def _mark(flat: QuantizedBuffer, chunks: list[_Chunk], exact: list[Piece]) -> None:
    """Mark gradients that are not finite."""
    flat.clear_marks()
    for chunk in chunks:
        broken = flat.outgoing.scales[chunk.part, chunk.first : chunk.last].isnan()
        if broken.any():
            for piece in chunk.pieces:
                if broken[chunk.rows_of(piece)].any():
                    flat.mark(piece.slot - flat.first_slot)
    for piece in exact:
        if not flat.outgoing.exact[piece.part, piece.place :][: piece.numel].isfinite().all():
            flat.mark(piece.slot - flat.first_slot)


def _gather(
    line: Tensor,
    targets: Sequence[Tensor],
    pieces: Sequence[Piece],
    sources: Mapping[int, Tensor | None],
    scale: float,
) -> None:
    """``scale`` times these pieces of the gradients into ``targets``, which lie in ``line``."""
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
    if len(present) == len(pieces) == 1 and present[0].dtype is line.dtype:
        torch.mul(present[0], scale, out=targets[0])
    elif there:
        foreach_copy_(there, present)
        line.mul_(scale)
    if absent:
        foreach_zero_(absent)


def _encode(
    values: Tensor,
    other: Tensor,
    numbers: Tensor,
    scales: Tensor,
    residual: Tensor | None,
    kept: Tensor | None = None,
) -> None:
    """Quantise ``values``, fp32 ``(n, 256)``, into ``numbers`` and ``scales``, with their errors.

    ``values`` is overwritten; ``other`` is memory like it. The ``residual`` of blocks that are
    ``kept``, and of those that are not finite, stays as it is.
    """
    dtype = numbers.dtype
    amax = torch.amax(torch.abs(values, out=other), dim=1)
    scale = torch.minimum(amax / LIMITS[dtype], _LARGEST_SCALE[dtype])
    scale.masked_fill_(scale < _SMALLEST_SCALE, 0)
    broken = ~(amax < torch.inf)
    if broken.any():
        scale.masked_fill_(broken, torch.nan)
        values[broken] = 0
        kept = broken if kept is None else kept | broken
    scales.copy_(scale)
    divisor = torch.where(scale > 0, scale, 1)[:, None]
    torch.div(values, divisor, out=other)
    numbers.copy_(other.round_() if dtype is torch.int8 else other)
    if residual is None:
        return
    before = residual if kept is None else residual[kept]
    if dtype is torch.int8:
        other.mul_(scale[:, None])
    else:
        _decode(numbers, scale, other)
    torch.sub(values, other, out=residual)
    if kept is not None:
        residual[kept] = before


def _decode(numbers: Tensor, scales: Tensor, out: Tensor) -> None:
    """``numbers * scales`` of blocks, in fp32."""
    if numbers.dtype is torch.int8:
        out.copy_(numbers)
        out.mul_(scales[:, None])
        return
    # Torch takes twenty times as long for fp8 as for int8. With its exponent and fraction in the
    # place of those of fp16, which has the sign in the highest bit, a number is 1/256 of itself.
    bits = numbers.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    out.copy_(bits.view(torch.float16))
    out.mul_((scales * 256)[:, None])


_thread = threading.local()


def _scratch(blocks: int) -> tuple[Tensor, Tensor]:
    """Memory for the values of so many blocks, twice, of this thread, until the next call."""
    try:
        memory = _thread.memory
    except AttributeError:
        memory = _thread.memory = torch.empty(2, _BLOCKS, BLOCK, dtype=torch.float32)
    return memory[0, :blocks], memory[1, :blocks]
