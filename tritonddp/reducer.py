"""When gradients are reduced: readiness, launch order, end of backward.

One gradient, from ``backward()`` to ``.grad``::

    backward starts   begin      ask the engine which parameters it will reach, and count them
    gradient ready    hook       one counter goes down, nothing else
    segment full      _fill      reduction.fill: one flatten; on a GPU a segment is a whole bucket
    bucket full       _launch    reduction.start: one asynchronous all-reduce
    backward ends     _end       launch what is left; reduction.finish: wait, one unflatten
"""

from __future__ import annotations

import enum
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, or_

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from tritonddp._compat import (
    current_autograd_node,
    current_graph_task_id,
    queue_end_of_backward,
)
from tritonddp.assignment import BucketCaps, assign_buckets
from tritonddp.bucket import Bucket, GradientError, ViewBucket
from tritonddp.comm.reduction import AllReduce, Reduction, Work
from tritonddp.counters import Counters
from tritonddp.kernels import select
from tritonddp.participation import accumulates
from tritonddp.readiness import Readiness

logger = logging.getLogger(__name__)

_dtype_of = attrgetter("dtype")


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
        on_backward: for a trace, else ``None``: called when a backward begins, with what is to
            run at its end; returns what runs instead.
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
        self.on_backward: Callable[[Callable[[], None]], Callable[[], None]] | None = None
        # Parameters are numbered in launch order, so that those of a segment are neighbours in
        # every list below: each is then read in one run, not at a cold address per parameter.
        self._names = [name for name, _ in named_params]
        self._params = [param for _, param in named_params]
        self._group = process_group
        self._caps = caps
        self._should_sync = should_sync
        self._bucket_class = ViewBucket if gradient_as_bucket_view else Bucket
        self._strict = strict
        self._reduction: Reduction = AllReduce(process_group, self.counters)

        count = len(self._params)
        self._phase = Phase.IDLE
        self._graph_task = -1
        self._creates_graph = False
        self._end_is_queued: Callable[[], object] = lambda: None
        self._watched = WeakTensorKeyDictionary()
        # Reached in backwards under no_sync since the last reduction: they take part in the next.
        self._used_earlier = [False] * count
        self._used = [False] * count
        self._places: list[_Place] = []  # where each segment is
        self._places_of: list[range] = []  # per bucket
        self._filled: list[bool] = []  # per segment
        self._unfilled: list[int] = []  # segments that wait for gradients, per bucket
        self._next = 0  # first bucket that is not launched
        self._in_flight: list[tuple[Bucket, Work]] = []
        # Parameters whose gradients came from an inner backward (reentrant checkpoint), which the
        # engine does not announce when the outer one starts.
        self._inner: set[int] = set()
        # Order of gradients in the first reduced backward; None once the buckets follow it.
        self._ready_order: dict[int, None] | None = {}
        self._unused_error: str | None = None
        self._launching = threading.Lock()
        self._readiness = Readiness((), (), self)
        # Registration order is roughly forward order, so its reverse is a guess at ready order.
        self._build_buckets(list(reversed(range(count))))

    # Forward

    def prepare_for_forward(self) -> None:
        """Check that the last backward came to its end, and that parameters are what they were.

        Raises:
            RuntimeError: in strict mode, the last backward left parameters unused; or a parameter
                has changed its dtype or device, and with it the autograd node that has our hook.
        """
        if self._phase is not Phase.IDLE and self._end_is_queued() is None:
            self._abandon()
        if torch.is_grad_enabled():
            self._check_parameters()
        if self._unused_error is not None:
            message, self._unused_error = self._unused_error, None
            raise RuntimeError(message)

    def _check_parameters(self) -> None:
        # All dtypes, 0.1 us each, but one device: who moves a module moves all of it.
        same = list(map(_dtype_of, self._params)) == self._dtypes
        if same and self._params[0].device == self._devices[0]:
            return
        for name, param, dtype, device in zip(
            self._names, self._params, self._dtypes, self._devices, strict=True
        ):
            was, now = (dtype, device), (param.dtype, param.device)
            if was != now:
                raise RuntimeError(
                    f"{self._where()}: parameter {name!r} was {was[0]} on {was[1]} when it was "
                    f"wrapped and is now {now[0]} on {now[1]}, so that its gradient would not be "
                    "synchronised: wrap the module again after such a change"
                )

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """See the start of each backward that runs through one of these output tensors.

        Without it the first gradient would do, but a backward that reaches no parameter of this
        rank must still take part, and one that starts with a reentrant checkpoint must be seen
        before its inner backward.
        """
        for output in outputs:
            # A tensor that the module only hands on may live long: it gets one hook.
            if output.grad_fn is not None and output not in self._watched:
                self._watched[output] = None
                output.register_hook(_backward_start_hook(weakref.ref(self)))

    # Start of backward

    def begin(self) -> None:
        """A backward runs: if it is a new one, find out what it will reach. Called from hooks."""
        if self._phase is not Phase.IDLE:
            if self._end_is_queued() is not None:
                return
            self._abandon()
        reached = self._readiness.participation.query()
        if reached is None or (not any(reached) and not accumulates(current_autograd_node())):
            return  # torch.autograd.grad: it returns gradients, and none is ours
        self._queue_end()
        self._graph_task = current_graph_task_id()
        self._creates_graph = torch.is_grad_enabled()
        if not self._should_sync():
            self._phase = Phase.LOCAL
            return
        self.counters.reductions += 1
        self._next = 0
        for bucket in self.buckets:
            bucket.begin()
        if self._ready_order is not None:
            self._phase = Phase.OBSERVING
            self._used = list(self._used_earlier)
            return
        self._used = list(map(or_, reached, self._used_earlier))
        self._readiness.expect(reached, self._inner)
        self._unfilled = [0] * len(self.buckets)
        for number, place in enumerate(self._places):
            self._unfilled[place.bucket.index] += self._readiness.waits(number)
        with self._launching:
            self._phase = Phase.REDUCING
            self._launch_full()

    def _queue_end(self) -> None:
        """Have :meth:`_end` called when this backward is over.

        A backward that breaks off drops its callbacks. So a weak reference to one, held by the
        engine alone, tells whether the backward that set the phase is still running.
        """

        def end() -> None:
            # Whatever keeps this function, a traceback say, must not make the reducer believe that
            # the backward goes on.
            self._end_is_queued = lambda: None
            self._end()

        if self.on_backward is not None:
            end = self.on_backward(end)
        self._end_is_queued = weakref.ref(end)
        queue_end_of_backward(end)

    # A gradient, a segment, a bucket is ready

    def gradient_ready(self, index: int) -> None:
        """A gradient arrived that :class:`Readiness` did not expect.

        Args:
            index: number of the parameter.

        Raises:
            RuntimeError: its segment has been flattened already.
        """
        if self._phase is Phase.IDLE:
            self.begin()
            place = self._places[self._readiness.segment_of(index)]
            segment = place.bucket.segments[place.number]
            place.bucket.touched(segment.first + index - place.first)
            if self._readiness.arrive(index):
                return
        if self._phase is Phase.LOCAL:
            self._used_earlier[index] = True
        elif self._phase is Phase.OBSERVING:
            assert self._ready_order is not None
            self._ready_order.setdefault(index)
            self._used[index] = True
            if current_graph_task_id() != self._graph_task:
                self._inner.add(index)
        elif self._phase is Phase.REDUCING:
            self._inner.add(index)
            self._used[index] = True
            number = self._readiness.segment_of(index)
            if self._filled[number]:
                raise RuntimeError(
                    f"{self._where()}: the gradient of {self._names[index]!r} arrived after its "
                    f"bucket {self._places[number].bucket.index} had been flattened. It comes "
                    "from an inner backward (torch.utils.checkpoint with use_reentrant=True) that "
                    "was not there in the first step. From the next step on such gradients are "
                    "waited for; with use_reentrant=False they are announced beforehand."
                )

    def segment_full(self, number: int) -> None:
        """All gradients of a segment are ready."""
        if self._phase is not Phase.REDUCING or self._filled[number]:
            return
        with self._launching:  # hooks of a multi-device module run on one thread per device
            self._fill(number)
            self._unfilled[self._places[number].bucket.index] -= 1
            self._launch_full()

    def _fill(self, number: int) -> None:
        if self._creates_graph and torch.is_grad_enabled():
            with torch.no_grad():
                return self._fill(number)
        place = self._places[number]
        segment = place.bucket.segments[place.number]
        for slot in place.bucket.untouched(segment):
            index = place.first + slot - segment.first
            self._used[index] = self._used_earlier[index]
        try:
            self._reduction.fill(
                place.bucket,
                segment,
                self._used[place.first : place.last],
            )
        except GradientError as error:
            raise GradientError(f"{self._where()}: {error}") from None
        self._filled[number] = True

    def _launch_full(self) -> None:
        """Launch the buckets that have all their gradients, in bucket order."""
        while self._next < len(self.buckets) and self._unfilled[self._next] == 0:
            self._launch(self.buckets[self._next])

    def _launch(self, bucket: Bucket) -> None:
        """Send a bucket, with zeros for the gradients that did not come."""
        for number in self._places_of[bucket.index]:
            if not self._filled[number]:
                self._fill(number)
        self._in_flight.append((bucket, self._reduction.start(bucket)))
        self._next += 1

    # End of backward

    def _end(self) -> None:
        """The backward is over: bring all gradients home."""
        if self._creates_graph and torch.is_grad_enabled():
            with torch.no_grad():
                return self._end()
        if self._phase is Phase.LOCAL:
            self._phase = Phase.IDLE
            return
        while self._next < len(self.buckets):
            self._launch(self.buckets[self._next])
        if self._strict:
            self._note_unused()
        self._finish()
        # Nothing of the frames above may still hold a bucket: it is let go here.
        if self._ready_order is not None:
            self._follow_ready_order()
        self._reset()

    def _finish(self) -> None:
        """Wait for the buckets in launch order, emptying one while the next is on its way."""
        for bucket, work in self._in_flight:
            self._reduction.finish(bucket, work)
        self._in_flight.clear()

    def _reset(self) -> None:
        self._in_flight.clear()
        self._filled = [False] * len(self._places)
        self._readiness.forget()
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
            while self._next < len(self.buckets):
                bucket = self.buckets[self._next]
                with torch.no_grad():
                    self._in_flight.append((bucket, self._reduction.start_poisoned(bucket)))
                self._next += 1
            for _, work in self._in_flight:
                work.wait()
            if self._ready_order is not None:
                self._follow_ready_order()
        finally:
            self._reset()

    def _note_unused(self) -> None:
        unused = [
            name
            for name, param, used in zip(self._names, self._params, self._used, strict=True)
            if not used or param.grad is None
        ]
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
        missing = [index for index in range(len(self._params)) if index not in arrived]
        order = torch.tensor([*arrived, *missing], device=self._params[0].device)
        dist.broadcast(order, group=self._group, group_src=0)
        self.counters.collectives += 1
        self.counters.wire_bytes += order.numel() * order.element_size()
        with torch.no_grad():
            self._build_buckets(order.tolist())

    def _build_buckets(self, order: Sequence[int]) -> None:
        """Assign parameters to buckets by the order in which their gradients become ready.

        Numbers the parameters anew, and registers hooks that know the new numbers.
        """
        assignment = assign_buckets(self._params, order, self._caps)
        former = [index for indices in assignment for index in indices]
        sizes = [len(bucket.params) for bucket in self.buckets]
        if former == list(range(len(former))) and sizes == list(map(len, assignment)):
            return
        # (_used and _used_earlier are not permuted: they are reset right after, in _reset.)
        self._names = [self._names[index] for index in former]
        self._params = [self._params[index] for index in former]
        self._inner = {number for number, index in enumerate(former) if index in self._inner}
        # Former buckets are let go before new ones are made. One lives on, by the gradients that
        # are views of it, until the last of these has moved.
        placed = {
            param: view
            for bucket in self.buckets
            for param, view in bucket.placed_gradients().items()
        }
        self.buckets.clear()
        self._places.clear()
        self._places_of.clear()
        first = 0
        for indices in assignment:
            last = first + len(indices)
            bucket = self._bucket_class(
                len(self.buckets),
                self._params[first:last],
                self._names[first:last],
                select(self._params[first].device),
                self.counters,
            )
            bucket.adopt(placed)
            self.buckets.append(bucket)
            before = len(self._places)
            self._places.extend(
                _Place(bucket, number, first + segment.first, first + segment.last)
                for number, segment in enumerate(bucket.segments)
            )
            self._places_of.append(range(before, len(self._places)))
            first = last
        self._dtypes = [param.dtype for param in self._params]
        self._devices = [param.device for param in self._params]
        self._filled = [False] * len(self._places)
        self._readiness.remove()
        segments = [range(place.first, place.last) for place in self._places]
        self._readiness = Readiness(self._params, segments, self)


@dataclass(frozen=True)
class _Place:
    """A segment, its bucket, and the numbers ``[first, last)`` of its parameters."""

    bucket: Bucket
    number: int
    first: int
    last: int


def _backward_start_hook(reducer: weakref.ref[Reducer]) -> Callable[[Tensor], None]:
    """Hook on an output tensor of the module, which may outlive the reducer: it refers weakly."""

    def backward_start(_: Tensor) -> None:
        owner = reducer()
        if owner is not None:
            owner.begin()

    return backward_start
