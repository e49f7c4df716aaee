"""Large gradients of a bucket are reduced where autograd made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp._device import record_use
from tritonddp._torch import is_shared
from tritonddp.buckets.placement.placement import Flags, Gradients, Placement
from tritonddp.kernels.dispatch import gradient_dtype
from tritonddp.kernels.flat_buffer import Layout

if TYPE_CHECKING:
    from tritonddp.buckets.bucket import Bucket, Segment

# Gradients of so many bytes are worth a part of their own in the grouped collective.
LARGE = 2**20


def may_be_in_place(params: Sequence[Parameter], world_size: int) -> bool:
    """Whether these can be reduced :class:`InPlace`, and some are large."""
    dtype = gradient_dtype(params[0])
    # A header is at most 255, and written ``world_size`` times as large.
    fits = not dtype.is_complex and 255 * world_size <= torch.finfo(dtype).max
    return fits and any(_is_large(param) for param in params)


def _is_large(param: Tensor) -> bool:
    return param.numel() * gradient_dtype(param).itemsize >= LARGE


class InPlace(Placement):
    """Large gradients are not copied: an average over the ranks is written over them.

    In the buffer they have their flags and no elements. The collective divides by the number of
    ranks, so nothing is divided before it. A large gradient is copied all the same if it has a
    weight, or where writing over it would be seen: if another tensor lies in its memory, or it is
    of an earlier backward. Then its mean is copied back. One that is missing is sent as zeros.

    Args:
        params: of the bucket.
        world_size: a power of two, by which division is exact.
    """

    unbuffered: Sequence[Tensor]

    def __init__(self, params: Sequence[Parameter], world_size: int) -> None:
        super().__init__(len(params))
        self._size = world_size
        self._large = [slot for slot, param in enumerate(params) if _is_large(param)]
        self.unbuffered = ()
        dtype = gradient_dtype(params[0])
        self.nbytes = sum(params[slot].numel() for slot in self._large) * dtype.itemsize
        self._nothing = torch.empty(0, dtype=dtype, device=params[0].device)
        # By slot: copies that are sent, and the gradients that get their means, if there are any.
        self._copies: dict[int, tuple[Tensor, Tensor | None]] = {}

    def layout(self, bucket: Bucket, headers: int) -> Layout:
        """See the base class: large gradients have no elements in the buffer."""
        large, shapes, strides = self._large, bucket.shapes, bucket.strides
        shapes = [(0,) if slot in large else shape for slot, shape in enumerate(shapes)]
        strides = [(1,) if slot in large else each for slot, each in enumerate(strides)]
        small = Layout.of(shapes, strides, bucket.kernels.alignment, headers)
        return replace(small, trailer_unit=self._size)

    def _set_unbuffered(
        self, bucket: Bucket, grads: Any, sources: Any, scale: float, incoming: Gradients | None
    ) -> tuple[Any, ...]:
        grads, sources, unbuffered, self._copies = list(grads), list(sources), [], {}
        scale *= self._size
        seen: set[int] = set()
        for slot in self._large:
            grad, source = grads[slot], sources[slot]
            sent = source
            if source is None:
                sent = bucket.empty_gradient(slot).zero_()
            elif (
                scale != 1
                or incoming is None
                or not bucket.used[slot]
                or source.requires_grad  # a graph of its own may hold it
                or id(source) in seen
                or is_shared(source, incoming)
            ):
                sent = source.detach() * scale
            if sent is not grad:
                self._copies[slot] = sent, None if grad is None else grad.detach()
            seen.add(id(sent))
            unbuffered.append(sent)
            grads[slot] = sources[slot] = self._nothing
        self.unbuffered = unbuffered
        return grads, sources, scale

    def fetch(self, bucket: Bucket, segment: Segment) -> None:
        """See the base class. All large gradients are copied."""
        super().fetch(bucket, segment)
        for slot, (sent, _) in self._copies.items():  # none, if packing has failed
            self._copies[slot] = sent, self.grads[slot]
            self.grads[slot] = self._nothing

    def _fill_nan(self, bucket: Bucket, used: Sequence[bool], header: bytes) -> None:
        super()._fill_nan(bucket, used, header)
        # (Nothing is packed yet, or all is.)
        packed: dict[int, Tensor | None] = dict(zip(self._large, self.unbuffered, strict=False))
        packed |= {slot: grad for slot, (_, grad) in self._copies.items()}
        self._copies = {
            slot: (bucket.empty_gradient(slot).fill_(torch.nan), packed.get(slot))
            for slot in self._large
        }
        self.unbuffered = [copy for copy, _ in self._copies.values()]

    def unpack(self, bucket: Bucket, factor: Tensor | None, flags: Flags | None) -> None:
        """See the base class."""
        if self.wants_flags and flags is None:
            flags = bucket.flat.flags.tolist()
        self.finish_unbuffered(bucket, factor, flags or ())
        super().unpack(bucket, factor, flags)

    def finish_unbuffered(self, bucket: Bucket, factor: Tensor | None, flags: Flags = ()) -> None:
        """See the base class. ``flags`` are needed where a gradient is missing."""
        if factor is not None:
            # With a dimension: else torch rounds it to the dtype of the gradients first.
            factor = factor.to(torch.promote_types(self._nothing.dtype, torch.float32))
        elif not self._copies:  # the means are in place
            self.unbuffered = ()
            return
        for slot, sent in zip(self._large, self.unbuffered, strict=False):
            grad = self._copies[slot][1] if slot in self._copies else sent
            into = grad if grad is not None and bucket.used[slot] else sent
            if factor is not None:
                torch.mul(sent, factor, out=into)
            elif into is not sent:
                into.copy_(sent)
            if grad is None:
                if flags and flags[slot]:
                    bucket.params[slot].grad = sent
            elif not bucket.used[slot]:  # another rank may have used it
                grad.copy_(torch.where(bucket.flat.flags[slot] != 0, sent, grad))
        self._drop()

    def _drop(self) -> None:
        record_use(*(copy for copy, _ in self._copies.values()))  # of the streams of gradients
        self.unbuffered, self._copies = (), {}

    def discard(self, bucket: Bucket) -> None:
        """See the base class. Gradients that are on their way become the mean."""
        super().discard(bucket)
        self._drop()
