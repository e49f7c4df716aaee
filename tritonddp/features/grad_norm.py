"""Norms of the reduced gradients, clipping, and the gradient noise scale.

With ``grad_norm=True`` squares are summed while gradients pass through the buckets: those of this
rank where they are packed, those of the mean where they are written home, or, on the CPU, bucket by
bucket as soon as it is there. A norm is then a sum of some hundred numbers. It is that of the
gradients as the reduction has left them, so before it is used each ``.grad`` is compared with what
it was then: the same tensor of the same version. All that has changed since is measured anew.
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
from torch import Tensor
from torch.autograd.graph import increment_version

from tritonddp._device import Readback
from tritonddp._torch import count_unscaling, foreach_mul_
from tritonddp.buckets.bucket import Bucket
from tritonddp.comm.run import ReductionRun
from tritonddp.coordination.agreement import GradSource
from tritonddp.coordination.counters import Counters
from tritonddp.kernels.reference import norm_of, norms_of
from tritonddp.reducer.extension import Extension
from tritonddp.reducer.reducer import Reducer

_grad_of = attrgetter("grad")
_version_of = attrgetter("_version")
_address_of = methodcaller("data_ptr")

# Of what was measured in a reduction, in the means over reductions from which the gradient noise
# scale is made, what was measured before keeps this share.
_DECAY = 0.99
# On the CPU the squares of this rank take a pass of their own: only one reduction in so many
# is measured.
_EVERY = 8
_REPORT = struct.Struct("<d")
_DOUBLE = (torch.float64, torch.complex128)


class _Reduced:
    """The gradients of a bucket as the reduction has left them, none of which this keeps alive.

    Attributes:
        params: of the bucket.
        squares: their sum, in parts; ``None`` where there is no gradient.
        local: likewise of this rank's before the reduction; ``None`` if nobody has summed them.
        bucket: if it holds them all, as views, weakly.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.params = bucket.params
        grads: list[Any] = list(map(_grad_of, bucket.params))
        there = [grad for grad in grads if grad is not None]
        in_place = bucket.has_views and all(map(is_, grads, bucket.flat.views))
        self.squares = _squares_of(bucket, there, in_place, len(there) == len(grads))
        counted = bucket.squares
        self.local: list[Tensor] | None = None
        if (
            counted is not None
            and counted.of_flattened
            and len(counted.flattened) == len(bucket.segments)
        ):
            self.local = list(counted.flattened.values())
        self.bucket: Callable[[], Any] = weakref.ref(bucket) if in_place else NoneType
        self._grads: list[Callable[[], Any]] = [
            NoneType if grad is None else weakref.ref(grad) for grad in grads
        ]
        self._versions = list(map(_version_of, there))
        self._addresses = _addresses_of(there)

    def is_current(self) -> bool:
        """Whether the gradients are those that there were, and nobody has written to them."""
        grads: list[Any] = list(map(_grad_of, self.params))
        if not all(map(is_, grads, [each() for each in self._grads])):
            return False
        there = [grad for grad in grads if grad is not None]
        try:  # a list that is shorter had one more, which is gone
            versions = list(map(_version_of, there))
            return versions == self._versions and _addresses_of(there) == self._addresses
        except RuntimeError:  # one of inference mode has none
            return False


def _addresses_of(grads: Sequence[Tensor]) -> list[int]:
    """Where they are: somewhere else after ``grad.data = ...``."""
    try:
        return list(map(_address_of, grads))
    except RuntimeError:  # a sparse one is nowhere
        return []


def _squares_of(
    bucket: Bucket, there: Sequence[Tensor], in_place: bool, is_whole: bool
) -> Tensor | None:
    """The sum of squares of the gradients of a reduced bucket, by the least work."""
    counted, flat = bucket.squares, bucket.flat
    if counted is not None and counted.of_unflattened:
        found, counted.unflattened = counted.unflattened, None
        if found is not None and (in_place or not bucket.has_views):
            return found
    elif counted is not None and is_whole and (in_place or not bucket.has_views):
        # What the buffer holds is what the gradients hold, if some rank has used each.
        gapless = flat.layout.gapless
        if gapless is not None and bool(flat.flags.all()):
            return norm_of(flat.data[gapless[0] : gapless[1]]).double().square().view(1)
    return torch.stack(norms_of(there)).double().square() if there else None


