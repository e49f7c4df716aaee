"""Gradients that are reduced already when a backward adds to them.

In the next reduction they would be sent again. A mean of equal numbers is that number, so that the
plain mean bears it. A sum is not, whatever it is divided by; nor is the mean where the owner of a
parameter alone has its gradient. There they are set aside until the reduction is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tritonddp.comm.reduction import Reduction
from tritonddp.reducer.extension import Extension
from tritonddp.reducer.graph.backward import Backward


class MeansAside:
    """The results of earlier reductions, which are taken out of ``.grad`` and added again.

    Args:
        params: returns the parameters whose gradients they are.

    Attributes:
        is_reduced: no backward has added to the gradients since the last reduction.
    """

    def __init__(self, params: Callable[[], Iterable[Tensor]], is_reduced: bool) -> None:
        self._params = params
        self.is_reduced = is_reduced
        self._means: dict[Tensor, Tensor] = {}
        # What the last local backward has left: gradients with a mean in them, and their versions.
        self._left: dict[Tensor, tuple[Tensor, int]] = {}
        self._is_out = False  # the means are not in .grad
        self._is_noted = False  # in this backward, which may be reduced after all

    def take_over(self, former: MeansAside) -> None:
        """Go on from the results that ``former`` knows of the same parameters."""
        self.is_reduced |= former.is_reduced
        self._means, self._left = dict(former._means), former._left

    @torch.no_grad()
    def note(self) -> None:
        """A backward is about to add to the gradients, or a reduction to begin."""
        if self._is_noted:
            return
        self._is_noted = True
        if self.is_reduced:
            # Copies: a backward adds to the tensor itself, and it may be a view of its bucket.
            self._means = {p: p.grad.clone() for p in self._params() if p.grad is not None}
            self.is_reduced = False
        else:
            for param in [param for param in self._means if self._was_dropped(param)]:
                del self._means[param]

    def _was_dropped(self, param: Tensor) -> bool:
        """The user has dropped the mean, or set it to zero, since a local backward."""
        grad, version = self._left.get(param, (None, 0))
        if param.grad is None or param.grad is not grad:
            return True
        return grad._version != version and not grad.any()

    @torch.no_grad()
    def take_out(self) -> None:
        """A reduction begins."""
        for param, mean in self._means.items():
            if param.grad is not None:  # (else the user has dropped it, but not at once)
                param.grad.sub_(mean)
        self._means = {p: mean for p, mean in self._means.items() if p.grad is not None}
        self._is_out = bool(self._means)

    @torch.no_grad()
    def put_back(self) -> None:
        """The reduction is over, or has failed."""
        if self._is_out:
            for param, mean in self._means.items():
                param.grad = mean if param.grad is None else param.grad.add_(mean)
            self._means, self._is_out = {}, False

    def close(self, reduction: Reduction | None) -> None:
        """A backward is over. After a reduction ``.grad`` holds means, until another adds to it."""
        self._is_noted = False
        if reduction is not None:
            self.is_reduced = True
        else:
            pairs = ((param, param.grad) for param in self._means)
            self._left = {p: (grad, grad._version) for p, grad in pairs if grad is not None}


class ReducedOnce(Extension):
    """Has gradients of earlier reductions count as they are, whatever the sum is divided by."""

    reads_device = "which gradients are reduced already (gradient_divide_factor)"

    def __init__(self, params: Callable[[], Iterable[Tensor]]) -> None:
        self._means = MeansAside(params, is_reduced=False)

    def on_begin(self, backward: Backward) -> None:
        self._means.note()
        if backward.reduction is not None:
            self._means.take_out()

    def on_request(self, reduction: Reduction) -> None:
        # Without a backward since the last reduction all that is in .grad is meant.
        if not self._means.is_reduced:
            self._means.note()
            self._means.take_out()

    def on_reduced_all(self, reduction: Reduction) -> None:
        self._means.put_back()

    def on_close(self, reduction: Reduction | None) -> None:
        self._means.close(reduction)

    def on_abort(self, reduction: Reduction | None) -> None:
        self._means.put_back()
