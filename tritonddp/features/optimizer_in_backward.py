"""Optimizers that step in the backward: each parameter as soon as its gradient is the mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from tritonddp._torch import optimizer_hooks, optimizers_in_backward
from tritonddp.buckets.bucket import Bucket, Segment
from tritonddp.comm.reduction import LocalError, Reduction
from tritonddp.coordination.agreement import Ballot, Source
from tritonddp.coordination.collectives import Work


def take_over(params: Iterable[Tensor]) -> bool:
    """Remove the hooks that would step an optimizer before gradients are reduced.

    Returns:
        Whether any of ``params`` has an optimizer that steps in the backward.
    """
    handles_of = optimizer_hooks()
    if handles_of is None:
        return False
    found = False
    for param in params:
        if optimizers_in_backward(param):
            found = True
            for handle in handles_of.get(param, ()):
                handle.remove()
    return found


class StepError(LocalError):
    """An optimizer in the backward failed on this rank."""


class SteppingReduction:
    """Reduces as ``inner`` does; then the optimizers of a bucket's parameters step.

    As in stock DDP ``.grad`` is ``None`` afterwards, and what is accumulated under ``no_sync``, or
    reduced on request, is not stepped. Parameters without such an optimizer keep their gradient.

    Args:
        inner: see below.
        where: this rank and its step, for errors.

    Attributes:
        inner: may be replaced between two backwards.
    """

    def __init__(self, inner: Reduction, where: Callable[[], str]) -> None:
        self.inner = inner
        self._where = where
        self._steps = True
        self._failed: Bucket | None = None  # whose optimizer did, when all else was done

    @property
    def plain(self) -> Reduction:
        """See :attr:`Reduction.plain`."""
        plain = self.inner.plain
        return self if plain is self.inner else SteppingReduction(plain, self._where)

    def begin(self, ballot: Ballot, scale: float) -> None:
        """See :meth:`Reduction.begin`."""
        self._failed = None
        self._steps = ballot.source not in (Source.REQUEST, Source.SKIPPED)
        self.inner.begin(ballot, scale)

    def fill(self, bucket: Bucket, segment: Segment, used: Sequence[bool]) -> None:
        """See :meth:`Reduction.fill`."""
        self.inner.fill(bucket, segment, used)

    def start(self, bucket: Bucket) -> Work:
        """See :meth:`Reduction.start`."""
        return self.inner.start(bucket)

    def start_poisoned(self, bucket: Bucket) -> Work:
        """See :meth:`Reduction.start_poisoned`."""
        return self.inner.start_poisoned(bucket)

    def finish(self, bucket: Bucket, work: Work) -> None:
        """See :meth:`Reduction.finish`.

        Raises:
            StepError: an optimizer failed; those of later parameters have not stepped.
        """
        self.inner.finish(bucket, work)
        if not self._steps:
            return
        for name, param in zip(bucket.names, bucket.params, strict=True):
            optimizers = optimizers_in_backward(param)
            for optimizer in optimizers:
                try:
                    optimizer.step()
                except Exception as error:
                    self._failed = bucket
                    raise StepError(
                        f"{self._where()}, {bucket.title}: the optimizer of {name!r} failed in the "
                        f"backward: {type(error).__name__}: {error}"
                    ) from error
            if optimizers:
                param.grad = None

    def discard(self, bucket: Bucket, work: Work) -> None:
        """See :meth:`Reduction.discard`."""
        if bucket is not self._failed:
            self.inner.discard(bucket, work)

    def settle(self) -> None:
        """See :meth:`Reduction.settle`."""
        self.inner.settle()

    def get_unit(self) -> float:
        """See :meth:`Reduction.get_unit`."""
        return self.inner.get_unit()

    def set_unit(self, unit: float) -> None:
        """See :meth:`Reduction.set_unit`."""
        self.inner.set_unit(unit)