class GradNorm(Extension):
    """Keeps the sums of squares of the last reduction, and reports this rank's to the others.

    Attributes:
        local_squares: of the gradients of this rank in the last reduction, before it, fp64 without
            dimensions; ``None`` if it was none of a whole backward whose mean weighs all ranks
            alike, or was not measured.
        scale: the gradient noise scale, ``None`` while nothing is known.
    """

    report_nbytes = _REPORT.size

    def __init__(self, world_size: int, counters: Counters) -> None:
        count_unscaling()
        self._counters = counters
        self._world_size = world_size
        self._reduced: list[_Reduced] = []
        self._run: Callable[[], object] = NoneType
        self._is_replayed = False  # CUDA graphs write gradients, which nobody here notices
        self.local_squares: Tensor | None = None
        self._readback: Readback | None = None
        self._read: Any = None  # what it brings, or the same on the CPU: see on_end()
        self._mean_squares = math.nan  # of the reduction that the last report was about
        self._noise = self._signal = 0.0  # means over reductions
        self._decay = _DECAY

    def current(self) -> list[_Reduced]:
        """Those buckets whose gradients are what the last reduction has left."""
        return [] if self._is_replayed else [each for each in self._reduced if each.is_current()]

    def on_begin(self, run: ReductionRun) -> None:
        """What there was is changed from here on."""
        self._reduced.clear()
        if not run.is_local and run.source is not GradSource.REQUEST:
            is_measured = self._counters.reductions % _EVERY == 1 % _EVERY
            for bucket in run.buckets:
                if bucket.squares is None and not bucket.is_sparse:
                    bucket.sum_squares()
                if bucket.squares is not None and bucket.params[0].is_cpu:
                    bucket.squares.of_flattened = is_measured
                    self._decay = _DECAY**_EVERY

    def on_reduced(self, run: ReductionRun, bucket: Bucket) -> None:
        """Note what there is now."""
        if not run.of_backwards:
            return
        if self._run() is not run:  # of a rank without inputs no backward begins
            self._reduced.clear()
            self._run = weakref.ref(run)
        self._is_replayed = self._is_replayed or run.is_captured
        self._reduced.append(_Reduced(bucket))

    def on_end(self, run: ReductionRun) -> None:
        """Sum up what the next report tells."""
        self.local_squares = self._read = None
        if self._run() is not run or not _is_plain_mean(run):
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

    def on_abort(self, run: ReductionRun) -> None:
        """Nothing is known of this one."""
        self._reduced.clear()
        self.local_squares = self._read = None

    def report(self, run: ReductionRun) -> bytes:
        """Squares of this rank in the reduction before; NaN where they are not known.

        (On a GPU the host waits for the end of the backward before, behind which the device has a
        forward to do.)
        """
        local, self._mean_squares = math.nan, math.nan
        if self._read is not None and not run.is_captured:
            local, self._mean_squares = self._read().tolist()
        self._read = None
        return _REPORT.pack(local)

    def take_reports(self, reports: Sequence[bytes]) -> None:
        """Take what all ranks have said into the means."""
        local = [_REPORT.unpack(report)[0] for report in reports]
        small, big, size = sum(local) / len(local), self._mean_squares, self._world_size
        # (Zeros are of a rank that was not asked.)
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


def _is_plain_mean(run: ReductionRun) -> bool:
    """Whether what was reduced is the mean over all ranks, each of which counts alike."""
    is_weighted = run.factor is not None  # or counts those ranks only that have inputs
    is_all_here = not (run.skipped or run.is_captured)
    return run.transport.averages and is_all_here and not is_weighted


def _total(parts: list[Tensor]) -> Tensor:
    """Their sum, fp64, without dimensions, on the device of the first; in a fixed order."""
    device, dtype = parts[0].device, parts[0].dtype
    if any(part.device != device or part.dtype is not dtype for part in parts):
        parts = [part.to(device, torch.float64) for part in parts]
    return torch.cat(parts).sum(dtype=torch.float64)


def _refuse(model: Any, what: str) -> None:
    """Raise a RuntimeError if gradients are not there now."""
    core: Reducer = model.core
    core.check_finalized()
    if core.backward_runs:
        raise RuntimeError(f"{core.where()}: {what} while a backward runs: wait for its end")
    if core.steps_optimizers:
        raise RuntimeError(
            f"{core.where()}: {what} where optimizers step in the backward: gradients are gone "
            "when all are there. Use an optimizer that steps after it"
        )


