"""Gradients of which the owner of a parameter alone has the mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from tritonddp.buckets.parameters import ModuleParameters
from tritonddp.comm.reduction import Reduction
from tritonddp.reducer.earlier_means import EarlierMeans
from tritonddp.reducer.extension import Extension
from tritonddp.reducer.graph.backward import Backward


class OwnedMeans(Extension):
    """After a reduction the owner has the mean in ``.grad``, and the other ranks have ``None``.

    Args:
        parameters: those of the wrapper. (Owners have those of layers that were replaced, too.)
        owners: by parameter, the rank.
        is_reduced: gradients are means already.
        optimizer: weak reference to the optimizer whose owners they are.
    """

    reads_device = "which gradients are means already (ZeroRedundancyOptimizer)"

    def __init__(
        self,
        parameters: ModuleParameters,
        owners: Mapping[Tensor, int],
        rank: int,
        is_reduced: bool,
        optimizer: Callable[[], object],
    ) -> None:
        self._earlier = EarlierMeans(
            lambda: [named for named in parameters.params if owners.get(named[1]) == rank],
            "ZeroRedundancyOptimizer",
            is_reduced,
        )
        self._optimizer, self._owners, self._rank = optimizer, owners, rank

    def take_over(self, former: OwnedMeans) -> None:
        """Go on from the means of an earlier optimizer, whose parameters keep their owners."""
        self._earlier.take_over(former._earlier)

    def on_begin(self, backward: Backward) -> None:
        """A backward that is reduced needs the optimizer.

        Raises:
            RuntimeError: it is gone, or see :meth:`EarlierMeans.on_begin`.
        """
        if backward.reduction is not None and self._optimizer() is None:
            raise RuntimeError(
                f"{backward.where}: the ZeroRedundancyOptimizer of this wrapper is gone, and no "
                "other rank would get the gradients of those that it owns: make another one, or "
                "wrap the module again"
            )
        self._earlier.on_begin(backward)

    def on_request(self, reduction: Reduction) -> None:
        """Another request changes nothing, as without owners."""
        self._earlier.on_request(reduction)
        if self._earlier.is_reduced:
            self._earlier.set_aside()

    def on_reduced_all(self, reduction: Reduction) -> None:
        """Add the earlier means. (The first reduction leaves the mean on all ranks: drop it.)"""
        self._earlier.on_reduced_all(reduction)
        # (Not those of a layer that was frozen until now: they are reduced after all buckets.)
        for param in (param for bucket in reduction.buckets for param in bucket.params):
            if self._owners.get(param, self._rank) != self._rank:
                param.grad = None

    def on_close(self, reduction: Reduction | None) -> None:
        self._earlier.on_close(reduction)

    def on_abort(self, reduction: Reduction | None) -> None:
        self._earlier.on_abort(reduction)
