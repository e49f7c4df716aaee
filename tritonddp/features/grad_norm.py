"""Norms of the reduced gradients, and clipping.

With ``grad_norm=True`` squares are summed while gradients pass through the buckets: squares of this
rank's gradients in flatten, squares of the means in unflatten or, on the CPU, in a pass over each
reduced bucket. A norm is then a sum of some hundred numbers. These hold for the gradients that the
reduction has written. So before they are used, each ``.grad`` must be the same tensor, with the
same version, as at that time. Gradients that have changed since are measured again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter, is_, methodcaller
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from tritonddp._torch import count_unscaling, foreach_mul_
from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.parameters import parameters_of
from tritonddp.comm.reduction import Reduction
from tritonddp.kernels.reference import norm_of, norms_of
from tritonddp.reducer.extension import Extension
from tritonddp.reducer.graph.backward import Backward
from tritonddp.reducer.reducer import Reducer

_grad_of = attrgetter("grad")
_version_of = attrgetter("_version")
_address_of = methodcaller("data_ptr")

_DOUBLE = (torch.float64, torch.complex128)


class _Reduced:
    """The gradients of a bucket as the reduction has left them. It does not keep them alive.

    Attributes:
        params: parameters of the bucket.
        dtype: of the gradients.
        squares: sum of squares of the reduced gradients, in parts; ``None`` without any gradient.
        bucket: weak reference to the bucket, if all gradients are bucket views.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.params, self.dtype = bucket.params, bucket.gradient_dtype
        grads: list[Any] = list(map(_grad_of, bucket.params))
        there = [grad for grad in grads if grad is not None]
        in_place = bucket.has_views and all(map(is_, grads, bucket.flat.views))
        self.squares = _squares_of(bucket, there, in_place, len(there) == len(grads))
        self.bucket: Callable[[], Any] = weakref.ref(bucket) if in_place else NoneType
        self._grads: list[Callable[[], Any]] = [
            NoneType if grad is None else weakref.ref(grad) for grad in grads
        ]
        self._versions = list(map(_version_of, there))
        self._addresses = _addresses_of(there)

    def is_current(self) -> bool:
        """Whether each ``.grad`` is the same tensor as then, and was not written to."""
        grads: list[Any] = list(map(_grad_of, self.params))
        if not all(map(is_, grads, [each() for each in self._grads])):
            return False
        there = [grad for grad in grads if grad is not None]
        try:  # lists of different length: a gradient was freed
            versions = list(map(_version_of, there))
            return versions == self._versions and _addresses_of(there) == self._addresses
        except RuntimeError:  # an inference tensor has no version
            return False


def _addresses_of(grads: Sequence[Tensor]) -> list[int]:
    """Addresses of the gradients: ``grad.data = ...`` changes them."""
    try:
        return list(map(_address_of, grads))
    except RuntimeError:  # a sparse gradient has no address
        return []


def _squares_of(
    bucket: Bucket, there: Sequence[Tensor], in_place: bool, is_whole: bool
) -> Tensor | None:
    """The sum of squares of the gradients ``there``, of a reduced bucket, with the least work.

    ``in_place``: all are bucket views. ``is_whole``: no parameter lacks its gradient.
    """
    counted, flat = bucket.squares, bucket.flat
    if counted is not None and counted.of_unflattened:
        found, counted.unflattened = counted.unflattened, None
        # (With owners the buffer has been looked at as a whole, with gradients of others in it.)
        is_of_grads = bucket.owned is None or is_whole
        if found is not None and is_of_grads and (in_place or not bucket.has_views):
            return found
    elif counted is not None and is_whole and (in_place or not bucket.has_views):
        # The buffer holds the same values as the gradients, if each was used on some rank.
        # (Not for large ones, which may be elsewhere: the bits shall not depend on the transport.)
        gapless = None if bucket.is_large else flat.layout.gapless
        if gapless is not None and bool(flat.flags.all()):
            return norm_of(flat.data[gapless[0] : gapless[1]]).double().square().view(1)
    return torch.stack(norms_of(there)).double().square() if there else None


