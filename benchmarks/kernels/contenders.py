"""Ways to bring the gradients of a bucket into one buffer, and back: ours, stock's, torch's.

Each is a function of one :class:`Inputs`, so that it can be checked, timed and counted alike.
"""

from __future__ import annotations

import torch

from tritonddp.cli.kernel_timing import buckets
from tritonddp.cli.kernel_timing.buckets import (
    CEILING,
    FOREACH_DIV,
    OURS,
    WORLD_SIZE,
    Contender,
    Inputs,
)
from tritonddp.kernels.dispatch import select

__all__ = ["CEILING", "DIRECTIONS", "FOREACH_DIV", "OURS", "SM_COPY", "Contender"]
__all__ += ["Inputs", "check", "contenders"]


def _ours_flatten_moved(inputs: Inputs) -> None:
    grads = next(inputs.turns)
    used = [True] * len(grads)
    select(inputs.ours.data.device).flatten(inputs.moved, grads, used, 1 / WORLD_SIZE)


def _mul_each(inputs: Inputs) -> None:
    for view, grad in zip(inputs.plain.views, inputs.grads, strict=True):
        torch.mul(grad, 1 / WORLD_SIZE, out=view)


def _cat(inputs: Inputs) -> None:
    torch.cat([grad.view(-1) for grad in inputs.grads], out=inputs.plain.payload)


def _chunk_cat(inputs: Inputs) -> None:
    # FSDP2's way into a reduce-scatter, for a world of one. Private; since torch 2.2.
    torch._chunk_cat(inputs.grads, 0, 1, out=inputs.plain.payload.view(1, -1))


def _sm_copy_in(inputs: Inputs) -> None:
    from benchmarks.kernels.copying import (
        copy,  # Triton's, which a machine without a GPU need not have
    )

    copy(inputs.plain.payload, inputs.block[: inputs.plain.payload.numel()])


def _copy_each(inputs: Inputs) -> None:
    for view, grad in zip(inputs.plain.views, inputs.grads, strict=True):
        grad.copy_(view)


def _split_copy(inputs: Inputs) -> None:
    # FSDP2's way out of an all-gather: the inverse of cat and _chunk_cat.
    torch.split_with_sizes_copy(
        inputs.plain.payload,
        inputs.plain.layout.numels,
        out=[grad.view(-1) for grad in inputs.grads],
    )


def _sm_copy_out(inputs: Inputs) -> None:
    from benchmarks.kernels.copying import copy

    copy(inputs.block[: inputs.plain.payload.numel()], inputs.plain.payload)


MOVED = "tritonddp, moved"  # gradients are at other addresses each time: the table is uploaded
SM_COPY = "SM copy"

# Beside those of buckets.DIRECTIONS.
_OTHERS: dict[str, tuple[Contender, ...]] = {
    "flatten": (
        Contender(MOVED, _ours_flatten_moved, ours=True, by_address=True),
        Contender("mul_out each", _mul_each),  # stock's default
        Contender("cat, unscaled", _cat, scales=False),
        Contender("_chunk_cat, unscaled", _chunk_cat, scales=False),
        Contender(SM_COPY, _sm_copy_in, casts=False, by_address=True),
    ),
    "unflatten": (
        Contender("copy_ each", _copy_each),  # stock's default
        Contender("split_with_sizes_copy", _split_copy, casts=False),
        Contender(SM_COPY, _sm_copy_out, casts=False, by_address=True),
    ),
}
DIRECTIONS = {name: (*each, *_OTHERS[name]) for name, each in buckets.DIRECTIONS.items()}


def contenders(direction: str, casting: bool, device: torch.device) -> list[Contender]:
    """Those that can do it, gradients of another dtype than the wire's (``casting``) or not."""
    by_address = select(device).by_address
    return [
        each
        for each in DIRECTIONS[direction]
        if (each.casts or not casting) and (by_address or not each.by_address)
    ]


def check(direction: str, contender: Contender, inputs: Inputs) -> None:
    """As that of ``buckets``, also of a kernel that copies."""
    if contender.name == SM_COPY:
        _check_copy(direction, contender, inputs)
    else:
        buckets.check(direction, contender, inputs)


def _check_copy(direction: str, contender: Contender, inputs: Inputs) -> None:
    payload = inputs.plain.payload
    sides = inputs.block[: payload.numel()], payload
    source, target = sides if direction == "flatten" else reversed(sides)
    target.fill_(torch.nan)
    contender.run(inputs)
    copied = max(0, payload.nbytes - 63) // payload.element_size()
    if not torch.equal(source[:copied], target[:copied]):
        raise RuntimeError(f"{direction} by {contender.name!r} copies something else")
