"""The packed buffers of one bucket on all ranks of a host, in shared memory, and their sum.

All ranks get the same bits: they add in rank order, and each addition is rounded. With few ranks,
each rank adds up everything. Otherwise a buffer is divided into one *share* per rank: each rank
first adds up its share, in place (:class:`Shares`), and then gets the shares of the other ranks.

The sum of small gradients goes into the bucket's buffer in one call, and is copied from there. The
sum of large gradients goes directly into ``.grad``; the buffer gets only the sum of the trailer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonddp.kernels.flat_buffer import FlatBuffer
from tritonddp.kernels.messages import add_in_order

# With more than two ranks, add this many bytes at a time: they stay in the cache between two
# additions.
_PIECE = 512 * 1024

# Elements ``[start, end)`` of a tensor, and the tensors whose sum belongs there.
_Part = tuple[int, int, Sequence[Tensor]]


class RankBuffers:
    """The buffers of one bucket that the ranks of a host have packed, in the order of the ranks.

    Args:
        memory: memory of each rank, uint8 ``(nbytes,)``.
        into_grads: the gradients are large: :meth:`sum` leaves them to :meth:`sum_into`.
        cuts: start and end of the share of each rank, which that rank has added up and the
            other ranks read. Empty if there are no shares.
        mine: start and end of the gradients that this rank owns: only their sum and the sum of
            the trailer are needed. ``None`` if the whole sum is needed.

    Attributes:
        packed: the buffers, 1-D, in the dtype that is sent.
        result: the part of the bucket's buffer that :meth:`sum` writes to.
        pair: with two ranks, the two parts whose sum is ``result``; else ``None``.
    """

    def __init__(
        self,
        flat: FlatBuffer,
        memory: Sequence[Tensor],
        into_grads: bool,
        cuts: Sequence[tuple[int, int]],
        mine: tuple[int, int] | None = None,
    ) -> None:
        layout = flat.layout
        self.packed = [each.view(flat.data.dtype) for each in memory]
        self.cuts = cuts
        self.into_grads = into_grads
        self._flat = flat
        first = len(flat.payload) if self.into_grads else 0
        self.result = flat.data[first:]
        self._parts = self._parts_of(first, len(flat.data))
        if mine is not None and not self.into_grads:
            start, end = len(flat.payload), len(flat.data)
            self._parts = [
                (at + a, at + b, terms)
                for at, cut in ((mine[0], mine), (start, (start, end)))
                for a, b, terms in self._parts_of(*cut)
            ]
        is_whole = len(self._parts) == 1 and self._parts[0][:2] == (0, len(self.result))
        whole = is_whole and self._parts[0][2]
        self.pair = whole if whole and len(whole) == 2 else None
        # For each gradient: tensors of its shape to sum, or the parts that it consists of.
        self._terms: list[Sequence[Tensor]] = []
        self._cuts: list[Sequence[_Part]] = []
        if self.into_grads:
            places = zip(layout.shapes, layout.strides, layout.offsets, layout.numels, strict=True)
            for shape, strides, offset, numel in places:
                parts = self._parts_of(offset, offset + numel)
                is_whole = len(parts) == 1
                terms = parts[0][2] if is_whole else ()
                self._terms.append([each.as_strided(shape, strides) for each in terms])
                self._cuts.append(() if is_whole else parts)

    def sum(self) -> None:
        """Write the sum into the bucket's buffer, after all have packed, or summed their shares."""
        for start, end, terms in self._parts:
            add_in_order(terms, self.result[start:end])

    def sum_into(self, grads: Sequence[Tensor | None], factor: Tensor | None = None) -> None:
        """Write the sum, times ``factor``, into large gradients, after :meth:`sum`.

        Like :func:`tritonddp.kernels.reference.unflatten`, do not write a gradient whose reduced
        used flag is zero, or a slot whose gradient is ``None``. The call may be repeated.

        Args:
            grads: one per slot, of the slot's shape, in any memory order.
            factor: one fp64 element; the sum is rounded before the multiplication.
        """
        flat, number = self._flat, 1.0 if factor is None else factor.item()
        flags = flat.reduced_flags()
        if not all(flags):
            grads = [grad if flag else None for grad, flag in zip(grads, flags, strict=True)]
        for slot, (grad, terms) in enumerate(zip(grads, self._terms, strict=True)):
            if grad is None:
                continue
            if len(terms) == 2:
                torch.add(terms[0], terms[1], out=grad)
            elif terms:
                add_in_order(terms, grad)
            else:
                self._put_together(slot, grad)
            if number != 1:
                grad.mul_(number)

    def _put_together(self, slot: int, grad: Tensor) -> None:
        """Write a gradient whose sum consists of several parts, each consecutive in memory."""
        shape, strides = self._flat.layout.shapes[slot], self._flat.layout.strides[slot]
        is_in_order = grad.stride() == strides
        dense = grad if is_in_order else grad.new_empty_strided(shape, strides)
        line = dense.as_strided((dense.numel(),), (1,))
        for start, end, terms in self._cuts[slot]:
            add_in_order(terms, line[start:end])
        if not is_in_order:
            grad.copy_(dense)

    def _parts_of(self, first: int, last: int) -> list[_Part]:
        """Split elements ``[first, last)`` of the buffers into parts, relative to ``first``."""
        if self.cuts:
            found = [(*cut, [each]) for cut, each in zip(self.cuts, self.packed, strict=True)]
        else:
            few, size = len(self.packed) == 2, _PIECE // self.packed[0].element_size()
            step = max(1, last - first if few else size)
            found = [(start, start + step, self.packed) for start in range(first, last, step)]
        clipped = [(max(first, a), min(last, b), terms) for a, b, terms in found]
        return [
            (a - first, b - first, [each[a:b] for each in terms])
            for a, b, terms in clipped
            if a < b
        ]


