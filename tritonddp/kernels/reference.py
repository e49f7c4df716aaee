"""The kernels in plain torch: the CPU path, and the oracle of the Triton kernels.

Same names, same signatures and the same bits as ``flatten.py`` and ``unflatten.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import is_
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from tritonddp._torch import (
    foreach_copy_,
    foreach_mul,
    foreach_mul_,
    foreach_norm,
    foreach_zero_,
)
from tritonddp.kernels.flat_buffer import FlatBuffer, Layout
from tritonddp.kernels.memory_order import dims_by_stride

# No gaps in the buffer: on the CPU nothing is gained by aligned gradients.
ALIGNMENT = 1

# Gradients of fewer elements on average are copied together and then scaled together: a second
# pass over memory costs less than a call per gradient.
_SMALL = 8_192
# Elements that are flattened at once: 4 MiB in fp32, a share of the last-level cache. Measured:
# smaller ones save on copies what their Python costs; from 16 MiB on copies take twice as long.
_SEGMENT = 1_048_576
# Elements that are cast at once: torch casts by way of a temporary, which so stays in the cache.
# Measured: a tenth of the time of one call for 10 million elements; smaller ones cost more calls.
_CAST = 262_144
# Elements whose squares are added up by one thread, however many there are: the order, and with it
# the bits, are the same on all ranks. (torch splits a sum of 32,768 and more among its threads.)
_ROW = 4_096


def compute_dtype(source: torch.dtype, wire: torch.dtype) -> torch.dtype:
    """The dtype in which gradients are scaled: fp32, or fp64 if either side is fp64."""
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
        flat: the destination; gaps and what pads the trailer stay as they are.
        grads: one per slot, of one dtype, with the slot's shape and strides. ``None`` counts
            as zero. A gradient may be ``flat.views[i]`` itself: it is then scaled in place.
        used: one per slot; written to the trailer as 1 or 0, unless ``flat`` is a part of a buffer.
        scale: factor, applied in :func:`compute_dtype` before the cast to the wire dtype.
        headers: as many as the layout has, in 0..255; none for a part of a buffer.

    Where the layout has marks, they say which of the numbers that are written are not finite. Where
    there are ``flat.squares``, they are those of the gradients: here, if these are not cast, by way
    of what is written, as near as that was rounded, and NaN with a ``scale`` of zero.

    Raises:
        ValueError: the headers are not as many as the layout's, or not in 0..255.
    """
    wire = flat.data.dtype
    batched = flat.batched
    if batched is None:
        batched = flat.batched = _Batched(flat)
    if scale != batched.scale or not scale:  # 0.0 equals -0.0
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
    # What nearly all steps are like, without a call of another function: Python would take longer
    # than the copy. Other gradients are refused by torch before it writes anything.
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
                flat.batched = None  # torch has made room with no more than a warning
                raise RuntimeError("a gradient is not of the size that the buffer was made for")
            batched.payload.mul_(batched.factor)
            if flat.layout.marks is not None:
                _mark(flat)
            if flat.squares is not None and flat.squares.of_flattened:
                _note_flattened(flat, grads, scale, wire)
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
                # Of two operands without dimensions neither would rule the dtype.
                torch.mul(grad, batched.factor if grad.dim() else scale, out=view)
            else:  # torch would make room for it
                raise RuntimeError("a gradient is not of the size that the buffer was made for")
    if flat.layout.marks is not None:
        _mark(flat)
    if flat.squares is not None and flat.squares.of_flattened:
        _note_flattened(flat, grads, scale, source)
    if not flat.is_part:
        flat.trailer.copy_(flat.encoded)  # type: ignore[arg-type]


def _mark(flat: FlatBuffer) -> None:
    """Mark gradients that are not finite, while they are in the cache."""
    flat.marks.zero_()
    layout = flat.layout
    if not layout.numels:
        return
    # A sum is not finite if a term is not. The opposite is not true: then each is looked at.
    if not math.isfinite(
        flat.data[layout.offsets[0] : layout.offsets[-1] + layout.numels[-1]].sum()
    ):
        for slot, view in enumerate(flat.views):
            if not view.isfinite().all():
                flat.mark(slot)


def _note_flattened(
    flat: FlatBuffer, grads: Sequence[Tensor | None], scale: float, source: torch.dtype
) -> None:
    """Leave the sum of squares in ``flat.squares``, while the gradients are in the cache."""
    assert flat.squares is not None
    if source is flat.data.dtype and flat.layout.gapless is not None:
        first, end = flat.layout.gapless
        squares = norm_of(flat.data[first:end]).double().square().view(1)
        squares = squares / scale**2 if scale else squares * torch.nan
    else:  # in their place in the buffer they are rounded, or there are gaps
        squares = _squares(grads)
        if source is flat.data.dtype and any(map(is_, grads, flat.views)):
            squares = squares / scale**2 if scale else squares * torch.nan
    flat.squares.flattened[flat.first_slot] = squares


