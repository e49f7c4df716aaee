"""Gradients are views of the buffer of their bucket (``gradient_as_bucket_view=True``)."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tritonddp.buckets.grad_storage.grad_storage import Flags, GradStorage

if TYPE_CHECKING:
    from tritonddp.buckets.bucket import Bucket, Segment


class Views(GradStorage):
    """Make ``.grad`` a view of the buffer after the first backward.

    Nothing is copied out. A gradient that was accumulated in the buffer is scaled in place. A
    gradient outside the buffer (first backward, ``zero_grad(set_to_none=True)``) is copied in.
    """

    views_of = attrgetter("flat.views")
    has_views = True

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        # Gradients of earlier backwards, by slot.
        self._stashed: dict[int, Tensor] = {}

    def fetch(self, bucket: Bucket, segment: Segment) -> None:
        """See the base class. The means are in the buffer, so gradients become views."""
        views = bucket.flat.views[segment.first : segment.last]
        for param, view in zip(segment.params, views, strict=True):
            if param.grad is not None:
                param.grad = view

    def unpack(self, bucket: Bucket, factor: Tensor | None, flags: Flags | None) -> None:
        """Turn gradients of other ranks into views; used gradients are already in place."""
        flat, views = bucket.flat, bucket.flat.views
        if factor is not None:
            bucket.counters.unflattens += 1
            if bucket.kernels.takes_pointers:
                # Do not use payload.mul_(factor): on a GPU torch first rounds a zero-dim operand to
                # the dtype of the other operand, even to bf16.
                bucket.kernels.unflatten(flat, views, factor)
            else:  # one call costs less than one for each gradient
                flat.payload.mul_(factor.item())
        if self._stashed:
            for slot, grad in self._stashed.items():
                views[slot].copy_(torch.where(flat.flags[slot] != 0, views[slot], grad))
            self._stashed.clear()
        if self.wants_flags:
            self.wants_flags = False
            flags = flat.flags.tolist() if flags is None else flags
            for flag, is_used, param, view in zip(
                flags, bucket.sent_flags, bucket.params, views, strict=True
            ):
                if flag and not is_used:
                    param.grad = view
        if bucket.others:
            self._drop_others(bucket)

    def fill_nan(self, bucket: Bucket, header: bytes = b"") -> None:
        """See the base class. Gradients leave the buffer first, so that they do not change."""
        for param, view in bucket.in_buffer().items():
            param.grad = view.clone()
        super().fill_nan(bucket, header)

    def discard(self, bucket: Bucket) -> None:
        """See the base class."""
        super().discard(bucket)
        self._stashed.clear()

    def _unused(self, bucket: Bucket, slot: int, grad: Tensor) -> Tensor:
        """Save a gradient of an earlier backward that the reduction would overwrite.

        If no rank used a parameter, its ``.grad`` does not change, even if it is a view.
        """
        if grad.data_ptr() != bucket.flat.views[slot].data_ptr():
            return bucket.to_slot_layout(slot, grad)
        self._stashed[slot] = grad.clone()
        return grad
