"""A bucket in whose buffer the gradients live (``gradient_as_bucket_view=True``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp.buckets.bucket import Bucket, Segment


class ViewBucket(Bucket):
    """Gradients live in the buffer: ``.grad`` is a view of it after the first backward.

    Nothing is copied out. What a backward accumulated in place is scaled where it is; a gradient
    that lies elsewhere (the first backward, ``zero_grad(set_to_none=True)``) is copied in.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cedes = False
        self._kept: dict[int, Tensor] = {}

    def begin(self) -> None:
        """See :meth:`Bucket.begin`. Here the buffer is never anybody else's."""
        super().begin()
        self._kept.clear()  # of a backward that broke off

    def flatten(
        self,
        segment: Segment,
        used: Sequence[bool],
        scale: float,
        ballots: Sequence[int] = (),
        earlier: bool = True,
    ) -> None:
        """See :meth:`Bucket.flatten`. Used gradients become views, which frees their memory."""
        grads = self._flatten(segment, used, scale, ballots, earlier)
        used = self._used[segment.first : segment.last]
        for slot, (flag, view) in enumerate(zip(used, segment.flat.views, strict=True)):
            if flag:
                self.params[segment.first + slot].grad = grads[slot] = view
        self._grads[segment.first : segment.last] = grads

    def unflatten(self, factor: Tensor | None = None) -> None:
        """Used gradients are in place already. Those that only other ranks used become views."""
        views = self.flat.views
        if factor is not None:
            self._counters.unflattens += 1
            self._scale(factor)
        for slot, grad in self._kept.items():
            views[slot].copy_(torch.where(self.flat.flags[slot] != 0, views[slot], grad))
        self._kept.clear()
        if not all(self._used):
            for slot, flag in enumerate(self.flat.flags.tolist()):
                if flag and not self._used[slot] and self._grads[slot] is not views[slot]:
                    self.params[slot].grad = views[slot]
        self._grads = [None] * len(views)
        self._before = {}

    def _scale(self, factor: Tensor) -> None:
        """Multiply the reduced gradients by one fp64 element, where they are, in one launch.

        Not by ``payload.mul_(factor)``: on a GPU torch rounds an operand without dimensions to the
        dtype of the other one first, bf16 too.
        """
        if self._kernels.by_address:
            self._kernels.unflatten(self.flat, self.flat.views, factor)
        else:  # one call is less than one for each gradient
            self.flat.payload.mul_(factor.item())

    def _spare(self, slot: int, grad: Tensor) -> Tensor:
        """Save a gradient of an earlier backward that the reduction would overwrite.

        A parameter that no rank used keeps its ``.grad`` as it is, also where that is a view.
        """
        if grad.data_ptr() != self.flat.views[slot].data_ptr():
            return self._conform(slot, grad)
        self._kept[slot] = grad.clone()
        return grad

    def placed_gradients(self) -> dict[Parameter, Tensor]:
        """See :meth:`Bucket.placed_gradients`."""
        return {
            param: view
            for param, view in zip(self.params, self.flat.views, strict=True)
            if param.grad is view
        }

    def adopt(self, placed: dict[Parameter, Tensor]) -> None:
        """See :meth:`Bucket.adopt`."""
        for param, view in zip(self.params, self.flat.views, strict=True):
            grad = placed.pop(param, None)
            if grad is not None:
                param.grad = view.copy_(grad)
