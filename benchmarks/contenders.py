"""Ways to bring the gradients of a bucket into one buffer, and back: ours, stock's, torch's.

Each is a function of one :class:`Inputs`, so that it can be checked, timed and counted alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonddp.kernels import select
from tritonddp.kernels.buffer import FlatBuffer, Layout

WORLD_SIZE = 3  # gradients are scaled by 1/3, which rounds in every dtype
# Gradients begin where torch's CUDA allocator lets allocations begin.
_BYTES_APART = 512


@dataclass(frozen=True)
class Inputs:
    """Gradients and buffers of one bucket.

    Attributes:
        grads: row-major, in one block of memory but each at an address as from the allocator.
        ours: the buffer of tritonddp's kernels, with their alignment.
        plain: a buffer without gaps, as stock DDP has it.
        block: the memory of the gradients, at least ``plain.payload`` long.
    """

    grads: list[Tensor]
    ours: FlatBuffer
    plain: FlatBuffer
    block: Tensor

    @classmethod
    def make(
        cls, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> Inputs:
        """Random gradients of these shapes."""
        strides = [torch.empty(shape, device="meta").stride() for shape in shapes]
        spread = Layout.of(shapes, strides, _BYTES_APART // dtype.itemsize)
        block = torch.randn(spread.numel, device=device).to(dtype)
        grads = [
            block.as_strided(*slot)
            for slot in zip(spread.shapes, spread.strides, spread.offsets, strict=True)
        ]
        ours = FlatBuffer(Layout.of(shapes, strides, select(device).alignment), dtype, device)
        ours.flags.fill_(1)  # or unflatten would leave the gradients as they are
        return cls(grads, ours, FlatBuffer(Layout.of(shapes, strides, 1), dtype, device), block)

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients; whoever moves them reads and writes at least as many."""
        return self.plain.payload.numel() * self.plain.payload.element_size()


Contender = Callable[[Inputs], None]


def _ours_flatten(inputs: Inputs) -> None:
    flat = inputs.ours
    used = [True] * len(inputs.grads)
    select(flat.data.device).flatten(flat, inputs.grads, used, 1 / WORLD_SIZE)


def _mul_each(inputs: Inputs) -> None:
    for view, grad in zip(inputs.plain.views, inputs.grads, strict=True):
        torch.mul(grad, 1 / WORLD_SIZE, out=view)


def _foreach_and_div(inputs: Inputs) -> None:
    torch._foreach_copy_(inputs.plain.views, inputs.grads)
    inputs.plain.payload.div_(WORLD_SIZE)


def _cat(inputs: Inputs) -> None:
    torch.cat([grad.view(-1) for grad in inputs.grads], out=inputs.plain.payload)


def _copy_in(inputs: Inputs) -> None:
    inputs.plain.payload.copy_(inputs.block[: inputs.plain.payload.numel()])


def _ours_unflatten(inputs: Inputs) -> None:
    select(inputs.ours.data.device).unflatten(inputs.ours, inputs.grads)


def _copy_each(inputs: Inputs) -> None:
    for view, grad in zip(inputs.plain.views, inputs.grads, strict=True):
        grad.copy_(view)


def _foreach(inputs: Inputs) -> None:
    torch._foreach_copy_(inputs.grads, inputs.plain.views)


def _copy_out(inputs: Inputs) -> None:
    inputs.block[: inputs.plain.payload.numel()].copy_(inputs.plain.payload)


OURS = "tritonddp"
CEILING = "device copy"

FLATTEN: dict[str, Contender] = {
    OURS: _ours_flatten,
    "mul_out each": _mul_each,  # stock's default
    "_foreach_copy_ + div_": _foreach_and_div,  # stock's batched_grad_copy
    "cat, unscaled": _cat,
    CEILING: _copy_in,
}
UNFLATTEN: dict[str, Contender] = {
    OURS: _ours_unflatten,
    "copy_ each": _copy_each,  # stock's default
    "_foreach_copy_": _foreach,
    CEILING: _copy_out,
}
DIRECTIONS = {"flatten": FLATTEN, "unflatten": UNFLATTEN}


def check(inputs: Inputs) -> None:
    """Let every contender move gradients once, from poisoned targets, and look at all of them.

    Raises:
        RuntimeError: a result is wrong. tritonddp must have the bits of an fp32 multiplication.
    """
    original = [grad.clone() for grad in inputs.grads]
    tolerance = 4 * torch.finfo(inputs.block.dtype).eps
    for name, contender in FLATTEN.items():
        if name == CEILING:
            continue
        buffer = inputs.ours if name == OURS else inputs.plain
        buffer.payload.fill_(torch.nan)
        contender(inputs)
        scale = 1.0 if contender is _cat else 1 / WORLD_SIZE
        for slot, (view, grad) in enumerate(zip(buffer.views, original, strict=True)):
            expected = (grad.float() * scale).to(grad.dtype)
            good = (
                torch.equal(view, expected)
                if name == OURS
                else torch.allclose(view, expected, rtol=tolerance, atol=0)
            )
            if not good:
                raise RuntimeError(f"flatten by {name!r} is wrong in slot {slot} {grad.shape}")
    for name, contender in UNFLATTEN.items():
        if name == CEILING:
            continue
        buffer = inputs.ours if name == OURS else inputs.plain
        for grad, view in zip(original, buffer.views, strict=True):
            view.copy_(grad)
        inputs.block.fill_(torch.nan)
        contender(inputs)
        for slot, (grad, expected) in enumerate(zip(inputs.grads, original, strict=True)):
            if not torch.equal(grad, expected):
                raise RuntimeError(f"unflatten by {name!r} is wrong in slot {slot} {grad.shape}")
    inputs.block.copy_(torch.randn(inputs.block.shape, device=inputs.block.device))
