"""Gradients that a compiled backward announces before autograd has them.

A compiled backward is one node of autograd: parameters get their gradients when all of it is over.
But the graph calls an operator as soon as a gradient is made (see
:mod:`tritonddp.compiled.operators`). So a segment (a range of parameters of one bucket) is
flattened when all its gradients are made, and its bucket is launched while the rest of the backward
runs. Everything else is unchanged: autograd hands the same gradients to their parameters
afterwards, and the end of the backward overwrites them with the means.

This is possible only for gradients that autograd hands over unchanged. It may add others (those in
``.grad``, as after ``no_sync``; or those of a use of the parameter outside of the graph), and hooks
of users may change a gradient. The first backward that announces a gradient checks that. Gradients
that autograd changes wait for the end of each backward.

The last bucket waits for the end, since its gradients are made last anyway. If a gradient turns out
to have been sent too early, NaN is sent in that bucket, so that no rank takes the step unseen.
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
    """A gradient that the graph has announced; its address and version identify it."""

    param: Parameter
    address: int
    version: int

    def is_handed_over(self) -> bool:
        """Whether autograd has given it to its parameter unchanged."""
        grad = self.param.grad
        return grad is not None and (grad.data_ptr(), grad._version) == self[1:]


class GraphGradients(Extension):
    """Packs (flattens) segments for which a compiled backward has announced all gradients."""

    needs_reached = True

    def __init__(self, driver: AutogradDriver) -> None:
        self._driver: Callable[[], AutogradDriver | None] = weakref.ref(driver)
        self._forwards: dict[int, Forward] = {}
        self._pending = 0  # forwards with gradients since the last backward
        self._bucket_set: Callable[[], object] = NoneType  # the numbers below are those of this one
        self._index_of: dict[str, int] = {}  # parameter numbers by name
        # By parameter name, whether autograd hands over the announced gradient unchanged.
        self._is_whole: dict[str, bool] = {}
        self._early: set[int] = set()  # segments in which that is so for all parameters
        self._dense: list[int] = []  # indices of the buckets of announced, dense gradients
        # State of this backward.
        self._is_single = False  # it is reduced, and belongs to one forward
        self._packs: Collection[int] = ()  # segments that may be packed before its end
        self._held: Bucket | None = None  # the bucket that waits for its end
        self._failure = ""  # the error that it will raise
        self._announced: dict[str, _Announced] = {}
        self._incomplete: dict[int, list[Tensor | None]] = {}  # gradients of segments
        self._packed: list[int] = []  # segments

    # Forward

    def begin_forward(self, forward: Forward) -> int:
        """A traced forward begins. Returns its number, by which the graph refers to it."""
        self._forwards[forward.seq] = forward
        if len(self._forwards) > _FORWARDS:
            del self._forwards[next(iter(self._forwards))]
        return forward.seq

    def on_forward(self) -> None:
        """A forward begins, traced or not."""
        self._pending += 1

    # Backward

    def on_begin(self, backward: Backward) -> None:
        """A backward begins. If it belongs to several forwards, nothing is packed early.

        (Autograd adds their gradients up, so an announced gradient is only a part.)
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
        # finalize_backward() may be called in the backward, when all buckets have been launched.
        # Steps of optimizers in the backward could not be undone.
        if core.finalizes_manually or core.steps_optimizers:
            return
        self._held = reduction.buckets[held]
        reduction.hold(held)  # until the end of the backward
        ranges, first_held = bucket_set.ranges, bucket_set.segments_of[held].start
        self._packs = {
            each
            for each in self._early
            # (A gradient that is kept for others, which do not come, is copied by autograd.)
            if each < first_held
            and all(bucket_set.use.expected[ranges[each].start : ranges[each].stop])
        }

    def ready(self, name: str, grad: Tensor, forward: int) -> None:
        """A compiled backward has made the gradient of parameter ``name``."""
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
        """Pack a segment whose gradients are all made, unless autograd would change one."""
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
            # Otherwise autograd would add to them. With no other reference to a gradient, autograd
            # sets it as .grad without a copy.
            for param in segment.params:
                param.grad = None
            bucket.storage.fetch(bucket, segment)
        self._packed.append(segment_index)

    def on_compute_end(self, backward: Backward) -> None:
        """Autograd has handed all gradients over."""
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
            logger.error(self._failure)  # since check_finite, for example, may raise before
            reduction.spoil(self._held)
        if (
            backward.is_provisional and core is not None
        ):  # buckets will follow the order of this log
            first = {id(each.param): each.param for each in self._announced.values()}
            ready = core.use.ready
            ready[:] = [*first.values(), *(param for param in ready if id(param) not in first)]
        self._forget()

    def on_end(self, reduction: Reduction) -> None:
        """Raise the error of this backward, behind the ends of other wrappers in it."""
        failure, self._failure = self._failure, ""
        if failure:
            queue_end_of_backward(partial(raise_error, RuntimeError(failure)))

    def _learn(self, reduction: Reduction, sent: Collection[str]) -> None:
        """Note of each announced gradient whether autograd has handed it over unchanged."""
        # Those that are referenced here had to be copied.
        kept = {
            name
            for segment_index in self._incomplete
            for name in self._names_in(reduction, segment_index)
        }
        for name, announced in self._announced.items():
            was_whole, is_whole = self._is_whole.get(name), announced.is_handed_over()
            # (One that was changed once, may be again.)
            if name in kept or was_whole is is_whole or was_whole is False:
                continue
            # Visible hooks are looked for in each backward, before it sends.
            if not is_whole and name not in sent and _has_hooks(announced.param):
                continue
            self._is_whole[name] = is_whole
            self._bucket_set = NoneType  # so that the next backward finds early segments again

    def _names_in(self, reduction: Reduction, segment: int) -> Sequence[str]:
        indices = reduction.bucket_set.ranges[segment]
        return reduction.bucket_set.names[indices.start : indices.stop]

    def on_abort(self, reduction: Reduction | None) -> None:
        """Forget the gradients, and the error, of the failed backward."""
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
    """Whether autograd will hand ``grad`` over unchanged, as far as this can be known."""
    return (
        param.grad is None
        and not _has_hooks(param)
        and grad.shape == param.shape
        and _lies_as(param, grad)
        and grad.dtype is gradient_dtype(param)
        and grad.device == param.device
    )


def _has_hooks(param: Parameter) -> bool:
    """Whether a hook of a user gets the gradient of ``param``, as far as this can be known."""
    return bool(backward_hooks_of(param)) or bool(hooks_after_accumulation(param))


def _lies_as(param: Parameter, grad: Tensor) -> bool:
    """Whether ``grad`` has the memory order that autograd gives to gradients of ``param``."""
    if grad.stride() == param.stride():
        return True
    order = dims_by_stride(grad.shape, grad.stride())
    return order is not None and order == dims_by_stride(param.shape, gradient_strides(param))


def _too_early(where: str, name: str, spoiled: Bucket) -> str:
    return (
        f"{where}: the gradient of {name!r} was sent when the compiled backward had made it, "
        "but then autograd gave the parameter another gradient, unlike in the steps before: the "
        "parameter is used outside of the compiled graph too, or in another forward of this "
        "backward, or a hook has changed or kept its gradient, or create_graph=True was set. From "
        "the next step on its bucket waits for the end of the backward. .grad of this step is not "
        f"the mean, and NaN in {spoiled.title}, on all ranks alike: skip the step on all ranks, or "
        "repeat it"
    )
