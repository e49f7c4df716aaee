"""When gradients are reduced: readiness, launch order, end of backward.

One gradient, from ``backward()`` to ``.grad``::

    backward starts   _begin     ask the engine which parameters it will reach; count per bucket
    gradient ready    hook       one counter goes down, nothing else
    bucket full       _launch    reduction.start: one flatten, one asynchronous all-reduce
    backward ends     _end       launch what is left; reduction.finish: wait, one unflatten
"""

from __future__ import annotations

import enum
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from tritonddp._compat import (
    current_autograd_node,
    current_graph_task_id,
    queue_end_of_backward,
)
from tritonddp.bucket import Bucket, BucketCaps, GradientError, ViewBucket, assign_buckets
from tritonddp.comm.reduction import AllReduce, Work
from tritonddp.counters import Counters
from tritonddp.kernels import select
from tritonddp.participation import Participation, accumulates

logger = logging.getLogger(__name__)


class Phase(enum.Enum):
    """Where a reducer stands."""

    IDLE = "no backward runs"
    LOCAL = "a backward runs that only accumulates (no_sync)"
    OBSERVING = "the first reduced backward runs: note the order of gradients, launch at its end"
    REDUCING = "a backward runs, buckets are launched as they fill"


class Reducer:
    """Reduces the gradients of ``params`` over ``process_group`` during each backward.

    Args:
        named_params: parameters that require gradients, with their names, in the same order on
            every rank.
        process_group: the ranks to average over.
        caps: bucket sizes.
        should_sync: asked when a backward starts: is it reduced, or does it only accumulate?
        gradient_as_bucket_view: gradients live in the buckets.
        strict: an unused parameter is an error at the next forward.

    Attributes:
        buckets: in launch order.
        counters: what was launched and sent so far.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, Parameter]],
        process_group: dist.ProcessGroup,
        caps: BucketCaps,
        should_sync: Callable[[], bool],
        gradient_as_bucket_view: bool = False,
        strict: bool = False,
    ) -> None:
        self.counters = Counters()
        self.buckets: list[Bucket] = []
        self._names = [name for name, _ in named_params]
        self._params = [param for _, param in named_params]
        self._group = process_group
        self._caps = caps
        self._should_sync = should_sync
        self._bucket_class = ViewBucket if gradient_as_bucket_view else Bucket
        self._strict = strict
        self._participation = Participation(self._params)
        self._reduction = AllReduce(process_group, self.counters)

        count = len(self._params)
        self._phase = Phase.IDLE
        self._graph_task = -1
        # Reached in backwards under no_sync since the last reduction: they take part in the next.
        self._used_earlier = [False] * count
        self._used = [False] * count
        # The hooks work on these two lists, which are therefore changed in place only.
        self._awaited = [False] * count
        self._pending: list[int] = []
        self._bucket_of = [0] * count
        self._next = 0
        self._in_flight: list[tuple[Bucket, Work]] = []
        # Parameters whose gradients came from an inner backward (reentrant checkpoint), which the
        # engine does not announce when the outer one starts.
        self._inner: set[int] = set()
        # Order of gradients in the first reduced backward; None once the buckets follow it.
        self._ready_order: dict[int, None] | None = {}
        self._unused_error: str | None = None
        self._launching = threading.Lock()
        self._hooks: list[Any] = []
        # Registration order is roughly forward order, so its reverse is a guess at ready order.
        self._build_buckets(list(reversed(range(count))))

    # Forward

    def prepare_for_forward(self) -> None:
        """Check that the last backward came to its end.

        Raises:
            RuntimeError: in strict mode, the last backward left parameters unused.
        """
        if self._phase is not Phase.IDLE and current_graph_task_id() == -1:
            self._abandon()
        if self._unused_error is not None:
            message, self._unused_error = self._unused_error, None
            raise RuntimeError(message)

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """See the start of each backward that runs through one of these output tensors.

        Without it the first gradient would do, but a backward that reaches no parameter of this
        rank must still take part, and one that starts with a reentrant checkpoint must be seen
        before its inner backward.
        """
        reducer = weakref.ref(self)
        for output in outputs:
            # A tensor that the module only hands on may live long: it gets one hook.
            if output.grad_fn is None or getattr(output, "_tritonddp_watched_by", None) == reducer:
                continue
            output._tritonddp_watched_by = reducer  # type: ignore[attr-defined]
            output.register_hook(_backward_start_hook(reducer))

    # Start of backward

    def begin(self) -> None:
        """A backward runs: if it is a new one, find out what it will reach. Called from hooks."""
        if self._phase is not Phase.IDLE:
            return
        reached = self._participation.query()
        if reached is None or (not any(reached) and not accumulates(current_autograd_node())):
            return  # torch.autograd.grad: it returns gradients, and none is ours
        queue_end_of_backward(self._end)
        self._graph_task = current_graph_task_id()
        if not self._should_sync():
            self._phase = Phase.LOCAL
            return
        self.counters.reductions += 1
        self._next = 0
        if self._ready_order is not None:
            self._phase = Phase.OBSERVING
            self._used = list(self._used_earlier)
            return
        self._phase = Phase.REDUCING
        self._used = [now or earlier for now, earlier in zip(reached, self._used_earlier, strict=True)]
        self._awaited[:] = reached
        self._pending[:] = [
            sum(map(reached.__getitem__, bucket.param_indices)) for bucket in self.buckets
        ]
        if self._inner:
            self._hold_for_inner_backwards(reached)
        self.launch_full()

    def _hold_for_inner_backwards(self, reached: Sequence[bool]) -> None:
        """Keep buckets back until the end whose gradients may still come, or come again."""
        for bucket in self.buckets:
            if any(not reached[i] or i in self._inner for i in bucket.param_indices):
                self._pending[bucket.index] += 1

    # A gradient is ready

    def _install_hooks(self) -> None:
        """Register the hooks; again whenever parameters changed buckets."""
        for handle in self._hooks:
            handle.remove()
        reducer = weakref.ref(self)
        self._hooks = [
            node.register_hook(
                _gradient_ready_hook(reducer, self._awaited, self._pending, index, bucket)
            )
            for index, (node, bucket) in enumerate(
                zip(self._participation.nodes, self._bucket_of, strict=True)
            )
        ]

    def gradient_ready(self, index: int, defined: bool) -> None:
        """A gradient arrived that the short path of the hook does not cover.

        Args:
            index: number of the parameter.
            defined: False if a custom function returned ``None`` for it.

        Raises:
            RuntimeError: its bucket has been sent already.
        """
        if self._phase is Phase.IDLE:
            self.begin()
        if self._phase is Phase.LOCAL:
            self._used_earlier[index] |= defined
        elif self._phase is Phase.OBSERVING:
            assert self._ready_order is not None
            self._ready_order.setdefault(index)
            self._used[index] |= defined
            if current_graph_task_id() != self._graph_task:
                self._inner.add(index)
        elif self._phase is Phase.REDUCING and self._awaited[index]:
            self._awaited[index] = False
            if not defined:
                self._used[index] = self._used_earlier[index]
            self._pending[self._bucket_of[index]] -= 1
            self.launch_full()
        elif self._phase is Phase.REDUCING:
            self._inner.add(index)
            self._used[index] |= defined
            if self._bucket_of[index] < self._next:
                raise RuntimeError(
                    f"{self._where()}: the gradient of {self._names[index]!r} arrived after its "
                    f"bucket {self._bucket_of[index]} had been sent. It comes from an inner "
                    "backward (torch.utils.checkpoint with use_reentrant=True) that was not there "
                    "in the first step. From the next step on such gradients are waited for; use "
                    "use_reentrant=False to have them announced and this step work too."
                )

    # A bucket is full

    def launch_full(self) -> None:
        """Launch the buckets that have all their gradients, in bucket order."""
        with self._launching:  # hooks of a multi-device module run on one thread per device
            while self._next < len(self.buckets) and self._pending[self._next] == 0:
                self._launch(self.buckets[self._next])

    def _launch(self, bucket: Bucket) -> None:
        used = [self._used[index] for index in bucket.param_indices]
        try:
            with torch.no_grad():
                self._in_flight.append((bucket, self._reduction.start(bucket, used)))
        except GradientError as error:
            raise GradientError(f"{self._where()}: {error}") from None
        self._next += 1

    # End of backward

    def _end(self) -> None:
        """The backward is over: bring all gradients home."""
        if self._phase is Phase.LOCAL:
            self._phase = Phase.IDLE
            return
        try:
            for bucket in self.buckets[self._next :]:
                self._launch(bucket)
            self._finish()
            if self._strict:
                self._note_unused()
        finally:
            self._reset()

    def _finish(self) -> None:
        """Wait for the buckets in launch order, emptying one while the next is on its way."""
        with torch.no_grad():
            for bucket, work in self._in_flight:
                self._reduction.finish(bucket, work)
            if self._ready_order is not None:
                self._follow_ready_order()

    def _reset(self) -> None:
        self._in_flight.clear()
        self._awaited[:] = [False] * len(self._awaited)
        self._used_earlier = [False] * len(self._used_earlier)
        self._phase = Phase.IDLE

    def _abandon(self) -> None:
        """The last backward broke off with an exception: leave no collective half-done.

        The other ranks will issue, or have issued, all collectives of that step. This rank takes
        part in those it has not launched yet, with NaN, so that the next step starts in step.
        """
        if self._phase is Phase.LOCAL:
            self._phase = Phase.IDLE
            return
        logger.warning("%s: the last backward did not come to its end", self._where())
        try:
            for bucket in self.buckets[self._next :]:
                self._in_flight.append((bucket, self._reduction.start_poisoned(bucket)))
            for _, work in self._in_flight:
                work.wait()
            if self._ready_order is not None:
                self._follow_ready_order()
        finally:
            self._reset()

    def _note_unused(self) -> None:
        unused = [name for name, used in zip(self._names, self._used, strict=True) if not used]
        if unused:
            self._unused_error = (
                "Expected to have finished reduction in the prior iteration before starting a new "
                f"one: {self._where()} left {len(unused)} parameters without a gradient: "
                f"{', '.join(unused[:10])}{', ...' if len(unused) > 10 else ''}. They were unused "
                "in producing the loss, and find_unused_parameters=False makes this an error. "
                "Leave find_unused_parameters at its default to allow it."
            )

    def _where(self) -> str:
        return f"rank {self._group.rank()}, step {self.counters.reductions}"

    # Buckets

    def _follow_ready_order(self) -> None:
        """Once, after the first reduced backward: order buckets as rank 0's gradients came.

        Every rank that took part in that reduction is here, so this one broadcast matches. What
        never arrived on rank 0 goes last.
        """
        assert self._ready_order is not None
        arrived, self._ready_order = self._ready_order, None
        missing = [i for i in reversed(range(len(self._params))) if i not in arrived]
        order = torch.tensor([*arrived, *missing], device=self._params[0].device)
        dist.broadcast(order, group=self._group, group_src=0)
        self.counters.collectives += 1
        self.counters.wire_bytes += order.numel() * order.element_size()
        self._build_buckets(order.tolist())

    def _build_buckets(self, order: Sequence[int]) -> None:
        """Assign parameters to buckets by the order in which their gradients become ready."""
        assignment = assign_buckets(self._params, order, self._caps)
        if assignment == [bucket.param_indices for bucket in self.buckets]:
            return
        # Former buckets are let go before new ones are made. One lives on, by the gradients that
        # are views of it, until the last of these has moved.
        placed: dict[int, Tensor] = {}
        for bucket in self.buckets:
            placed.update(bucket.placed_gradients())
        self._in_flight.clear()
        self.buckets.clear()
        for number, indices in enumerate(assignment):
            params = [self._params[index] for index in indices]
            names = [self._names[index] for index in indices]
            kernels = select(params[0].device)
            bucket = self._bucket_class(number, indices, params, names, kernels, self.counters)
            bucket.adopt(placed)
            self.buckets.append(bucket)
            for index in indices:
                self._bucket_of[index] = number
        self._pending[:] = [0] * len(self.buckets)
        self._install_hooks()


# Hooks are plain functions that refer to the reducer weakly: autograd nodes hold them, and the
# reducer holds the nodes, a cycle through C++ that the garbage collector could not see.


def _gradient_ready_hook(
    reducer: weakref.ref[Reducer],
    awaited: list[bool],
    pending: list[int],
    index: int,
    bucket: int,
) -> Callable[[Any, tuple[Tensor | None, ...]], None]:
    """Hook on an AccumulateGrad node. It runs once a parameter and step: keep it short."""

    def gradient_ready(_: Any, grads: tuple[Tensor | None, ...]) -> None:
        if awaited[index] and grads[0] is not None:
            awaited[index] = False
            pending[bucket] -= 1
            if pending[bucket]:
                return
            owner = reducer()
            if owner is not None:
                owner.launch_full()
            return
        owner = reducer()
        if owner is not None:
            owner.gradient_ready(index, grads[0] is not None)

    return gradient_ready


def _backward_start_hook(reducer: weakref.ref[Reducer]) -> Callable[[Tensor], None]:
    """Hook on an output tensor of the module."""

    def backward_start(_: Tensor) -> None:
        owner = reducer()
        if owner is not None:
            owner.begin()

    return backward_start
