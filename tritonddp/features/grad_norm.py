"""Norms of the reduced gradients, clipping, and the gradient noise scale.

With ``grad_norm=True`` squares are summed while gradients pass through the buckets: squares of this
rank's gradients in flatten, squares of the means in unflatten or, on the CPU, in a pass over each
reduced bucket. A norm is then a sum of some hundred numbers. These hold for the gradients that the
reduction has written. So before they are used, each ``.grad`` must be the same tensor, with the
same version, as at that time. Gradients that have changed since are measured again.
"""

from __future__ import annotations

import math
import struct
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter, is_, methodcaller
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from tritonddp._device import Readback
from tritonddp._torch import count_unscaling, foreach_mul_
from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.parameters import parameters_of
from tritonddp.comm.reduction import Reduction
from tritonddp.coordination.counters import Counters
from tritonddp.kernels.reference import norm_of, norms_of
from tritonddp.reducer.extension import Extension
from tritonddp.reducer.graph.backward import Backward
from tritonddp.reducer.reducer import Reducer

_grad_of = attrgetter("grad")
_version_of = attrgetter("_version")
_address_of = methodcaller("data_ptr")

# The gradient noise scale is computed from running means over reductions. In each reduction the
# mean so far keeps this share.
_DECAY = 0.99
# On the CPU the squares of this rank take a pass of their own, made in one reduction of so many.
_EVERY = 8
_REPORT = struct.Struct("<d")
_DOUBLE = (torch.float64, torch.complex128)


