"""Reduced gradients that only the owner of each parameter holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from tritonddp.buckets.parameters import ModuleParameters
from tritonddp.comm.reduction import LocalError, Reduction
from tritonddp.coordination.failures import listed
from tritonddp.reducer.earlier_means import EarlierMeans, held
from tritonddp.reducer.extension import Extension
from tritonddp.reducer.graph.backward import Backward


class OwnedMeans(Extension):
    """Keeps the mean in ``.grad`` of the owner after a reduction; other ranks have ``None``.

    Args:
        parameters: parameters of the wrapper.
        owners: the owner of each parameter, also in replaced layers.
        is_reduced: whether gradients already hold means.
        optimizer: weak reference to the optimizer that assigned the owners.
    """

    reads_device = "which gradients are already reduced (ZeroRedundancyOptimizer)"

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
        self._parameters, self._optimizer = parameters, optimizer
        self._owners, self._rank = owners, rank

    def _of_others(self, named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Return parameters of other owners that have a gradient here; usually there are none."""
        have = [each for each in named if each[1].grad is not None]
        return [each for each in have if self._owners.get(each[1], self._rank) != self._rank]

    def take_over(self, former: OwnedMeans) -> None:
        """Continue with the means of an earlier optimizer, whose parameters keep their owners."""
        self._earlier.take_over(former._earlier)

    def on_begin(self, backward: Backward) -> None:
        """Check that the optimizer of a reduced backward exists.

        Raises:
            RuntimeError: it was deleted, or the user set ``.grad``; or see
                :meth:`EarlierMeans.on_begin`.
        """
        if backward.reduction is not None and self._optimizer() is None:
            raise RuntimeError(
                f"{backward.where}: the ZeroRedundancyOptimizer of this wrapper was deleted, so "
                "no rank would receive the gradients of the parameters that it owns: create a new "
                "one, or wrap the module again"
            )
        if backward.reduction is not None and backward.first_param is None:
            self._refuse_set(backward.where)
        self._earlier.on_begin(backward)

    def _refuse_set(self, where: str) -> None:
        """Raise if the user set ``.grad``: the owner could not tell it from a mean."""
        if self._earlier.is_reduced and (found := held(self._of_others(self._parameters.params))):
            raise LocalError(  # local: the owner cannot detect it
                f"{where}: .grad of {listed([name for name, _ in found])} was set after the last "
                "reduction, and ZeroRedundancyOptimizer cannot tell it from a reduced gradient: "
                "pass your gradients to reduce_gradients(), and set .grad to the result"
            )

    def on_request(self, reduction: Reduction) -> None:
        """Set the means aside, so that a repeated request leaves them unchanged."""
        self._refuse_set(reduction.where)
        self._earlier.on_request(reduction)
        self._earlier.set_aside(self._earlier.means())

    def on_reduced_all(self, reduction: Reduction) -> None:
        """Add the earlier means. Drop the mean that the first reduction left on all ranks."""
        self._earlier.on_reduced_all(reduction)
        # Layers that were frozen until now are in no bucket; they are reduced afterwards.
        for bucket in reduction.buckets:
            for _, param in self._of_others(zip(bucket.names, bucket.params, strict=True)):
                param.grad = None

    def on_close(self, reduction: Reduction | None) -> None:
        self._earlier.on_close(reduction)

    def on_abort(self, reduction: Reduction | None) -> None:
        self._earlier.on_abort(reduction)
