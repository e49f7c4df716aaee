"""A bucket whose large gradients are reduced where autograd made them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp._device import record_use
from tritonddp._torch import is_shared
from tritonddp.buckets.bucket import Bucket, Segment
from tritonddp.kernels.dispatch import Kernels, gradient_dtype
from tritonddp.kernels.flat_buffer import FlatBuffer, Layout

# Gradients of so many bytes are worth a part of their own in the grouped collective.
LARGE = 2**20


def may_be_in_place(params: Sequence[Parameter], world_size: int) -> bool:
    """Whether an :class:`InPlaceBucket` can hold these, and some are large."""
    dtype = gradient_dtype(params[0])
    # A header is at most 255, and written ``world_size`` times as large.
    fits = not dtype.is_complex and 255 * world_size <= torch.finfo(dtype).max
    return fits and any(_is_large(param) for param in params)


def _is_large(param: Tensor) -> bool:
    return param.numel() * gradient_dtype(param).itemsize >= LARGE


class InPlaceBucket(Bucket):
    """Large gradients are not copied: an average over the ranks is written over them.

    In the buffer they have their flags and no elements. The collective divides by the number of
    ranks, so nothing is divided before it. A large gradient is copied all the same if it has a
    weight, or where writing over it would be seen: if another tensor lies in its memory, or it is
    of an earlier backward. Then its mean is copied back. One that is missing is sent as zeros.

    Args:
        world_size: a power of two, by which division is exact.
        index, params, names, kernels: see :class:`Bucket`, also for the others.
    """

    unbuffered: Sequence[Tensor]

    def __init__(
        self,
        world_size: int,
        index: int,
        params: Sequence[Parameter],
        names: Sequence[str],
        kernels: Kernels,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._size = world_size
        self._large = [slot for slot, param in enumerate(params) if _is_large(param)]
        make = partial(_without, set(self._large), kernels, world_size)
        super().__init__(index, params, names, replace(kernels, buffer=make), *args, **kwargs)
        self.unbuffered = ()
        self.nbytes += (
            sum(params[slot].numel() for slot in self._large) * self.gradient_dtype.itemsize
        )
        self._nothing = torch.empty(0, dtype=self.gradient_dtype, device=params[0].device)
        # By slot: copies that are sent, and the gradients that get their means, if there are any.
        self._copies: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._copies_next = False
        self._incoming: Sequence[Tensor | None] = ()

    def _set_unbuffered(
        self, grads: list[Any], sources: list[Any], scale: float
    ) -> tuple[Any, ...]:
        grads, sources, unbuffered, self._copies = list(grads), list(sources), [], {}
        scale *= self._size
        seen: set[int] = set()
        for slot in self._large:
            grad, source = grads[slot], sources[slot]
            sent = source
            if source is None:
                sent = self._empty_gradient(slot).zero_()
            elif (
                scale != 1
                or self._copies_next
                or not self.used[slot]
                or source.requires_grad  # a graph of its own may hold it
                or id(source) in seen
                or is_shared(source, self._incoming)
            ):
                sent = source.detach() * scale
            if sent is not grad:
                self._copies[slot] = sent, None if grad is None else grad.detach()
            seen.add(id(sent))
            unbuffered.append(sent)
            grads[slot] = sources[slot] = self._nothing
        self._copies_next, self._incoming = False, ()
        self.unbuffered = unbuffered
        return grads, sources, scale

    def note_incoming(self, incoming: Sequence[Tensor | None]) -> None:
        self._incoming = incoming

    def copy_unbuffered(self) -> None:
        self._copies_next = True

    def drop_gradients(self, segment: Segment) -> None:
        super().drop_gradients(segment)
        self._copies = {slot: (copy, None) for slot, (copy, _) in self._copies.items()}

    def fetch_gradients(self, segment: Segment) -> None:
        super().fetch_gradients(segment)
        for slot in self._large:
            self._copies[slot] = self._copies[slot][0], self._grads[slot]
            self._grads[slot] = self._nothing

    def fill_nan(self, header: bytes = b"") -> None:
        super().fill_nan(header)
        self._copies = {slot: (self._nan(slot), None) for slot in self._large}
        self.unbuffered = [copy for copy, _ in self._copies.values()]

    def overwrite_nan(self) -> None:
        super().overwrite_nan()
        for slot, sent in zip(self._large, self.unbuffered, strict=True):
            target = self._copies[slot][1] if slot in self._copies else sent
            self._copies[slot] = self._nan(slot), target
        self.unbuffered = [self._copies[slot][0] for slot in self._large]

    def _nan(self, slot: int) -> Tensor:
        return self._empty_gradient(slot).fill_(torch.nan)

    def unpack(self, factor: Tensor | None = None, flags: Sequence[float] | None = None) -> None:
        if self.wants_flags:
            flags = self._on_host(flags)
        self.finish_unbuffered(factor, flags or ())
        super().unpack(factor, flags)

    def finish_unbuffered(self, factor: Tensor | None, flags: Sequence[float] = ()) -> None:
        """See the base class. ``flags`` are needed where a gradient is missing."""
        if factor is not None or self._copies:
            if factor is not None:
                # With a dimension: else torch rounds it to the dtype of the gradients first.
                factor = factor.to(torch.promote_types(self.gradient_dtype, torch.float32))
            for slot, sent in zip(self._large, self.unbuffered, strict=False):
                self._finish(slot, sent, factor, flags)
            self._drop()
        self.unbuffered = ()

    def _finish(
        self, slot: int, sent: Tensor, factor: Tensor | None, flags: Sequence[float]
    ) -> None:
        grad = self._copies[slot][1] if slot in self._copies else sent
        into = grad if grad is not None and self.used[slot] else sent
        if factor is not None:
            torch.mul(sent, factor, out=into)
        elif into is not sent:
            into.copy_(sent)
        if grad is None:
            if flags and flags[slot]:
                self.params[slot].grad = sent
        elif not self.used[slot]:  # another rank may have used it
            grad.copy_(torch.where(self.flat.flags[slot] != 0, sent, grad))

    def _drop(self) -> None:
        record_use(*(copy for copy, _ in self._copies.values()))  # of the streams of gradients
        self.unbuffered, self._copies = (), {}

    def discard(self) -> None:
        """See :meth:`Bucket.discard`. Gradients that are on their way become the mean."""
        super().discard()
        self._drop()


def _without(
    large: Collection[int],
    kernels: Kernels,
    trailer_unit: int,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    memory: Tensor | None = None,
) -> FlatBuffer:
    """A buffer of ``kernels`` in which the ``large`` slots of ``layout`` have no elements."""
    shapes = [(0,) if slot in large else each for slot, each in enumerate(layout.shapes)]
    strides = [(1,) if slot in large else each for slot, each in enumerate(layout.strides)]
    small = Layout.of(shapes, strides, kernels.alignment, layout.headers)
    return kernels.buffer(replace(small, trailer_unit=trailer_unit), dtype, device, memory)