class GradNorm(Extension):
    """Keeps the sums of squares of the last reduction."""

    def __init__(self) -> None:
        count_unscaling()
        self._reduced: list[_Reduced] = []
        self._is_replayed = False  # a CUDA graph writes gradients, which is not noticed here

    def current(self) -> list[_Reduced]:
        """The buckets whose gradients are unchanged since the last reduction."""
        return [] if self._is_replayed else [each for each in self._reduced if each.is_current()]

    def on_begin(self, backward: Backward) -> None:
        """Gradients change from here on: forget the sums of the last reduction."""
        self._reduced.clear()
        if (reduction := backward.reduction) is not None:
            for bucket in reduction.buckets:
                if bucket.squares is None and not bucket.is_sparse:
                    bucket.sum_squares()

    def on_reduced(self, reduction: Reduction, bucket: Bucket) -> None:
        """Note the gradients of a reduced bucket."""
        if not reduction.of_backwards:
            return
        if not bucket.index:  # on_begin() is not called on a rank without inputs
            self._reduced.clear()
        self._is_replayed = self._is_replayed or reduction.is_captured
        self._reduced.append(_Reduced(bucket))

    def on_abort(self, reduction: Reduction | None) -> None:
        """The reduction failed: forget its sums."""
        self._reduced.clear()


def _total(parts: list[Tensor]) -> Tensor:
    """The sum of all elements in a fixed order: fp64, no dimensions, on the first part's device."""
    device, dtype = parts[0].device, parts[0].dtype
    if any(part.device != device or part.dtype is not dtype for part in parts):
        parts = [part.to(device, torch.float64) for part in parts]
    return torch.cat(parts).sum(dtype=torch.float64)


