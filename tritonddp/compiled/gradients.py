"""Gradients that a compiled backward announces before autograd receives them.

A compiled backward is one autograd node: parameters receive their gradients after the whole node
has run. However, the graph calls an operator as soon as a gradient is computed (see
:mod:`tritonddp.compiled.operators`). A segment (a range of parameters of one bucket) is therefore
flattened when all its gradients are computed, and its bucket is launched while the rest of the
backward runs. Everything else is unchanged: autograd passes the same gradients to their parameters
afterwards, and the end of the backward overwrites them with the means.

This requires that autograd passes gradients on unchanged. Autograd may add other gradients (in
``.grad``, for example after ``no_sync``, or from a use of the parameter outside the graph), and
user hooks may change a gradient. The first backward that announces a gradient checks this. The
gradients that autograd changes wait for the end of each backward.

The last bucket with such gradients always waits for the end, because they are computed last. If a
gradient turns out to have been sent too early, this bucket is filled with NaN, so that no rank
takes the step without noticing.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import NoneType
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from tritonddp._torch import backward_hooks_of, hooks_after_accumulation, queue_end_of_backward
from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.bucket_set import BucketSet
from tritonddp.comm.reduction import Reduction
from tritonddp.kernels.dispatch import gradient_dtype
from tritonddp.kernels.memory_order import dims_by_stride, gradient_strides
from tritonddp.reducer.autograd_driver import AutogradDriver
from tritonddp.reducer.deferred import raise_error
from tritonddp.reducer.extension import Extension
from tritonddp.reducer.graph.backward import Backward, Forward

logger = logging.getLogger(__name__)

# Number of forwards that are remembered for their backwards: no pipeline has more in flight.
_FORWARDS = 1024


class _Announced(NamedTuple):
    """A gradient that the graph has announced, identified by its address and version."""

    param: Parameter
    address: int
    version: int

    def is_handed_over(self) -> bool:
        """Return True if autograd has passed it to its parameter unchanged."""
        grad = self.param.grad
        return grad is not None and (grad.data_ptr(), grad._version) == self[1:]


class GraphGradients(Extension):
    """Packs (flattens) a segment when a compiled backward has announced all its gradients."""

    needs_reached = True

    def __init__(self, driver: AutogradDriver) -> None:
        self._driver: Callable[[], AutogradDriver | None] = weakref.ref(driver)
        self._forwards: dict[int, Forward] = {}
        self._pending = 0  # forwards with gradients since the last backward
        self._bucket_set: Callable[[], object] = NoneType  # indices below refer to this set
        self._index_of: dict[str, int] = {}  # parameter indices by name
        # By parameter name: whether autograd passes the announced gradient on unchanged.
        self._is_whole: dict[str, bool] = {}
        self._early: set[int] = set()  # segments in which this holds for all parameters
        self._dense: list[int] = []  # indices of buckets with announced, dense gradients
        # State of the current backward.
        self._is_single = False  # it is reduced and belongs to one forward
        self._packs: Collection[int] = ()  # segments that may be packed before the end
        self._held: Bucket | None = None  # the bucket that waits for the end
        self._failure = ""  # the error to raise
        self._announced: dict[str, _Announced] = {}
        self._incomplete: dict[int, list[Tensor | None]] = {}  # gradients of incomplete segments
        self._packed: list[int] = []  # packed segments

    # Forward

    def begin_forward(self, forward: Forward) -> int:
        """Begin a traced forward. Return its number, by which the graph refers to it."""
        self._forwards[forward.seq] = forward
        if len(self._forwards) > _FORWARDS:
            del self._forwards[next(iter(self._forwards))]
        return forward.seq

    def on_forward(self) -> None:
        """Count a forward, traced or not."""
        self._pending += 1

    # Backward

    def on_begin(self, backward: Backward) -> None:
        """Begin a backward. If it belongs to several forwards, pack nothing early.

        Autograd adds up their gradients, so an announced gradient is only a part.
        """
        pending, self._pending = self._pending, 0
        self._forget()
        self._failure = ""
        reduction, core = backward.reduction, self._driver()
        self._is_single = pending == 1 and reduction is not None
        if reduction is None:
            return
        bucket_set = reduction.bucket_set
        if bucket_set is not self._bucket_set():
            self._find_early(bucket_set)
        held = max((index for index in self._dense if index not in reduction.skipped), default=0)
        if not self._is_single or not held or core is None:
            return
        if backward.is_provisional or reduction.is_captured or reduction.is_alone:
            return
        # finalize_backward() may be called during the backward, once all buckets are launched.
        # Steps of optimizers in the backward could not be undone.
        if core.finalizes_manually or core.steps_optimizers:
            return
        self._held = reduction.buckets[held]
        reduction.hold(held)  # until the end of the backward
        ranges, first_held = bucket_set.ranges, bucket_set.segments_of[held].start
        self._packs = {
            each
            for each in self._early
            # Not if a gradient is missing: autograd would copy the gradients that wait for it.
            if each < first_held
            and all(bucket_set.use.expected[ranges[each].start : ranges[each].stop])
        }

    def ready(self, name: str, grad: Tensor, forward: int) -> None:
        """Record that a compiled backward has computed the gradient of parameter ``name``."""
        core = self._driver()
        if core is None:
            return
        if core.backward is None or not core.backward.runs:
            core.on_backward(self._forwards.get(forward))
        backward = core.backward
        if backward is None or backward.reduction is None or not self._is_single:
            return
        bucket_set = backward.reduction.bucket_set
        param_index = self._index_of.get(name)
        # Not in a bucket (an input, or an added parameter), or dropped by autograd.
        if param_index is None or not bucket_set.use.expected[param_index] or grad.is_sparse:
            return
        param = bucket_set.params[param_index]
        if param.grad is not None:  # autograd will add to it
            return
        self._announced[name] = _Announced(param, grad.data_ptr(), grad._version)
        segment = core.tracker.segment_of[param_index]
        if segment not in self._packs:
            return
        indices = bucket_set.ranges[segment]
        grads = self._incomplete.setdefault(segment, [None] * len(indices))
        grads[param_index - indices.start] = grad
        if NoneType not in map(type, grads):
            del self._incomplete[segment]
            self._pack(core, backward.reduction, segment, grads)

    def _pack(
        self, core: AutogradDriver, reduction: Reduction, segment_index: int, grads: list[Any]
    ) -> None:
        """Pack a segment whose gradients are all computed, unless autograd would change one."""
        bucket, segment = reduction.bucket_set.segments[segment_index]
        if (
            reduction.packed[segment_index]
            or bucket.storage.is_sparse
            or not all(map(_is_free, segment.params, grads))
        ):
            return
        for param, grad in zip(segment.params, grads, strict=True):
            param.grad = grad
        try:
            core.on_segment_ready(segment_index)
        finally:
            # Otherwise, autograd would add to them. If a gradient has no other reference, autograd
            # sets it as .grad without a copy.
            for param in segment.params:
                param.grad = None
            bucket.storage.fetch(bucket, segment)
        self._packed.append(segment_index)

    def on_compute_end(self, backward: Backward) -> None:
        """Check and fetch the early gradients, after autograd has passed on all gradients."""
        core, reduction = self._driver(), backward.reduction
        if reduction is None:
            self._forget()
            return
        sent = {
            name
            for segment_index in self._packed
            for name in self._names_in(reduction, segment_index)
        }
        self._learn(reduction, sent)
        for segment_index in self._packed:
            bucket, segment = reduction.bucket_set.segments[segment_index]
            bucket.storage.fetch(bucket, segment)
        changed = next((name for name in sorted(sent) if not self._is_whole[name]), None)
        if changed is not None and self._held is not None:
            self._failure = _too_early(reduction.where, changed, self._held)
            logger.error(self._failure)  # now: check_finite, for example, may raise first
            reduction.spoil(self._held)
        if (
            backward.is_provisional and core is not None
        ):  # buckets will follow the order of this log
            first = {id(each.param): each.param for each in self._announced.values()}
            ready = core.use.ready
            ready[:] = [*first.values(), *(param for param in ready if id(param) not in first)]
        self._forget()

    def on_end(self, reduction: Reduction) -> None:
        """Raise the error of this backward, after other wrappers in it have ended."""
        failure, self._failure = self._failure, ""
        if failure:
            queue_end_of_backward(partial(raise_error, RuntimeError(failure)))

    def _learn(self, reduction: Reduction, sent: Collection[str]) -> None:
        """Record for each announced gradient whether autograd has passed it on unchanged."""
        # Gradients that are referenced here had to be copied.
        kept = {
            name
            for segment_index in self._incomplete
            for name in self._names_in(reduction, segment_index)
        }
        for name, announced in self._announced.items():
            was_whole, is_whole = self._is_whole.get(name), announced.is_handed_over()
            # A gradient that was changed once may be changed again.
            if name in kept or was_whole is is_whole or was_whole is False:
                continue
            # Each backward looks for visible hooks before it sends.
            if not is_whole and name not in sent and _has_hooks(announced.param):
                continue
            self._is_whole[name] = is_whole
            self._bucket_set = NoneType  # the next backward finds early segments again

    def _names_in(self, reduction: Reduction, segment: int) -> Sequence[str]:
        indices = reduction.bucket_set.ranges[segment]
        return reduction.bucket_set.names[indices.start : indices.stop]

    def on_abort(self, reduction: Reduction | None) -> None:
        """Discard the gradients and the error of the failed backward."""
        self._forget()
        self._failure = ""

    def _forget(self) -> None:
        self._announced.clear()
        self._incomplete.clear()
        self._packed.clear()
        self._packs, self._held = (), None

    def _find_early(self, bucket_set: BucketSet) -> None:
        """Find the segments of new buckets that may be packed early."""
        self._bucket_set = weakref.ref(bucket_set)
        self._index_of = {name: index for index, name in enumerate(bucket_set.names)}
        whole = [self._is_whole.get(name, False) for name in bucket_set.names]
        self._early = {
            index
            for index, each in enumerate(bucket_set.ranges)
            if all(whole[each.start : each.stop])
        }
        self._dense = [
            bucket.index
            for bucket in bucket_set.buckets
            if not bucket.storage.is_sparse and not self._is_whole.keys().isdisjoint(bucket.names)
        ]


def _is_free(param: Parameter, grad: Tensor) -> bool:
    """Return True if autograd will pass ``grad`` on unchanged, as far as can be known."""
    return (
        param.grad is None
        and not _has_hooks(param)
        and grad.shape == param.shape
        and _lies_as(param, grad)
        and grad.dtype is gradient_dtype(param)
        and grad.device == param.device
    )


def _has_hooks(param: Parameter) -> bool:
    """Return True if a user hook receives the gradient of ``param``, as far as can be known."""
    return bool(backward_hooks_of(param)) or bool(hooks_after_accumulation(param))


def _lies_as(param: Parameter, grad: Tensor) -> bool:
    """Return True if ``grad`` has the memory order that autograd gives gradients of ``param``."""
    if grad.stride() == param.stride():
        return True
    order = dims_by_stride(grad.shape, grad.stride())
    return order is not None and order == dims_by_stride(param.shape, gradient_strides(param))


def _too_early(where: str, name: str, spoiled: Bucket) -> str:
    return (
        f"{where}: the gradient of {name!r} was sent as soon as the compiled backward had "
        "computed it, but autograd then gave the parameter another gradient, unlike in earlier "
        "steps. Possible causes: the parameter is also used outside the compiled graph or in "
        "another forward of this backward, a hook changed or kept its gradient, or "
        "create_graph=True was set. From the next step on, its bucket waits for the end of the "
        f"backward. In this step, .grad is not the mean, and is NaN in {spoiled.title}, on all "
        "ranks: skip or repeat the step on all ranks"
    )