class _Measured:
    """All gradients of a module: which of them are as the last reduction left them, and the norm.

    Attributes:
        reduced: buckets whose gradients are.
        others: gradients that are not.
        total: the norm, without dimensions.
    """

    def __init__(self, model: Any, what: str) -> None:
        _refuse(model, what)
        extension = model.core.events.of(GradNorm)
        params = list(model.module.parameters())
        # Mostly there are no others than those in buckets, and that is found out in C.
        others = set(map(id, params))
        self.reduced: list[_Reduced] = []
        for each in [] if extension is None else extension.current():
            numbers = set(map(id, each.params))
            if numbers <= others:  # the module still has them, and no other bucket
                others -= numbers
                self.reduced.append(each)
        self.others: list[Any] = []
        if others:
            found = [param for param in params if id(param) in others and param.grad is not None]
            self.others = [param.grad for param in found]
        parts = [each.squares for each in self.reduced if each.squares is not None]
        if self.others:
            # On a GPU an operation a gradient would be a launch each.
            by_kind: dict[Any, list[Tensor]] = {}
            for norm in norms_of(self.others):
                by_kind.setdefault((norm.device, norm.dtype), []).append(norm)
            parts += [torch.stack(alike).double().square() for alike in by_kind.values()]
        dtypes = {each.params[0].dtype for each in self.reduced} | {g.dtype for g in self.others}
        dtype = torch.float32 if dtypes.isdisjoint(_DOUBLE) else torch.float64
        self.total = _total(parts).sqrt().to(dtype) if parts else torch.zeros(())

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by ``factor``, which has no dimensions."""
        grads = list(self.others)
        for each in self.reduced:
            mine = [param.grad for param in each.params if param.grad is not None]
            bucket: Any = each.bucket()
            if bucket is None or bucket.flat is None:  # a lazy one has let its memory go
                grads += mine
                continue
            bucket.flat.payload.mul_(factor.to(bucket.flat.data.device))
            increment_version(mine)  # each of these views has its own
        by_kind: dict[Any, list[Tensor]] = {}
        for grad in grads:
            if grad.is_sparse:
                grad.mul_(factor.to(grad.device))
            else:
                by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
        for (device, _), alike in by_kind.items():
            foreach_mul_(alike, factor.to(device))


# Methods of tritonddp.DistributedDataParallel, of which ``model`` is one.


@torch.no_grad()
def grad_norm(model: Any, per_parameter: bool = False) -> Tensor | dict[str, Tensor]:
    """The 2-norm of all gradients, as one vector.

    With ``grad_norm=True`` nothing is measured but gradients that have changed since they were
    reduced. The host waits for nothing. A change is noticed by the version of the tensor, which
    writes through ``.data``, NumPy or kernels of one's own do not count.

    Args:
        per_parameter: return the norm of each, by name, measured in a pass over all of them.

    Returns:
        fp32, or fp64 if a gradient is that, without dimensions, on the gradients' device; added up
        in that dtype, whatever the gradients have. Alike on all ranks, if the gradients are.

    Raises:
        RuntimeError: during a backward, before ``finalize_backward()``, or where optimizers step in
            the backward.

    Example::

        loss_function(model(inputs), targets).backward()
        print(float(model.grad_norm()), model.grad_norm(per_parameter=True))
    """
    if not per_parameter:
        return _Measured(model, "grad_norm()").total
    _refuse(model, "grad_norm()")
    named = [each for each in model.module.named_parameters() if each[1].grad is not None]
    grads = [param.grad for _, param in named]
    return {name: each for (name, _), each in zip(named, norms_of(grads), strict=True)}


@torch.no_grad()
def clip_grad_norm_(model: Any, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
    """Multiply all gradients by ``max_norm / (norm + 1e-6)``, if that is below 1.

    As ``torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)`` does, and sparse ones too.

    Returns:
        The norm before: see :meth:`grad_norm`, also for further errors.

    Raises:
        RuntimeError: ``error_if_nonfinite`` is set, and the norm is NaN or infinite.

    Example::

        loss_function(model(inputs), targets).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
    """
    measured = _Measured(model, "clip_grad_norm_()")
    total = measured.total
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"{model.core.where()}: the total norm of order 2 for gradients is non-finite, so it "
            "cannot be clipped. To disable this error and scale the gradients by the non-finite "
            "norm anyway, set `error_if_nonfinite=False`"
        )
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    # On a GPU the host would have to wait to find out.
    if not (factor.is_cpu and factor == 1):
        measured.scale(factor)
    return total


def grad_noise_scale(model: Any) -> float:
    """The gradient noise scale ``tr(S) / |G|^2``, in batches of one rank. Needs ``grad_norm=True``.

    About the batch from which on a larger one saves fewer and fewer steps: McCandlish et al., "An
    Empirical Model of Large-Batch Training", 2018, arXiv 1812.06162, appendix A.1. Made of
    ``|g|^2``, of one rank's gradients, mean over the ranks, and ``|m|^2`` of their mean over ``W``
    ranks: ``tr(S)`` is ``(|g|^2 - |m|^2) / (1 - 1 / W)`` and ``|G|^2`` is
    ``(W |m|^2 - |g|^2) / (W - 1)``, each averaged over reductions, the last hundred above all.
    Infinite while that leaves nothing of ``|G|^2``. Of all reductions but the last, on the CPU of
    one in eight; alike on all ranks. What is accumulated under :meth:`no_sync` is one batch.

    Raises:
        RuntimeError: the module was wrapped without that, or nothing is known yet.

    Example::

        model = tritonddp.DistributedDataParallel(module, grad_norm=True)
        for inputs, targets in batches:
            loss_function(model(inputs), targets).backward()
        print(f"about {model.grad_noise_scale():.1f} batches of one rank")
    """
    extension = model.core.events.of(GradNorm)
    if extension is None:
        raise RuntimeError(
            f"rank {model.group.rank}: grad_noise_scale() needs grad_norm=True when the module is "
            "wrapped, and a process group of two ranks or more"
        )
    if extension.scale is None:
        raise RuntimeError(
            f"{model.core.where()}: the gradient noise scale is not known yet. It takes two "
            "reduced backwards; those that are weighted, quantised, go through a communication "
            "hook, leave out buckets, have sparse gradients or were captured in a CUDA graph tell "
            "nothing of it, nor do those inside join() that not all ranks take part in"
        )
    return extension.scale
