"""The kernels in plain torch: used on the CPU, and in tests as the reference for Triton kernels.

Names, signatures and resulting bits match ``flatten.py`` and ``unflatten.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import string_at
from operator import is_
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from tritonddp._modes import outside_modes
from tritonddp._torch import foreach_copy_, foreach_mul, foreach_mul_, foreach_zero_
from tritonddp.kernels.flat_buffer import FlatBuffer, Layout

# No gaps in the buffer: on the CPU alignment does not make gradients faster to copy.
ALIGNMENT = 1

# Gradients of fewer elements on average are copied together and then scaled together: a second
# pass over memory costs less than a call per gradient.
_SMALL = 8_192
# Elements that are flattened in one call: 4 MiB in fp32, a part of the last-level cache. Measured:
# smaller segments are no faster, since the overhead of Python cancels the gain; from 16 MiB on
# copies take twice as long.
_SEGMENT = 1_048_576
# Elements that are cast in one call: torch casts via a temporary tensor, which then stays in the
# cache. Measured: a tenth of the time of one call for 10 million elements. Fewer elements need more
# calls.
_CAST = 262_144


def compute_dtype(source: torch.dtype, wire: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients are scaled: fp32, or fp64 if either side is fp64."""
    return torch.float64 if torch.float64 in (source, wire) else torch.float32


def flatten(
    flat: FlatBuffer,
    grads: Sequence[Tensor | None],
    used: Sequence[bool],
    scale: float,
    headers: Sequence[int] = (),
) -> None:
    """Write ``cast(scale * grad)`` of every gradient, used flags and headers into ``flat``.

    Args:
        flat: the destination; gaps and padding of the trailer are not written.
        grads: one per slot, of one dtype, with the slot's shape and strides. ``None`` counts
            as zero. A gradient may be ``flat.views[i]`` itself: it is then scaled in place.
        used: one per slot; written to the trailer as 1 or 0, unless ``flat`` is a part of a buffer.
        scale: factor, applied in :func:`compute_dtype` before the cast to the wire dtype.
        headers: as many as in the layout, in 0..255; none for a part of a buffer.

    Raises:
        ValueError: the number of headers does not match the layout, or a header is not in 0..255.
    """
    wire = flat.data.dtype
    batched = flat.batched
    if batched is None:
        batched = flat.batched = _Batched(flat)
    if scale is not batched.scale and (scale != batched.scale or not scale):  # 0.0 equals -0.0
        batched.rescale(scale)
    if flat.is_part:
        if headers:
            flat.layout.encode_headers(headers)  # raises
    elif (
        flat.encoded is None
        or used != flat.encoded_flags
        or (headers or b"") != flat.encoded_headers
    ):
        flat.encode_trailer(used, headers)
    # Fast path of nearly all steps, without calls of other functions: Python would take longer than
    # the copy. For other gradients torch raises before it writes anything.
    if (
        batched.applies
        and grads
        and grads[0] is not None
        and grads[0].dtype is wire
        and (batched.line is not None or not any(map(is_, grads, flat.views)))
    ):
        sources: Any = grads if flat.is_part else [*grads, flat.encoded]
        try:
            if batched.line is None:
                foreach_copy_(batched.places, sources)
            else:
                torch.cat(sources, out=batched.line)
        except (RuntimeError, TypeError):
            pass
        else:
            if batched.line is not None and batched.line.numel() != batched.numel:
                flat.batched = None  # torch has resized it, with only a warning
                raise RuntimeError(
                    "the size of a gradient differs from the size in the buffer layout"
                )
            batched.payload.mul_(batched.factor)
            return
    source = wire
    for grad in grads:
        if grad is not None:
            source = grad.dtype
            break
    if source is not wire:
        _flatten_cast(flat, grads, scale)
    elif batched.is_small:
        batched.applies = _flatten_together(flat, grads)
    else:
        for view, grad in zip(flat.views, grads, strict=True):
            if grad is None:
                view.zero_()
            elif grad.shape == view.shape:
                # With two zero-dim operands, torch would promote the dtype.
                torch.mul(grad, batched.factor if grad.dim() else scale, out=view)
            else:  # torch would resize the view
                raise RuntimeError(
                    "the size of a gradient differs from the size in the buffer layout"
                )
    if not flat.is_part:
        flat.trailer.copy_(flat.encoded)  # type: ignore[arg-type]


