"""Ways to bring the gradients of a bucket into one buffer, and back: ours, stock's, torch's.

Each is a function of one :class:`Inputs`, so that it can be checked, timed and counted alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from benchmarks.kernels import timing
from tritonddp._torch import foreach_copy_
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
        segments: slots ``[first, last)`` of ``ours`` that tritonddp flattens at once, see
            ``tritonddp.buckets.bucket.Segment``.
        moved: the memory of ``ours`` with tables of its own, for gradients that take turns.
    """

    grads: list[Tensor]
    turns: Iterator[list[Tensor]]
    ours: FlatBuffer  # the buffer of tritonddp's kernels, with their alignment
    segments: list[tuple[int, int, FlatBuffer]]
    moved: FlatBuffer
    plain: FlatBuffer  # a buffer without gaps, as stock DDP has it
    block: Tensor  # the memory of the gradients, at least as many elements as plain.payload

    @classmethod
    def make(
        cls, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> Inputs:
        """Random gradients of these shapes, and buffers for them."""
        kernels = select(device)
        strides = [torch.empty(shape, device="meta").stride() for shape in shapes]
        spread = Layout.of(shapes, strides, _BYTES_APART // dtype.itemsize)
        block = torch.randn(spread.numel, device=device).to(dtype)
        grads = _views(block, spread)
        others = [_views(block.clone(), spread) for _ in range(4 if kernels.takes_pointers else 0)]
        ours = FlatBuffer(Layout.of(shapes, strides, kernels.alignment), dtype, device)
        ours.flags.fill_(1)  # or unflatten would leave the gradients as they are
        segments = [
            (first, last, ours if last - first == len(shapes) else ours.part(first, last))
            for first, last in kernels.segments(ours.layout)
        ]
        plain = FlatBuffer(Layout.of(shapes, strides, 1), dtype, device)
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
class Contender(timing.Contender):
    """One way to flatten, or to unflatten.

    Attributes:
        ours: works on ``Inputs.ours``, else on ``Inputs.plain``, and every bit has to be right.
    """

    ours: bool = False
    by_address: bool = False  # only where kernels read gradients by address

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


def _copy_out(inputs: Inputs) -> None:
    inputs.block[: inputs.plain.payload.numel()].copy_(inputs.plain.payload)


def _ours_flatten_moved(inputs: Inputs) -> None:
    grads = next(inputs.turns)
    used = [True] * len(grads)
    select(inputs.ours.data.device).flatten(inputs.moved, grads, used, 1 / WORLD_SIZE)


def _mul_each(inputs: Inputs) -> None:
    for view, grad in zip(inputs.plain.views, inputs.grads, strict=True):
        torch.mul(grad, 1 / WORLD_SIZE, out=view)


def _sm_copy_in(inputs: Inputs) -> None:
    from benchmarks.kernels.copying import (
        copy,  # Triton's, which a machine without a GPU need not have
    )

    copy(inputs.plain.payload, inputs.block[: inputs.plain.payload.numel()])


def _copy_each(inputs: Inputs) -> None:
    for view, grad in zip(inputs.plain.views, inputs.grads, strict=True):
        grad.copy_(view)


def _sm_copy_out(inputs: Inputs) -> None:
    from benchmarks.kernels.copying import copy

    copy(inputs.block[: inputs.plain.payload.numel()], inputs.plain.payload)


OURS = "tritonddp"
MOVED = "tritonddp, moved"  # gradients are at other addresses each time: the table is uploaded
CEILING, SM_COPY = "device copy", "SM copy"

DIRECTIONS: dict[str, tuple[Contender, ...]] = {
    "flatten": (
        Contender(OURS, _ours_flatten, ours=True),
        Contender("_foreach_copy_ + div_", _foreach_and_div),  # stock's batched_grad_copy
        Contender(CEILING, _copy_in),
        Contender(MOVED, _ours_flatten_moved, ours=True, by_address=True),
        Contender("mul_out each", _mul_each),  # stock's default
        Contender(SM_COPY, _sm_copy_in, by_address=True),
    ),
    "unflatten": (
        Contender(OURS, _ours_unflatten, ours=True),
        Contender("_foreach_copy_", _foreach),
        Contender(CEILING, _copy_out),
        Contender("copy_ each", _copy_each),  # stock's default
        Contender(SM_COPY, _sm_copy_out, by_address=True),
    ),
}


def contenders(direction: str, device: torch.device) -> list[Contender]:
    """Those that this device can play."""
    by_address = select(device).takes_pointers
    return [each for each in DIRECTIONS[direction] if by_address or not each.by_address]


def check(direction: str, contender: Contender, inputs: Inputs) -> None:
    """Let a contender move gradients once, onto NaN, and compare all elements.

    tritonddp must have the bits of a multiplication in fp32, others come close to it. (A copy of
    the whole block has no gradients to find: its bytes are compared.)

    Raises:
        RuntimeError: a result is wrong.
    """
    if contender.name in (CEILING, SM_COPY):
        _check_copy(direction, contender, inputs)
        return
    buffer = contender.buffer(inputs)
    if direction == "flatten":
        expected = (_joined(inputs.grads).float() * (1 / WORLD_SIZE)).to(buffer.data.dtype)
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


def _check_copy(direction: str, contender: Contender, inputs: Inputs) -> None:
    payload = inputs.plain.payload
    sides = inputs.block[: payload.numel()], payload
    source, target = sides if direction == "flatten" else reversed(sides)
    target.fill_(torch.nan)
    contender.run(inputs)
    copied = max(0, payload.nbytes - 63) // payload.element_size()
    if not torch.equal(source[:copied].to(target.dtype), target[:copied]):
        raise RuntimeError(f"{direction} by {contender.name!r} copies something else")
