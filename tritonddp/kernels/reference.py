"""The kernels in plain torch: the CPU path, and the oracle of the Triton kernels.

Same names, same signatures and the same bits as ``flatten.py`` and ``unflatten.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonddp._compat import foreach_copy_
from tritonddp.kernels.buffer import FlatBuffer, Layout

# No gaps in the buffer: on the CPU nothing is gained by aligned gradients.
ALIGNMENT = 1

# A gradient of more elements than this is scaled on the way, in one pass over memory. Smaller
# ones are cheaper to copy together and to scale while they are still in the cache (1 MiB in fp32).
_SMALL = 16_384
_RUN = 262_144


def compute_dtype(source: torch.dtype, wire: torch.dtype) -> torch.dtype:
    """The dtype in which gradients are scaled: fp32, or fp64 if either side is fp64."""
    return torch.float64 if torch.float64 in (source, wire) else torch.float32


def flatten(
    flat: FlatBuffer,
    grads: Sequence[Tensor | None],
    used: Sequence[bool],
    scale: float,
) -> None:
    """Write ``cast(scale * grad)`` of every gradient, and the used flags, into ``flat``.

    Args:
        flat: the destination; gaps and everything behind the flags stay as they are.
        grads: one per slot, of one dtype, with the slot's shape and strides. ``None`` counts
            as zero. A gradient may be ``flat.views[i]`` itself: it is then scaled in place.
        used: one per slot; written to the trailer as 1 or 0.
        scale: factor, applied in :func:`compute_dtype` before the cast to the wire dtype.
    """
    wire = flat.data.dtype
    source = next((grad.dtype for grad in grads if grad is not None), wire)
    if source is wire:
        if flat.tables is None:
            flat.tables = _runs(flat.layout)
        for first, last in flat.tables:
            _flatten_run(flat, grads, first, last, scale)
    else:
        compute = compute_dtype(source, wire)
        for view, grad in zip(flat.views, grads, strict=True):
            if grad is None:
                view.zero_()
            else:
                view.copy_(torch.mul(grad.to(compute), scale))
    if all(used):
        flat.flags.fill_(1)
    else:
        flat.flags.copy_(torch.tensor(used))


def unflatten(flat: FlatBuffer, grads: Sequence[Tensor | None]) -> None:
    """Copy the reduced payload of ``flat`` into ``grads``, cast to their dtype.

    A gradient whose used flag is zero (no rank used the parameter) is left untouched, and so
    is a slot whose gradient is ``None``.
    """
    targets, sources = [], []
    for flag, grad, view in zip(flat.flags.tolist(), grads, flat.views, strict=True):
        if flag and grad is not None:
            targets.append(grad)
            sources.append(view)
    if targets:
        foreach_copy_(targets, sources)


def _runs(layout: Layout) -> list[tuple[int, int]]:
    """Cut the slots into runs ``[first, last)``: large gradients alone, small ones together.

    The slots of a run touch each other in the buffer, so that one multiplication scales all.
    """
    runs: list[tuple[int, int]] = []
    first, size = 0, 0
    for slot, numel in enumerate(layout.numels):
        joins = (
            slot > first
            and numel <= _SMALL
            and layout.numels[slot - 1] <= _SMALL
            and size + numel <= _RUN
            and layout.offsets[slot - 1] + layout.numels[slot - 1] == layout.offsets[slot]
        )
        if slot > first and not joins:
            runs.append((first, slot))
            first, size = slot, 0
        size += numel
    if layout.numels:
        runs.append((first, len(layout.numels)))
    return runs


def _flatten_run(
    flat: FlatBuffer, grads: Sequence[Tensor | None], first: int, last: int, scale: float
) -> None:
    """Flatten slots ``[first, last)``, whose gradients have the wire dtype already."""
    if last - first == 1:
        view, grad = flat.views[first], grads[first]
        if grad is None:
            view.zero_()
        else:
            torch.mul(grad, scale, out=view)
        return
    targets, sources = [], []
    for view, grad in zip(flat.views[first:last], grads[first:last], strict=True):
        if grad is None:
            view.zero_()
        elif grad is not view:
            targets.append(view)
            sources.append(grad)
    if targets:
        foreach_copy_(targets, sources)
    layout = flat.layout
    end = layout.offsets[last - 1] + layout.numels[last - 1]
    flat.data[layout.offsets[first] : end].mul_(scale)