class _Reduced:
    """The gradients of a bucket as the reduction has left them. It does not keep them alive.

    Attributes:
        params: parameters of the bucket.
        dtype: of the gradients.
        squares: sum of squares of the reduced gradients, in parts; ``None`` without any gradient.
        local: the same of this rank's gradients before the reduction; ``None`` if not measured.
        bucket: weak reference to the bucket, if all gradients are bucket views.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.params, self.dtype = bucket.params, bucket.gradient_dtype
        grads: list[Any] = list(map(_grad_of, bucket.params))
        there = [grad for grad in grads if grad is not None]
        in_place = bucket.has_views and all(map(is_, grads, bucket.flat.views))
        self.squares = _squares_of(bucket, there, in_place, len(there) == len(grads))
        self.local: list[Tensor] | None = None
        counted, count = bucket.squares, len(bucket.segments)
        if counted is not None and counted.of_flattened and len(counted.flattened) == count:
            self.local = list(counted.flattened.values())
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
    """Keeps the sums of squares of the last reduction, and sends this rank's to the other ranks.

    A *report* is the bytes that a rank sends to all others in a reduction, beside the gradients.

    Attributes:
        local_squares: sum of squares of this rank's gradients before the last reduction, fp64,
            without dimensions. ``None`` if that was not measured, or if the reduction was not that
            of a whole backward with equal weights of all ranks.
        scale: the gradient noise scale, ``None`` while it is not known.
    """

    report_nbytes = _REPORT.size

    def __init__(
        self, world_size: int, counters: Counters, divide_factor: float | None = None
    ) -> None:
        count_unscaling()
        self._counters = counters
        self._world_size = world_size
        # Factor of the squares of what was reduced, which may be divided by another number.
        self._to_mean = 1.0 if divide_factor is None else (divide_factor / world_size) ** 2
        self._reduced: list[_Reduced] = []
        self._is_replayed = False  # a CUDA graph writes gradients, which is not noticed here
        self.local_squares: Tensor | None = None
        self._readback: Readback | None = None
        self._read: Any = None  # returns this rank's squares and those of the mean: see on_end()
        self._mean_squares = math.nan  # squares of the mean, in the reduction of the last report
        self._noise = self._signal = 0.0  # running means over reductions
        self._decay = _DECAY

    def current(self) -> list[_Reduced]:
        """The buckets whose gradients are unchanged since the last reduction."""
        return [] if self._is_replayed else [each for each in self._reduced if each.is_current()]

    def on_begin(self, backward: Backward) -> None:
        """Gradients change from here on: forget the sums of the last reduction."""
        self._reduced.clear()
        if (reduction := backward.reduction) is not None:
            is_measured = self._counters.reductions % _EVERY == 1 % _EVERY
            for bucket in reduction.buckets:
                if bucket.squares is None and not bucket.is_sparse:
                    bucket.sum_squares()
                if bucket.squares is not None and bucket.params[0].is_cpu:
                    bucket.squares.of_flattened = is_measured
                    self._decay = _DECAY**_EVERY

    def on_reduced(self, reduction: Reduction, bucket: Bucket) -> None:
        """Note the gradients of a reduced bucket."""
        if not reduction.of_backwards:
            return
        if not bucket.index:  # on_begin() is not called on a rank without inputs
            self._reduced.clear()
        self._is_replayed = self._is_replayed or reduction.is_captured
        self._reduced.append(_Reduced(bucket))

    def on_end(self, reduction: Reduction) -> None:
        """Sum up the squares for the next report."""
        self.local_squares = self._read = None
        if not (reduction.of_backwards and _is_plain_mean(reduction)):
            return
        local = [each.local for each in self._reduced]
        mean = [each.squares for each in self._reduced if each.squares is not None]
        if None in local or not mean:
            return
        self.local_squares = _total([part for parts in local for part in parts or ()])
        both = torch.stack([self.local_squares, _total(mean)])
        if both.is_cpu:
            self._read = lambda: both
            return
        if self._readback is None:
            self._readback = Readback()
        self._readback.start(torch.nan_to_num(both, nan=-1.0, posinf=-1.0))
        self._read = self._readback.wait

    def on_abort(self, reduction: Reduction | None) -> None:
        """The reduction failed: forget its sums."""
        self._reduced.clear()
        self.local_squares = self._read = None

    def report(self, reduction: Reduction) -> bytes:
        """This rank's squares in the reduction before; NaN if they are not known.

        (On a GPU the host waits here for the end of the backward before. The device has the next
        forward to run meanwhile.)
        """
        local, self._mean_squares = math.nan, math.nan
        if self._read is not None and not reduction.is_captured:
            local, squares = self._read().tolist()
            self._mean_squares = squares * self._to_mean
        self._read = None
        return _REPORT.pack(local)

    def take_reports(self, reports: Sequence[bytes]) -> None:
        """Add the squares of all ranks to the running means."""
        local = [_REPORT.unpack(report)[0] for report in reports]
        small, big, size = sum(local) / len(local), self._mean_squares, self._world_size
        # (A rank that made no report has sent zeros.)
        if min(local) <= 0 or not 0 <= big < math.inf or not math.isfinite(small):
            return
        noise = (small - big) / (1 - 1 / size)
        signal = (size * big - small) / (size - 1)
        self._noise = self._decay * self._noise + (1 - self._decay) * noise
        self._signal = self._decay * self._signal + (1 - self._decay) * signal

    @property
    def scale(self) -> float | None:
        """See the class."""
        if self._noise == self._signal == 0:
            return None
        return self._noise / self._signal if self._signal > 0 else math.inf


def _is_plain_mean(reduction: Reduction) -> bool:
    """Whether the reduction made the mean over all ranks with equal weights."""
    is_weighted = reduction.factor is not None  # or is the mean over the ranks that have inputs
    is_all_here = not (reduction.skipped or reduction.is_captured)
    return reduction.bucket_set.averages and is_all_here and not is_weighted


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
                f"{self._core.where()}: grad_norm(per_parameter=True) and grad_noise_scale() with "
                "ZeroRedundancyOptimizer: each rank has the gradients that it owns alone. "
                "grad_norm() gives the norm of all"
            )

    def noise_scale(self) -> float:
        """See :meth:`tritonddp.DistributedDataParallel.grad_noise_scale`."""
        self._refuse_owners()
        if self._last is None:
            raise RuntimeError(
                f"rank {self._core.group.rank}: grad_noise_scale() needs grad_norm=True when the "
                "module is wrapped, and a process group of two ranks or more"
            )
        if self._last.scale is None:
            raise RuntimeError(
                f"{self._core.where()}: the gradient noise scale is not known yet. It takes two "
                "reduced backwards. Not counted are backwards that are weighted, are quantised, "
                "use a communication hook, leave out buckets, have sparse gradients, were captured "
                "in a CUDA graph, or run inside join() when some ranks have no inputs left"
            )
        return self._last.scale

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