class Shares:
    """The share of one bucket that this rank sums, in place in shared memory.

    Args:
        flat: the bucket's buffer.
        memory: memory of each rank of the host, uint8 ``(nbytes,)``.
        rank: index of this rank in ``memory``.
        cut: start and end of its share.
        mine: see :class:`RankBuffers`; if given, this is the share. The last rank also has the
            trailer.
    """

    def __init__(
        self,
        flat: FlatBuffer,
        memory: Sequence[Tensor],
        rank: int,
        cut: tuple[int, int],
        mine: tuple[int, int] | None = None,
    ) -> None:
        packed = [each.view(flat.data.dtype) for each in memory]
        self._packed, end = packed[rank], len(packed[rank])
        parts = [(*cut, True)]
        if mine is not None:
            parts = [(*mine, False)]
            if rank == len(packed) - 1:
                parts.append((len(flat.payload), end, True))
        step = _PIECE // flat.data.element_size()
        # Terms; the term that becomes the sum; and its destinations on the other ranks.
        self._pieces: list[tuple[list[Tensor], Tensor, list[Tensor]]] = []
        for first, last, is_for_all in parts:
            for start in range(first, last, step):
                terms = [each[start : min(start + step, last)] for each in packed]
                others = [*terms[:rank], *terms[rank + 1 :]] if is_for_all else []
                self._pieces.append((terms, terms[rank], others))

    def begin(self, data: Tensor) -> None:
        """Copy the packed buffer ``data`` into this memory, unless it is already there.

        ``data`` is elsewhere if the user's ``share_memory()`` has moved gradients that are views of
        it.
        """
        if data.data_ptr() != self._packed.data_ptr():
            self._packed.copy_(data)

    def end(self, data: Tensor) -> None:
        """Copy the sum into ``data``, after all ranks have written their shares."""
        if data.data_ptr() != self._packed.data_ptr():
            data.copy_(self._packed)

    def sum(self, spreads: bool) -> None:
        """Add up the share, after all have packed. Must not be repeated.

        With ``spreads``, write it to the memory of the other ranks while it is in the cache.
        """
        for terms, target, others in self._pieces:
            add_in_order(terms, target)
            for other in others if spreads else ():
                other.copy_(target)

    def spread(self) -> None:
        """Write the complete share to the memory of the other ranks."""
        for _, target, others in self._pieces:
            for other in others:
                other.copy_(target)