class _Measured:
    """The norm of all gradients of a module.

    Args:
        module: whose parameters have the gradients.
        last: what is known of the last reduction; ``None`` without ``grad_norm=True``.

    Attributes:
        reduced: buckets whose gradients are unchanged since the last reduction.
        others: all other gradients.
        total: the norm, without dimensions.
    """

    def __init__(self, module: nn.Module, last: GradNorm | None) -> None:
        params = [param for _, param in parameters_of(module)]
        # Usually all gradients are in buckets. Sets of ids find that out without a Python loop.
        others = set(map(id, params))
        self.reduced: list[_Reduced] = []
        for each in [] if last is None else last.current():
            numbers = set(map(id, each.params))
            if numbers <= others:  # the module still has them, and no earlier bucket does
                others -= numbers
                self.reduced.append(each)
        self.others: list[Any] = []
        if others:
            found = [param for param in params if id(param) in others and param.grad is not None]
            self.others = [param.grad for param in found]
        parts = [each.squares for each in self.reduced if each.squares is not None]
        if self.others:
            # Stack them, since on a GPU an operation for each gradient would be a launch each.
            by_kind: dict[Any, list[Tensor]] = {}
            for norm in norms_of(self.others):
                by_kind.setdefault((norm.device, norm.dtype), []).append(norm)
            parts += [torch.stack(alike).double().square() for alike in by_kind.values()]
        dtypes = {each.dtype for each in self.reduced} | {g.dtype for g in self.others}
        dtype = torch.float32 if dtypes.isdisjoint(_DOUBLE) else torch.float64
        self.total = _total(parts).sqrt().to(dtype) if parts else torch.zeros((), device="cpu")

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by ``factor``, which has no dimensions."""
        grads = list(self.others)
        for each in self.reduced:
            mine = [param.grad for param in each.params if param.grad is not None]
            bucket: Any = each.bucket()
            if bucket is None or bucket.flat is None:  # a lazy bucket has freed its memory
                grads += mine
                continue
            bucket.flat.payload.mul_(factor.to(bucket.flat.data.device))
            increment_version(mine)  # each of these views has a version of its own
        by_kind: dict[Any, list[Tensor]] = {}
        for grad in grads:
            if grad.is_sparse:
                grad.mul_(factor.to(grad.device))
            else:
                by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
        for (device, _), alike in by_kind.items():
            foreach_mul_(alike, factor.to(device))


class GradientNorms:
    """Norms of the gradients of a wrapper's module, of which ``core`` is the reducer."""

    def __init__(self, core: Reducer) -> None:
        self._core = core
        self._last = core.events.of(GradNorm)

    @torch.no_grad()
    def norm(self, module: nn.Module, per_parameter: bool) -> Tensor | dict[str, Tensor]:
        """See :meth:`tritonddp.DistributedDataParallel.grad_norm`."""
        self._check_complete("grad_norm()")
        if not per_parameter:
            return self._total(module, _Measured(module, self._last))
        self._refuse_owners()
        named = [each for each in parameters_of(module) if each[1].grad is not None]
        grads: list[Any] = [param.grad for _, param in named]
        return {name: each for (name, _), each in zip(named, norms_of(grads), strict=True)}

    @torch.no_grad()
    def clip(self, module: nn.Module, max_norm: float, error_if_nonfinite: bool) -> Tensor:
        """See :meth:`tritonddp.DistributedDataParallel.clip_grad_norm_`."""
        self._check_complete("clip_grad_norm_()")
        measured = _Measured(module, self._last)
        total = self._total(module, measured)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"{self._core.where()}: the total norm of order 2 for gradients is non-finite, so "
                "it cannot be clipped. To disable this error and scale the gradients by the "
                "non-finite norm anyway, set `error_if_nonfinite=False`"
            )
        factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
        # On a GPU the host would have to wait for the factor, so gradients are multiplied in any
        # case.
        if not (factor.is_cpu and factor == 1):
            measured.scale(factor)
        return total

    def _total(self, module: nn.Module, measured: _Measured) -> Tensor:
        """The norm of all gradients, of those too that other ranks own."""
        core, owners = self._core, self._core.manager.factory.owners
        if not owners:
            return measured.total
        with_grad = [param for _, param in parameters_of(module) if param.grad is not None]
        total, rank = measured.total, core.group.rank
        # A gradient without an owner is there on all ranks, and counts on one. Before the first
        # reduction has brought buckets with owners, all are.
        mine: list[Any] = [p.grad for p in with_grad if owners.get(p, 0) == rank]
        if len(mine) < len(with_grad):
            total = measured.total.new_zeros(())
            if mine:
                total = torch.stack(norms_of(mine)).double().norm()
        is_double = float(measured.total.dtype is torch.float64)  # here, or on any rank
        sums = torch.stack([total.double().square(), total.new_tensor(is_double).double()])
        sums = sums.to(core.manager.current.params[0].device)
        core.group.all_reduce(sums, core.where(), "sum of the squares of all owners' gradients")
        return sums[0].sqrt().to(torch.float64 if sums[1] else torch.float32)

    def _refuse_owners(self) -> None:
        if self._core.manager.factory.owners:
            raise RuntimeError(
                f"{self._core.where()}: grad_norm(per_parameter=True) with "
                "ZeroRedundancyOptimizer: each rank has the gradients that it owns alone. "
                "grad_norm() gives the norm of all"
            )

    def _check_complete(self, what: str) -> None:
        """Raise a RuntimeError if the gradients are not complete now."""
        core = self._core
        core.options.check_finalized(core.backward, core.where())
        if core.backward_runs:
            raise RuntimeError(f"{core.where()}: {what} while a backward runs: wait for its end")
        if core.options.steps_optimizers:
            raise RuntimeError(
                f"{core.where()}: {what} where optimizers step in the backward: each drops its "
                "gradients there, so that they never all exist. Use an optimizer that steps after "
                "it"
            )
