"""A bucket whose gradients are views of its buffer (``gradient_as_bucket_view=True``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp.buckets.bucket import Bucket, Segment


class ViewBucket(Bucket):
    """``.grad`` is a view of the buffer after the first backward.

    Nothing is copied out. A gradient that was accumulated in the buffer is scaled in place. A
    gradient elsewhere (first backward, ``zero_grad(set_to_none=True)``) is copied in.
    """

    has_views = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Gradients of earlier backwards, by slot.
        self._stashed: dict[int, Tensor] = {}

    def _become_views(self, segment: Segment, grads: Sequence[Any]) -> None:
        first, last = segment.first, segment.last
        views = self.flat.views[first:last]
        flags = self.used[first:last]
        self.wants_flags = True
        self._grads[first:last] = grads
        for slot, flag in enumerate(flags):
            if flag:
                segment.params[slot].grad = self._grads[first + slot] = views[slot]

    def fetch_gradients(self, segment: Segment) -> None:
        """See the base class. The means are in the buffer: gradients become views."""
        views = self.flat.views[segment.first : segment.last]
        for param, view in zip(segment.params, views, strict=True):
            param.grad = view
        self._grads[segment.first : segment.last] = views

    def unpack(self, factor: Tensor | None = None, flags: Sequence[float] | None = None) -> None:
        """Used gradients are in place already. Gradients of other ranks only become views too."""
        views = self.flat.views
        if factor is not None:
            self._counters.unflattens += 1
            self._scale(factor)
        if self._stashed:
            for slot, grad in self._stashed.items():
                views[slot].copy_(torch.where(self.flat.flags[slot] != 0, views[slot], grad))
            self._stashed.clear()
        if self.wants_flags:
            self.wants_flags = False
            for slot, flag in enumerate(self._on_host(flags)):
                if flag and not self.used[slot] and self._grads[slot] is not views[slot]:
                    self.params[slot].grad = views[slot]
        self._grads = [None] * len(views)
        if self.owned is not None:
            self._drop_others()

    def discard(self) -> None:
        super().discard()
        self._stashed.clear()

    def _scale(self, factor: Tensor) -> None:
        """Multiply the reduced gradients by one fp64 element, where they are, in one launch."""
        if self._kernels.takes_pointers:
            # Not by payload.mul_(factor): on a GPU torch rounds an operand without dimensions to
            # the dtype of the other one first, bf16 too.
            self._kernels.unflatten(self.flat, self.flat.views, factor)
        else:  # one call is less than one for each gradient
            self.flat.payload.mul_(factor.item())

    def _stash(self, slot: int, grad: Tensor) -> Tensor:
        """Save a gradient of an earlier backward that the reduction would overwrite.

        A parameter that no rank used keeps its ``.grad`` as it is, also where that is a view.
        """
        if grad.data_ptr() != self.flat.views[slot].data_ptr():
            return self._to_slot_layout(slot, grad)
        self._stashed[slot] = grad.clone()
        return grad

    def in_buffer(self) -> dict[Parameter, Tensor]:
        if self.flat is None:
            return {}
        views: list[Tensor] = self.flat.views
        pairs = zip(self.params, views, strict=True)
        return {param: view for param, view in pairs if param.grad is view}

    def adopt(self, in_buffer: dict[Parameter, Tensor]) -> None:
        if not in_buffer:
            return
        if self.flat is None:
            self.allocate()
        for param, view in zip(self.params, self.flat.views, strict=True):
            grad = in_buffer.pop(param, None)
            if grad is not None:
                param.grad = view.copy_(grad)