def unflatten(
    flat: FlatBuffer, grads: Sequence[Tensor | None], factor: Tensor | None = None
) -> None:
    """Write ``cast(factor * payload)`` of the reduced ``flat`` into ``grads``.

    A gradient whose used flag is zero (no rank used the parameter) is not written, nor is a slot
    whose gradient is ``None``.

    Args:
        flat: the source; not changed, except for gradients that are views of it.
        grads: one per slot, of one dtype, with the slot's shape. A gradient may be
            ``flat.views[i]`` itself: it is then scaled in place.
        factor: one fp64 element on the buffer's device, rounded to :func:`compute_dtype` and
            applied in it before the cast to the gradients' dtype. ``None`` counts as 1, which
            changes no number, not even -0.0. A NaN stays a NaN, perhaps with other bits.

    Raises:
        TypeError: the factor is not one fp64 element on the buffer's device.
    """
    targets, sources = grads, flat.views
    # Compare bytes here, to save the call if the flags equal those of the last step.
    content, flags = flat.last_flags
    if string_at(flat.flags.data_ptr(), flat.flags_nbytes) != content:
        flags = flat.reduced_flags()
    if not all(flags) or NoneType in map(type, grads):
        flags = flags or [1] * len(grads)
        pairs = [
            (grad, view)
            for flag, grad, view in zip(flags, grads, flat.views, strict=True)
            if flag and grad is not None
        ]
        targets, sources = [grad for grad, _ in pairs], [view for _, view in pairs]
    if factor is not None:
        flat.check_factor(factor)
        _unflatten_scaled(targets, sources, factor.item())  # type: ignore[arg-type]
    elif targets:
        try:
            foreach_copy_(targets, sources)
        except RuntimeError:  # torch copies to lazily negated tensors only one by one
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)  # type: ignore[union-attr]


def segments(layout: Layout) -> list[tuple[int, int]]:
    """Divide a bucket into ranges of slots ``[first, last)`` that are flattened in one call each.

    On the CPU it is fastest to copy a gradient soon after it is ready, while it is in the cache.
    But each call costs about 10 us, so small gradients wait for each other.
    """
    cuts: list[tuple[int, int]] = []
    first, size = 0, 0
    for slot, numel in enumerate(layout.numels, start=1):
        size += numel
        if size >= _SEGMENT or slot == len(layout.numels):
            cuts.append((first, slot))
            first, size = slot, 0
    return cuts


def are_large(layout: Layout) -> bool:
    """Return True if gradients are so large that a call for each costs less than another copy."""
    return layout.mean_numel >= _SMALL


def _flatten_cast(flat: FlatBuffer, grads: Sequence[Tensor | None], scale: float) -> None:
    """Flatten gradients whose dtype differs from the wire dtype."""
    views: Sequence[Tensor] = flat.views
    present: Any = grads
    if NoneType in map(type, grads):
        foreach_zero_([view for view, g in zip(views, grads, strict=True) if g is None])
        pairs = [(view, g) for view, g in zip(views, grads, strict=True) if g is not None]
        views, present = [view for view, _ in pairs], [grad for _, grad in pairs]
    wire, source = flat.data.dtype, present[0].dtype
    compute = compute_dtype(source, wire)
    if compute is wire:
        foreach_copy_(views, present)
        foreach_mul_(views, scale)
    elif compute is not source:
        foreach_copy_(views, foreach_mul([grad.to(compute) for grad in present], scale))
    elif flat.layout.mean_numel < _SMALL:
        foreach_copy_(views, foreach_mul(present, scale))
    else:
        for view, grad in zip(views, present, strict=True):
            _scale_and_cast(view, grad, scale)


