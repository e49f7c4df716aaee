"""The gradients and buffers of one bucket, the same for all contenders of a direction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import cycle

import torch
from torch import Tensor

from tritonddp.kernels.dispatch import select
from tritonddp.kernels.flat_buffer import FlatBuffer, Layout
from tritonddp.kernels.quantized import buffer
from tritonddp.kernels.quantized.buffer import QuantizedBuffer
from tritonddp.kernels.quantized.code import BLOCK

# Gradients are scaled by 1/3, which rounds in every dtype.
WORLD_SIZE = 3
# Number of ranks that exchange quantized gradients.
QUANTIZED_RANKS = 8
# Gradients are aligned like allocations of torch's CUDA allocator.
_BYTES_APART = 512


class Inputs:
    """Random gradients of one bucket, and buffers for them, some of which are created on first use.

    Attributes:
        block: the memory of the gradients.
        grads: row-major, in ``block``, with addresses like those of separate allocations.
        turns: the gradients, and copies of them at other addresses, in turns; more copies than
            tables are cached. On the CPU, where addresses do not matter, only the gradients.
        ours: the buffer of tritonddp's kernels, with their alignment.
        segments: slots ``[first, last)`` of ``ours`` that tritonddp flattens in one call, see
            ``tritonddp.buckets.bucket.Segment``.
        moved: the memory of ``ours`` with separate tables, for gradients in turns.
        plain: a buffer without gaps, as in stock DDP.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> None:
        kernels = select(device)
        strides = [torch.empty(shape, device="meta").stride() for shape in shapes]
        spread = Layout.of(shapes, strides, _BYTES_APART // dtype.itemsize)
        self.block = torch.randn(spread.numel, device=device).to(dtype)
        self.grads = _views(self.block, spread, spread.offsets)
        clones = [self.block.clone() for _ in range(4 if kernels.takes_pointers else 0)]
        self.turns = cycle([*(_views(each, spread, spread.offsets) for each in clones), self.grads])
        self.ours = FlatBuffer(Layout.of(shapes, strides, kernels.alignment), dtype, device)
        self.ours.flags.fill_(1)  # otherwise unflatten would not write the gradients
        self.segments = [
            (first, last, self.ours if last - first == len(shapes) else self.ours.part(first, last))
            for first, last in kernels.segments(self.ours.layout)
        ]
        self.moved = self.ours.part(0, len(shapes))
        self.plain = FlatBuffer(Layout.of(shapes, strides, 1), dtype, device)
        self.nbytes = self.plain.payload.nbytes  # of the gradients
        self._halves: dict[int, Tensor] = {}

    @cached_property
    def quantized(self) -> QuantizedBuffer:
        """The buffer of rank 0, with all gradients quantized and with error feedback."""
        layout, device = self.ours.layout, self.block.device
        message = buffer.MessageLayout(layout.numels, [True] * len(self.grads), QUANTIZED_RANKS)
        residuals = buffer.Residuals.zeros(message, 0, device)
        quantization = buffer.Quantization(message, 0, residuals)
        flat = QuantizedBuffer(quantization, layout, torch.float32, device)
        flat.incoming.numbers.random_(-127, 128)
        flat.incoming.scales.uniform_(0.5, 1)
        flat.incoming.trailers.fill_(1)  # otherwise the sums would say that no rank used a gradient
        flat.flags.fill_(1)
        return flat

    @cached_property
    def blocks(self) -> tuple[Tensor, list[Tensor]]:
        """All blocks of the message in fp32, ``(ranks, blocks, 256)``, and gradients in them."""
        message = self.quantized.message_layout
        shape = QUANTIZED_RANKS, message.part_blocks, BLOCK
        blocks = torch.zeros(shape, device=self.block.device)
        return blocks, _views(blocks, self.ours.layout, [BLOCK * each for each in message.places])

    def halves(self, nbytes: int) -> Tensor:
        """Return two rows of int32 that together have ``nbytes`` bytes, rounded up."""
        if nbytes not in self._halves:
            half = -(-nbytes // 2 // _BYTES_APART) * _BYTES_APART // 4
            self._halves[nbytes] = self.block.new_zeros((2, half), dtype=torch.int32)
        return self._halves[nbytes]


def _views(block: Tensor, layout: Layout, offsets: Sequence[int]) -> list[Tensor]:
    views = zip(layout.shapes, layout.strides, offsets, strict=True)
    return [block.as_strided(*view) for view in views]