def norm_of(line: Tensor) -> Tensor:
    """The 2-norm of a dense vector on the CPU, fp32, or fp64 if that is, without dimensions.

    The order of additions depends on nothing but the number of elements.
    """
    wide = compute_dtype(line.dtype, line.dtype)
    rows = line.numel() // _ROW
    if rows < 2:
        return torch.linalg.vector_norm(line.view(1, -1), dim=1, dtype=wide).view(())
    norms = torch.linalg.vector_norm(line[: rows * _ROW].view(rows, _ROW), dim=1, dtype=wide)
    if rest := line.numel() - rows * _ROW:
        norms = torch.cat([norms, norm_of(line[-rest:]).view(1)])
    return norm_of(norms)


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each, on its device, fp32, or fp64 if that is, without dimensions.

    Tensors may be complex, sparse and of several dtypes. On the CPU as in :func:`norm_of` where
    they are dense.
    """
    real = list(map(_real_values, tensors))
    norms: list[Any] = [None] * len(real)
    by_kind: dict[Any, list[int]] = {}
    for number, each in enumerate(real):
        if each.is_cpu and each.numel() > _ROW and each.is_contiguous():
            norms[number] = norm_of(each.view(-1))
        else:
            by_kind.setdefault((each.dtype, each.device), []).append(number)
    for (dtype, _), numbers in by_kind.items():
        found = foreach_norm([real[n] for n in numbers], 2, compute_dtype(dtype, dtype))
        for number, norm in zip(numbers, found, strict=True):
            norms[number] = norm
    return norms


def _real_values(tensor: Tensor) -> Tensor:
    """What is in it, real and in memory order if it is dense."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.is_contiguous() or dims_by_stride(values.shape, values.stride()) is None:
        return values
    return values.as_strided((values.numel(),), (1,))


def _squares(grads: Sequence[Tensor | None]) -> Tensor:
    """Of those gradients that are there, fp64, one for each."""
    there = [grad for grad in grads if grad is not None]
    if not there:
        return torch.zeros(1, dtype=torch.float64)
    return torch.stack(norms_of(there)).double().square()


def unflatten(
    flat: FlatBuffer, grads: Sequence[Tensor | None], factor: Tensor | None = None
) -> None:
    """Write ``cast(factor * payload)`` of the reduced ``flat`` into ``grads``.

    A gradient whose used flag is zero (no rank used the parameter) is left untouched, and so
    is a slot whose gradient is ``None``. Where ``flat.squares`` wants them, those of all gradients
    that there are, as they are then, are left there.

    Args:
        flat: the source; stays as it is, but for gradients that live in it.
        grads: one per slot, of one dtype, with the slot's shape. A gradient may be
            ``flat.views[i]`` itself: it is then scaled in place.
        factor: one fp64 element on the buffer's device, rounded to :func:`compute_dtype` and
            applied in it before the cast to the gradients' dtype. ``None`` counts as 1, which
            changes no number, also not -0.0; a NaN stays one, but which is not promised.

    Raises:
        TypeError: the factor is of another kind.
    """
    targets, sources = grads, flat.views
    flags = flat.flags.tolist() if flat.known_flags is None else flat.known_flags
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
        foreach_copy_(targets, sources)
    if flat.squares is not None and flat.squares.of_unflattened:
        flat.squares.unflattened = _squares(grads)


def reduce_unflatten(
    flat: FlatBuffer,
    peers: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    factor: Tensor | None = None,
    shares: bool = False,
) -> None:
    """Sum what all ranks have packed and write it, as :func:`unflatten` would, into ``grads``.

    The trailer is summed too, into that of ``flat``. All ranks get the same bits. Of two ranks they
    are those of an all-reduce, which in 16 bits may differ in the last bit for more: here a sum is
    rounded once, not with every addition.

    Args:
        flat: not a part of a buffer. Of its payload nothing is written, unless ``grads`` is
            ``flat.views`` itself: then ``flat`` is what an all-reduce and an ``unflatten`` in place
            would leave, which multiplies no gradient that no rank used.
        peers: what each rank has packed, in their order: laid out as ``flat.data``, and of its
            dtype. None of them is ``flat.data``.
        grads: see :func:`unflatten`.
        factor: likewise; the sum is rounded to the wire's dtype before.
        shares: all ranks have summed theirs: see :func:`reduce_share`.

    Raises:
        TypeError: the factor is of another kind.
    """
    if factor is not None:
        flat.check_factor(factor)
    layout, in_place = flat.layout, grads is flat.views
    total = flat if in_place else FlatBuffer(layout, flat.data.dtype, flat.data.device)
    payloads = [peer[: layout.flags_offset] for peer in peers]
    if shares:
        for rank, share in enumerate(_shares(total.payload, peers)):
            share.copy_(_shares(payloads[rank], peers)[rank])
    else:
        _sum(payloads, total.payload)
    trailer = slice(layout.flags_offset, layout.marks_offset + flat.marks.numel())
    _sum([peer[trailer] for peer in peers], flat.data[trailer])
    if not in_place:
        total.flags.copy_(flat.flags)
    if not in_place or factor is not None:
        unflatten(total, grads, factor)


