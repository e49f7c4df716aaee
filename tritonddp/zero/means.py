"""Gradients that are means already when a backward adds to them.

After a reduction the owner has the mean in ``.grad``, and the other ranks have ``None``. If the
user does not drop it, the next backward adds this rank's gradient to it, and in the reduction the
mean would count on one rank of all. It has to count as on all of them, as without owners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from tritonddp.comm.reduction import Reduction
from tritonddp.reducer.earlier_means import MeansAside
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
        self._means = MeansAside(
            lambda: [p for p, each in owners.items() if each == rank], is_reduced
        )

    def take_over(self, former: EarlierMeans) -> None:
        """Go on from the means of an earlier optimizer, whose parameters keep their owners."""
        self._means.take_over(former._means)

    def on_begin(self, backward: Backward) -> None:
        """Note the means, and take them out if the backward is reduced."""
        if backward.reduction is not None and self._optimizer() is None:
            raise RuntimeError(
                f"{backward.where}: the ZeroRedundancyOptimizer of this wrapper is gone, and no "
                "other rank would get the gradients of those that it owns: make another one, or "
                "wrap the module again"
            )
        self._means.note()
        if backward.reduction is not None:
            self._means.take_out()

    def on_request(self, reduction: Reduction) -> None:
        """Accumulated gradients are about to be reduced."""
        self._means.note()
        self._means.take_out()

    def on_reduced_all(self, reduction: Reduction) -> None:
        """Add the earlier means. (The first reduction leaves the mean on all ranks: drop it.)"""
        self._means.put_back()
        # (Not those of a layer that was frozen until now: they are reduced after all buckets.)
        for param in (param for bucket in reduction.buckets for param in bucket.params):
            if self._owners.get(param, self._rank) != self._rank:
                param.grad = None

    def on_close(self, reduction: Reduction | None) -> None:
        """From here on ``.grad`` holds means, until a backward adds to it."""
        self._means.close(reduction)

    def on_abort(self, reduction: Reduction | None) -> None:
        """The gradients are as the backward has left them."""
        self._means.put_back()