def _scale_and_cast(view: Tensor, grad: Tensor, scale: float) -> None:
    """Scale and cast a gradient whose dtype is the compute dtype."""
    if grad.shape != view.shape:  # torch would resize or broadcast
        raise RuntimeError("the size of a gradient differs from the size in the buffer layout")
    if grad.numel() <= _CAST or grad.stride() != view.stride():
        torch.mul(grad, scale, out=view)
        return
    flat_size = (grad.numel(),)
    sources, targets = grad.as_strided(flat_size, (1,)), view.as_strided(flat_size, (1,))
    for source, target in zip(sources.split(_CAST), targets.split(_CAST), strict=True):
        torch.mul(source, scale, out=target)


class _Batched:
    """State that all flattens of one buffer share; created at the first of them.

    Small gradients without gaps in the buffer are copied together, and then scaled together.
    """

    is_small: bool  # the gradients are small and without gaps: copied together unless cast
    applies: bool  # also, in the last call all gradients were present and none was a buffer view
    payload: Tensor  # the place of all gradients
    # If all gradients are vectors: the payload, and the trailer unless the buffer is a part. One
    # call that copies all vectors takes a third of the time of separate copies.
    line: Tensor | None = None
    numel: int  # size of line
    places: list[Tensor]  # the place of each gradient, and the trailer if there is one
    # A zero-dim tensor: torch multiplies by it in half the time of a number, with the same bits. It
    # has the dtype in which torch computes.
    factor: Tensor

    def __init__(self, flat: FlatBuffer) -> None:
        layout = flat.layout
        self.scale = math.nan
        self._dtype = compute_dtype(flat.data.dtype, flat.data.dtype)
        self.is_small = self.applies = layout.gapless is not None and layout.mean_numel < _SMALL
        if layout.gapless is None or not self.is_small:
            return
        first, end = layout.gapless
        self.payload = flat.data[first:end]
        self.places = flat.views if flat.is_part else [*flat.views, flat.trailer]
        if layout.vectors and (flat.is_part or layout.flags_offset == end):
            self.line = flat.data[first : end if flat.is_part else layout.trailer_end]
            self.numel = self.line.numel()

    def rescale(self, scale: float) -> None:
        """Create the factor for this scale."""
        self.scale = math.nan  # invalid if an interrupt occurs before the end
        # Via fp64, as torch does with a number, which may be too large for fp32.
        with outside_modes():
            self.factor = torch.tensor(scale, dtype=torch.float64, device="cpu").to(self._dtype)
        self.scale = scale


def _flatten_together(flat: FlatBuffer, grads: Sequence[Tensor | None]) -> bool:
    """Flatten as :class:`_Batched` describes. Return True if all gradients were copied together."""
    payload = flat.batched.payload
    targets, sources = flat.views, list(grads)
    missing, in_place = NoneType in map(type, grads), any(map(is_, grads, flat.views))
    if missing and in_place:
        foreach_zero_([view for view, g in zip(flat.views, grads, strict=True) if g is None])
    elif missing:
        payload.zero_()  # faster than a call for each missing gradient
    if missing or in_place:
        targets, sources = [], []
        for view, grad in zip(flat.views, grads, strict=True):
            if grad is not None and grad is not view:
                targets.append(view)
                sources.append(grad)
    if targets:
        foreach_copy_(targets, sources)
    payload.mul_(flat.batched.factor)
    return not (missing or in_place)


def _unflatten_scaled(grads: Sequence[Tensor], views: Sequence[Tensor], factor: float) -> None:
    """Unflatten with a factor, a Python number, because a tensor would affect type promotion."""
    for grad, view in zip(grads, views, strict=True):
        if grad.dtype is not view.dtype:
            compute = compute_dtype(grad.dtype, view.dtype)
            if compute is grad.dtype:
                grad.copy_(view).mul_(factor)
            else:
                grad.copy_(torch.mul(view.to(compute), factor))
        elif grad.shape == view.shape:
            torch.mul(view, factor, out=grad)
        else:  # torch would resize the gradient
            raise RuntimeError("the size of a gradient differs from the size in the buffer layout")
