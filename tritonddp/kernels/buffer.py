"""One flat buffer that carries all gradients of a bucket, and the trailer behind them.

::

    | grad 0 | grad 1 .. | pad | .. | grad n-1 | pad | flag 0 .. flag n-1 | pad |
    |<------------ payload ---------------->|    |<-------- trailer --------->|

Offsets and sizes are in elements of the buffer's dtype, the *wire* dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

# What gradients may be, and what may be on the wire, in any combination.
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Layout:
    """Where each gradient lies in the flat buffer, and where the trailer begins.

    Attributes:
        shapes: logical shape of each gradient.
        strides: strides of each gradient in elements; always dense, so a gradient fills
            ``prod(shape)`` consecutive elements of the buffer in *memory* order.
        numels: number of elements of each gradient (0 allowed).
        offsets: first element of each gradient, multiples of ``alignment``.
        flags_offset: first element of the trailer; flag ``i`` is element ``flags_offset + i``.
        numel: length of the whole buffer, trailer included.
    """

    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    flags_offset: int
    numel: int

    @classmethod
    def of(
        cls,
        shapes: Sequence[Sequence[int]],
        strides: Sequence[Sequence[int]],
        alignment: int,
    ) -> Layout:
        """Lay gradients of these shapes and dense strides out one behind the other.

        ``alignment`` is in elements: 16 lets the Triton kernels use 16-byte accesses for every
        wire dtype of one byte and more, 1 leaves no gaps.
        """
        numels, offsets, end = [], [], 0
        for shape in shapes:
            numels.append(prod(shape))
            offsets.append(end)
            end = _round_up(end + numels[-1], alignment)
        return cls(
            shapes=tuple(map(tuple, shapes)),
            strides=tuple(map(tuple, strides)),
            numels=tuple(numels),
            offsets=tuple(offsets),
            flags_offset=end,
            numel=_round_up(end + len(numels), alignment),
        )

    def part(self, first: int, last: int) -> Layout:
        """The layout of slots ``[first, last)`` alone, at the same places of the same buffer."""
        return Layout(
            shapes=self.shapes[first:last],
            strides=self.strides[first:last],
            numels=self.numels[first:last],
            offsets=self.offsets[first:last],
            flags_offset=self.flags_offset + first,
            numel=self.numel,
        )

    @cached_property
    def gapless(self) -> tuple[int, int] | None:
        """First element and end of the gradients, if nothing lies between them."""
        if not self.numels:
            return 0, 0
        first, end = self.offsets[0], self.offsets[-1] + self.numels[-1]
        return (first, end) if sum(self.numels) == end - first else None

    @cached_property
    def mean_numel(self) -> float:
        """Average number of elements of a gradient."""
        return sum(self.numels) / max(1, len(self.numels))

    @cached_property
    def vectors(self) -> bool:
        """Whether all gradients are one-dimensional."""
        return all(len(shape) == 1 for shape in self.shapes)


class FlatBuffer:
    """The storage of one bucket: ``data`` is what the collective sends.

    Attributes:
        layout: see :class:`Layout`.
        data: 1-D tensor of the wire dtype, ``layout.numel`` long. Gaps between gradients hold
            zeros and are never written, so that a sum over ranks keeps them zero.
        payload: view of ``data`` without the trailer.
        flags: view of the used flags, one element per gradient: 1 or 0 before the collective,
            afterwards the number of ranks that used the parameter (any non-zero value: the
            sum of many ones saturates in fp16 and bf16, but never becomes zero).
        views: one tensor per gradient in its place, with the gradient's own shape and strides.
        is_part: made by :meth:`part`; its flags are written with those of the whole.
        tables: device-side tables of the Triton kernels, made by them at their first launch.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.data = torch.zeros(layout.numel, dtype=dtype, device=device)
        self.payload = self.data[: layout.flags_offset]
        self.flags = self.data[layout.flags_offset : layout.flags_offset + len(layout.numels)]
        self.views: list[Tensor] = list(map(self.tensor_at, range(len(layout.numels))))
        self.is_part = False
        self.tables: Any = None

    def tensor_at(self, slot: int) -> Tensor:
        """A new tensor in the place of gradient ``slot``, with a version counter of its own.

        (Views in autograd's sense share one: a write to any of them would look like one to all.)
        """
        layout = self.layout
        return torch.empty(0, dtype=self.data.dtype, device=self.data.device).set_(
            self.data.untyped_storage(),
            layout.offsets[slot],
            layout.shapes[slot],
            layout.strides[slot],
        )

    def part(self, first: int, last: int) -> FlatBuffer:
        """Slots ``[first, last)`` as a flat buffer of their own, in the same storage."""
        part = copy.copy(self)
        part.layout = self.layout.part(first, last)
        part.flags = self.flags[first:last]
        part.views = self.views[first:last]
        part.is_part = True
        part.tables = None
        return part

    def write_flags(self, used: Sequence[bool]) -> None:
        """Write the used flags, one a gradient: on the CPU, where it is done once a buffer."""
        if all(used):
            self.flags.fill_(1)
        else:
            self.flags.copy_(torch.tensor(used))