def reduce_share(flat: FlatBuffer, peers: Sequence[Tensor], rank: int) -> None:
    """Sum the share of ``rank`` over all ranks, in place of what it has packed itself.

    The first of two shots: each rank reads all buffers in part here, and then with
    ``reduce_unflatten(..., shares=True)`` the shares of the others, instead of all buffers whole.
    That must not begin before all ranks have been here. The trailer belongs to no share.

    Args:
        flat: not a part of a buffer; stays as it is.
        peers: see :func:`reduce_unflatten`.
        rank: this one.
    """
    shares = [_shares(peer[: flat.layout.flags_offset], peers)[rank] for peer in peers]
    _sum(shares, shares[rank])


def _shares(payload: Tensor, peers: Sequence[Tensor]) -> Sequence[Tensor]:
    """One for each rank."""
    return payload.tensor_split(len(peers))


def _sum(terms: Sequence[Tensor], result: Tensor) -> None:
    """Add ``terms`` up in their order, with one rounding, into ``result``, which may be a term."""
    wide = compute_dtype(result.dtype, result.dtype)
    for *others, target in zip(*(each.split(_CAST) for each in (*terms, result)), strict=True):
        total = others[0].to(wide)
        for other in others[1:]:
            total = total + other
        target.copy_(total)


def segments(layout: Layout) -> list[tuple[int, int]]:
    """Cut a bucket into runs of slots ``[first, last)`` that are flattened at once.

    On the CPU a gradient is best moved while it is in the cache, that is soon after it is ready;
    but each call costs some 10 us, so that small gradients wait for each other.
    """
    cuts: list[tuple[int, int]] = []
    first, size = 0, 0
    for slot, numel in enumerate(layout.numels, start=1):
        size += numel
        if size >= _SEGMENT or slot == len(layout.numels):
            cuts.append((first, slot))
            first, size = slot, 0
    return cuts


def donates(layout: Layout) -> bool:
    """Whether a tensor in the buffer costs less than a copy out of it: from some KiB a gradient."""
    return layout.mean_numel >= _SMALL


def _flatten_cast(flat: FlatBuffer, grads: Sequence[Tensor | None], scale: float) -> None:
    """Flatten gradients of another dtype than the wire's."""
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
    """A gradient that has the dtype in which it is scaled."""
    if grad.shape != view.shape:  # torch would make room for it, or repeat it
        raise RuntimeError("a gradient is not of the size that the buffer was made for")
    if grad.numel() <= _CAST or grad.stride() != view.stride():
        torch.mul(grad, scale, out=view)
        return
    flat_size = (grad.numel(),)
    sources, targets = grad.as_strided(flat_size, (1,)), view.as_strided(flat_size, (1,))
    for source, target in zip(sources.split(_CAST), targets.split(_CAST), strict=True):
        torch.mul(source, scale, out=target)


class _Batched:
    """What the flattens of one buffer have in common; made at the first of them.

    Small gradients that touch in the buffer are copied together, and then scaled together. Of large
    ones, which may be donated, this holds no views: they would look like somebody else's hold on
    the memory.
    """

    is_small: bool  # the gradients are small, touch, and are copied together if of the wire dtype
    applies: bool  # and the last ones were all there, and none of them in its place
    payload: Tensor  # the place of all gradients
    # Where they are all vectors: that, and the trailer behind it, which a part of a buffer has not.
    # Copies of vectors in one call take a third of the time of separate ones.
    line: Tensor | None = None
    numel: int  # of line
    places: list[Tensor]  # that of each gradient, and the trailer, likewise
    # Without dimensions: torch multiplies by it in half the time that it takes for a number, and
    # with the same bits. Of the dtype that it computes in.
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
            self.line = flat.data[first : end if flat.is_part else layout.marks_offset]
            self.numel = self.line.numel()

    def rescale(self, scale: float) -> None:
        """Make the factor of this scale."""
        self.scale = math.nan  # or it would be that of another factor, if this broke off below
        # By way of fp64, as torch does it with a number: one may be too large for fp32.
        self.factor = torch.tensor(scale, dtype=torch.float64).to(self._dtype)
        self.scale = scale


def _flatten_together(flat: FlatBuffer, grads: Sequence[Tensor | None]) -> bool:
    """The way of :class:`_Batched` for any gradients of the wire dtype; whether it applies."""
    payload = flat.batched.payload
    targets, sources = flat.views, list(grads)
    missing, in_place = NoneType in map(type, grads), any(map(is_, grads, flat.views))
    if missing and in_place:
        foreach_zero_([view for view, g in zip(flat.views, grads, strict=True) if g is None])
    elif missing:
        payload.zero_()  # less than a call, or a share of one, for each that is
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
    """Scale on the way out. The factor is a number, since a tensor would take part in promotion."""
    for grad, view in zip(grads, views, strict=True):
        if grad.dtype is not view.dtype:
            compute = compute_dtype(grad.dtype, view.dtype)
            if compute is grad.dtype:
                grad.copy_(view).mul_(factor)
            else:
                grad.copy_(torch.mul(view.to(compute), factor))
        elif grad.shape == view.shape:
            torch.mul(view, factor, out=grad)
        else:  # torch would make room for it
            raise RuntimeError("a gradient is not of the size that the buffer was made for")
