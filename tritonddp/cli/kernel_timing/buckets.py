"""Gradients of a bucket into one buffer, and back: by our kernels, by torch, as a plain copy.

Each way is a function of one :class:`Inputs`, so that it can be checked and timed alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from tritonddp._torch import foreach_copy_
from tritonddp.cli.kernel_timing import device_timing
from tritonddp.kernels.dispatch import select
from tritonddp.kernels.flat_buffer import FlatBuffer, Layout

# Gradients are scaled by 1/3, which rounds in every dtype.
WORLD_SIZE = 3
# Gradients begin where torch's CUDA allocator lets allocations begin.
_BYTES_APART = 512


@dataclass(frozen=True)
class Inputs:
    """Gradients and buffers of one bucket.

    Attributes:
        grads: row-major, in one block of memory but each at an address as from the allocator.
        turns: the gradients, and the same values at other addresses, by turns, of which there are
            more than tables are kept; on the CPU, where addresses do not matter, just the
            gradients.
        ours: the buffer of tritonddp's kernels, with their alignment.
        segments: slots ``[first, last)`` of ``ours`` that tritonddp flattens at once, see
            ``tritonddp.buckets.bucket.Segment``.
        moved: the memory of ``ours`` with tables of its own, for gradients that take turns.
        plain: a buffer without gaps, as stock DDP has it.
        block: the memory of the gradients, at least as many elements as ``plain.payload``.
    """

    grads: list[Tensor]
    turns: Iterator[list[Tensor]]
    ours: FlatBuffer
    segments: list[tuple[int, int, FlatBuffer]]
    moved: FlatBuffer
    plain: FlatBuffer
    block: Tensor

    @classmethod
    def make(
        cls,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        wire: torch.dtype,
        device: torch.device,
    ) -> Inputs:
        """Random gradients of these shapes and ``dtype``, and buffers of the ``wire`` dtype."""
        kernels = select(device)
        strides = [torch.empty(shape, device="meta").stride() for shape in shapes]
        spread = Layout.of(shapes, strides, _BYTES_APART // dtype.itemsize)
        block = torch.randn(spread.numel, device=device).to(dtype)
        grads = _views(block, spread)
        others = [_views(block.clone(), spread) for _ in range(4 if kernels.by_address else 0)]
        ours = FlatBuffer(Layout.of(shapes, strides, kernels.alignment), wire, device)
        ours.flags.fill_(1)  # or unflatten would leave the gradients as they are
        segments = [
            (first, last, ours if last - first == len(shapes) else ours.part(first, last))
            for first, last in kernels.segments(ours.layout)
        ]
        plain = FlatBuffer(Layout.of(shapes, strides, 1), wire, device)
        moved = ours.part(0, len(shapes))
        return cls(grads, cycle([*others, grads]), ours, segments, moved, plain, block)

    @property
    def nbytes(self) -> int:
        """The least number of bytes that must be read and written to move the gradients."""
        sizes = self.block.element_size() + self.plain.data.element_size()
        return sum(self.plain.layout.numels) * sizes


def _views(block: Tensor, layout: Layout) -> list[Tensor]:
    views = zip(layout.shapes, layout.strides, layout.offsets, strict=True)
    return [block.as_strided(*view) for view in views]


@dataclass(frozen=True)
class Contender(device_timing.Contender):
    """One way to flatten, or to unflatten.

    Attributes:
        ours: works on ``Inputs.ours``, else on ``Inputs.plain``, and every bit has to be right.
        scales: divides by the world size. One that does not has less to do.
        casts: copes with gradients of another dtype than the wire's.
        by_address: only where kernels read gradients by address.
    """

    ours: bool = False
    scales: bool = True
    casts: bool = True
    by_address: bool = False

    def buffer(self, inputs: Inputs) -> FlatBuffer:
        """The buffer that it works on."""
        return inputs.ours if self.ours else inputs.plain


def _ours_flatten(inputs: Inputs) -> None:
    flatten = select(inputs.ours.data.device).flatten
    for first, last, part in inputs.segments:
        flatten(part, inputs.grads[first:last], [True] * (last - first), 1 / WORLD_SIZE)
    if len(inputs.segments) > 1:  # as tritonddp.buckets.bucket.Bucket.seal does
        inputs.ours.write_trailer([True] * len(inputs.grads), ())


def _foreach_and_div(inputs: Inputs) -> None:
    foreach_copy_(inputs.plain.views, inputs.grads)
    inputs.plain.payload.div_(WORLD_SIZE)


def _copy_in(inputs: Inputs) -> None:
    inputs.plain.payload.copy_(inputs.block[: inputs.plain.payload.numel()])


def _ours_unflatten(inputs: Inputs) -> None:
    select(inputs.ours.data.device).unflatten(inputs.ours, inputs.grads)


def _foreach(inputs: Inputs) -> None:
    foreach_copy_(inputs.grads, inputs.plain.views)


def copy_out(inputs: Inputs) -> None:
    inputs.block[: inputs.plain.payload.numel()].copy_(inputs.plain.payload)


OURS = "tritonddp"
CEILING = "device copy"
FOREACH_DIV = "_foreach_copy_ + div_"

# Ours, then how stock DDP or torch would do it at their best, then the copy.
DIRECTIONS: dict[str, tuple[Contender, Contender, Contender]] = {
    "flatten": (
        Contender(OURS, _ours_flatten, ours=True),
        Contender(FOREACH_DIV, _foreach_and_div),  # stock's batched_grad_copy
        Contender(CEILING, _copy_in),
    ),
    "unflatten": (
        Contender(OURS, _ours_unflatten, ours=True),
        Contender("_foreach_copy_", _foreach),
        Contender(CEILING, copy_out),
    ),
}


def check(direction: str, contender: Contender, inputs: Inputs) -> None:
    """Let a contender move gradients once, onto NaN, and compare all elements.

    tritonddp must have the bits of a multiplication in fp32, others come close to it. (The
    copy has no gradients to find, only bytes: it is let through.)

    Raises:
        RuntimeError: a result is wrong.
    """
    if contender.name == CEILING:
        return
    buffer = contender.buffer(inputs)
    if direction == "flatten":
        scale = 1 / WORLD_SIZE if contender.scales else 1.0
        expected = (_joined(inputs.grads).float() * scale).to(buffer.data.dtype)
        buffer.data.fill_(torch.nan)
        contender.run(inputs)
        found = _joined(buffer.views)
        if contender.ours and not bool((buffer.flags == 1).all()):
            raise RuntimeError(f"flatten by {contender.name!r} left flags of used parameters unset")
    else:
        for view in buffer.views:
            view.normal_()
        expected = _joined(buffer.views).to(inputs.block.dtype)
        inputs.block.fill_(torch.nan)
        contender.run(inputs)
        found = _joined(inputs.grads)
    # One rounding more than ours in the wire's dtype, twice that to be safe.
    rounds = direction == "flatten" and not contender.ours
    tolerance = 4 * torch.finfo(buffer.data.dtype).eps if rounds else 0.0
    error = (found.float() - expected.float()).abs()
    wrong = int((~(error <= tolerance * expected.float().abs())).sum())  # NaN is wrong, too
    if wrong:
        raise RuntimeError(
            f"{direction} by {contender.name!r} of {len(inputs.grads)} gradients: {wrong} of "
            f"{expected.numel()} elements are wrong"
        )


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
