"""Gradients that are means already when a backward adds to them.

After a reduction the owner has the mean in ``.grad``, and the other ranks have ``None``. If the
user does not drop it, the next backward adds this rank's gradient to it, and in the reduction the
mean would count on one rank of all. It has to count as on all of them, as without owners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tritonddp.comm.reduction import Reduction
from tritonddp.reducer.extension import Extension
from tritonddp.reducer.graph.backward import Backward


class EarlierMeans(Extension):
    """Takes the mean of earlier reductions out of ``.grad`` before a reduction, adds it after.

    Args:
        owners: by parameter, the rank.
        rank: this one.
        is_reduced: no backward has added to the gradients since the last reduction.
        optimizer: weak reference to the optimizer whose owners they are.
    """

    reads_device = "which gradients are means already (ZeroRedundancyOptimizer)"

    def __init__(
        self,
        owners: Mapping[Tensor, int],
        rank: int,
        is_reduced: bool,
        optimizer: Callable[[], object],
    ) -> None:
        self._optimizer = optimizer
        self._owners, self._rank = owners, rank
        self._means: dict[Tensor, Tensor] = {}
        # What the last local backward has left: gradients with a mean in them, and their versions.
        self._left: dict[Tensor, tuple[Tensor, int]] = {}
        self._is_reduced = is_reduced
        self._is_out = False  # the means are not in .grad

    def take_over(self, former: EarlierMeans) -> None:
        """Go on from the means of an earlier optimizer, whose parameters keep their owners."""
        self._is_reduced |= former._is_reduced
        self._means, self._left = dict(former._means), former._left

    def on_begin(self, backward: Backward) -> None:
        """Note the means, and take them out if the backward is reduced."""
        if backward.reduction is not None and self._optimizer() is None:
            raise RuntimeError(
                f"{backward.where}: the ZeroRedundancyOptimizer of this wrapper is gone, and no "
                "other rank would get the gradients of those that it owns: make another one, or "
                "wrap the module again"
            )
        self._note()
        if backward.reduction is not None:
            self._take_out()

    def on_request(self, reduction: Reduction) -> None:
        """Accumulated gradients are about to be reduced."""
        self._note()
        self._take_out()

    @torch.no_grad()
    def _note(self) -> None:
        if self._is_reduced:
            mine = [param for param, rank in self._owners.items() if rank == self._rank]
            # Copies: a backward adds to the tensor itself, and it may be a view of its bucket.
            self._means = {p: p.grad.clone() for p in mine if p.grad is not None}
            self._is_reduced = False
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
    def _take_out(self) -> None:
        for param, mean in self._means.items():
            if param.grad is not None:  # (else the user has dropped it, but not at once)
                param.grad.sub_(mean)
        self._means = {p: mean for p, mean in self._means.items() if p.grad is not None}
        self._is_out = bool(self._means)

    @torch.no_grad()
    def _put_back(self) -> None:
        if self._is_out:
            for param, mean in self._means.items():
                param.grad = mean if param.grad is None else param.grad.add_(mean)
            self._means, self._is_out = {}, False

    def on_reduced_all(self, reduction: Reduction) -> None:
        """Add the earlier means. (The first reduction leaves the mean on all ranks: drop it.)"""
        self._put_back()
        # (Not those of a layer that was frozen until now: they are reduced after all buckets.)
        for param in (param for bucket in reduction.buckets for param in bucket.params):
            if self._owners.get(param, self._rank) != self._rank:
                param.grad = None

    def on_close(self, reduction: Reduction | None) -> None:
        """From here on ``.grad`` holds means, until a backward adds to it."""
        if reduction is not None:
            self._is_reduced = True
        else:
            pairs = ((param, param.grad) for param in self._means)
            self._left = {p: (grad, grad._version) for p, grad in pairs if grad is not None}

    def on_abort(self, reduction: Reduction | None) -> None:
        """The gradients are as the backward has left them."""
        self._put_back()
