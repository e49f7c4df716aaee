"""The state of a reducer, and the two ways to begin anew: the next backward, other buckets."""

from __future__ import annotations

import enum
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from tritonddp.buckets.assignment import BucketCaps
from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.formats import Wire
from tritonddp.buckets.lazy_bucket import LazyBucket, LazyViewBucket
from tritonddp.buckets.manager import Arrangement
from tritonddp.buckets.parameters import Roster
from tritonddp.buckets.placement import Placement
from tritonddp.buckets.residuals import Feedback
from tritonddp.buckets.view_bucket import ViewBucket
from tritonddp.comm.grad_bucket import GradBucket
from tritonddp.comm.quantized import QuantizedAllReduce
from tritonddp.comm.reduction import AllReduce, Reduction
from tritonddp.compat.stock_reducer import StockReducerNames
from tritonddp.coordination.collectives import Work
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.failures import RollCall
from tritonddp.features.auto_compression.planner import Auto
from tritonddp.features.check_finite import FiniteCheck
from tritonddp.features.delayed_params import Gate
from tritonddp.features.join_protocol import Attendance
from tritonddp.features.weighted_mean import Weight, Window
from tritonddp.reducer.output_hooks import Forward, Forwards, Outputs
from tritonddp.reducer.participation import Constancy, Unannounced, as_trainable
from tritonddp.reducer.readiness import Readiness

if TYPE_CHECKING:
    from tritonddp.reducer.in_context import ContextBackward

# Those that are alive, by process group.
reducers: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[ReducerState]] = (
    weakref.WeakKeyDictionary()
)


class Phase(enum.Enum):
    """Where a reducer stands."""

    IDLE = "no backward runs"
    LOCAL = "a backward runs that only accumulates (no_sync)"
    OBSERVING = "the first reduced backward runs: note the order of gradients, launch at its end"
    REDUCING = "a backward runs, buckets are launched as they fill"
    UNFINISHED = "a backward is over, and finalize_backward() is to wait for its buckets"
    DETACHED = "hooks were removed: no backward is noticed any more"


class ReducerState(ABC, StockReducerNames):
    """The state of a :class:`~tritonddp.reducer.reducer.Reducer`.

    Args:
        roster: the parameters of the module, alike on every rank.
        process_group: the ranks to average over.
        caps: bucket sizes.
        attendance: which ranks have inputs.
        should_sync: asked when a backward starts: is it reduced, or does it only accumulate?
        weight: asked when a backward starts: how much it counts, ``None`` if as much as others.
        broadcast: asked when parameters were added: what overwrites them with those of one rank,
            ``None`` if each rank keeps its own.
        gradient_as_bucket_view: gradients live in the buckets.
        strict: an unused parameter is an error at the next forward.
        skip_unused: buckets without any used parameter are not sent.
        delay_until: the parameter whose gradient delayed ones (see :class:`BucketCaps`) wait for.
        wire: how gradients travel.
        lazy_buckets: buckets have memory during backwards only.
        check_finite: see :class:`FiniteCheck`.

    Attributes:
        counters: what was launched and sent so far.
        forwards: how many began so far, with gradients.
        arrangement: which buckets there are.
        num_buckets_reduced: in the last backward.
        own_gradients_at: reductions when ``.grad`` was last set to what this rank alone has.
        is_traced: inside ``trace()``.
        on_backward: for measurements: called when a backward begins, with what is to run at its
            end; each returns what runs instead.
    """

    def __init__(
        self,
        roster: Roster,
        process_group: dist.ProcessGroup,
        caps: BucketCaps,
        attendance: Attendance,
        should_sync: Callable[[], bool],
        weight: Callable[[], Weight | None] = lambda: None,
        broadcast: Callable[[], Callable[[list[Tensor], str, str], None] | None] = lambda: None,
        gradient_as_bucket_view: bool = False,
        strict: bool = False,
        skip_unused: bool = False,
        delay_until: Tensor | None = None,
        wire: Wire | None = None,
        lazy_buckets: bool = False,
        check_finite: str | None = None,
    ) -> None:
        self.counters = Counters()
        self.forwards = 0
        self.num_buckets_reduced = 0
        self.own_gradients_at = 0
        self.is_traced = False
        self.on_backward: list[Callable[[Callable[[], None]], Callable[[], None]]] = []
        self._roster = roster
        self._group = process_group
        self._attendance = attendance
        self._should_sync = should_sync
        self._weight = weight
        self._broadcast = broadcast
        self._strict = strict
        self._skip_unused = skip_unused
        self._finalizes_on_request = False
        self._left_out: list[int] = []  # buckets that are not sent in this backward
        self._caps = caps
        self._gate = None if delay_until is None else Gate(delay_until, self)
        self._roll_call = RollCall(process_group)
        self._finite = FiniteCheck(check_finite, self._roll_call)
        self._wire = wire or Wire()
        reduce = AllReduce if self._wire.compression is None else QuantizedAllReduce
        self._reduction: Reduction = reduce(process_group, self.counters, self._roll_call)
        self._run_hook: Callable[[GradBucket], Any] | None = None
        self._steps = False  # are there optimizers that step in the backward?
        self._steps_in_hook = False

        self._phase = Phase.IDLE
        self._graph_task = -1
        self._creates_graph = False
        self._end_is_queued: Callable[[], object] = lambda: None
        self._outputs = Outputs(self)
        self._forwards = Forwards()
        self._reduces = False  # is the last backward reduced, or does it accumulate?
        self._window = Window(lambda: [param for _, param in roster.params])
        self._next = 0  # first bucket that is not launched
        self._in_flight: list[tuple[Bucket, Work]] = []
        self._hooks_of_added: list[Any] = []
        self._post_backward: list[torch.futures.Future] = []
        reducers.setdefault(process_group, weakref.WeakSet()).add(self)
        self._unused_error: str | None = None
        # Of torch.distributed.autograd: the backward that is reduced, or broke off, and the id of
        # the last one that went through an output, reduced or not.
        self._in_context: ContextBackward | None = None
        self._seen_in_context = -1
        self._launching = threading.Lock()
        self._readiness = Readiness((), (), self)
        # Parameters reached in this backward, and in those under no_sync since the last reduction:
        # they take part in the next.
        self._used: list[bool] = []
        self._used_earlier: list[bool] = []
        self._unannounced = Unannounced()
        self._constancy = Constancy()
        copying: type[Bucket] = LazyBucket if lazy_buckets else Bucket
        views: type[Bucket] = LazyViewBucket if lazy_buckets else ViewBucket
        feedback = Feedback()
        plain = self._wire.buckets(views if gradient_as_bucket_view else copying, copying)
        make = self._wire.quantized_buckets(plain, copying, process_group, feedback)
        self.auto: Auto | None = None
        if self._wire.figures is not None:
            device = roster.params[0][1].device
            self.auto = Auto(
                self._wire, process_group, device, plain, copying, feedback, self.counters
            )
            self.auto.watch(self)
            make = self.auto.make
        self.arrangement = Arrangement(
            roster,
            process_group,
            caps,
            make,
            self.counters,
            self._roll_call,
            feedback,
            self.auto,
            check_finite is not None,
        )
        self._count_anew()

    @property
    def placement(self) -> Placement:
        """The buckets, and where in them each parameter is."""
        return self.arrangement.placement

    @property
    def params(self) -> list[Parameter]:
        """All whose gradients are reduced."""
        return self._all_params()

    @property
    def structure(self) -> bytes:
        """A hash of what is trained, which should be alike on all ranks."""
        return self._roster.structure

    def held(self) -> tuple[list[tuple[str, Parameter]], list[tuple[str, Tensor]]]:
        """Parameters and buffers that should be alike on all ranks, trainable or not."""
        return self._roster.params, self._roster.buffers()

    @property
    def buckets(self) -> list[Bucket]:
        """In launch order."""
        return self.placement.buckets

    def _all_params(self) -> list[Parameter]:
        return [*self.placement.params, *(param for _, param in self._roster.added)]

    def _where(self) -> str:
        return f"rank {self._group.rank()}, step {self.counters.reductions}"

    def _reset(self) -> None:
        """No backward is under way any more."""
        self._in_flight.clear()
        for bucket in self.buckets:
            bucket.release()
        self._filled = [False] * len(self.placement.places)
        self._readiness.forget()
        self._used_earlier = [False] * len(self._used_earlier)
        self._window.clear()
        self._phase = Phase.IDLE

    def _count_anew(self) -> None:
        """Lists and hooks by the numbers of the present placement."""
        params = self.placement.params
        self._used = [False] * len(params)
        self._used_earlier = [False] * len(params)
        self._filled = [False] * len(self.placement.places)  # per segment
        self._unfilled = [0] * len(self.buckets)  # segments that wait for gradients
        self._roster.place(self.placement.names, params)
        self._forget_added()
        self._readiness.remove()
        segments = [range(place.first, place.last) for place in self.placement.places]
        with as_trainable(params):
            self._readiness = Readiness(params, segments, self)

    def _forget_added(self) -> None:
        """Take the hooks off the parameters that were added."""
        for handle in self._hooks_of_added:
            handle.remove()
        self._hooks_of_added.clear()

    # What other reducers of the process group call: see InStep

    @abstractmethod
    def _recover(self) -> None: ...

    # What that calls where a backward of torch.distributed.autograd was begun: see InContext

    @abstractmethod
    def _recover_in_context(self) -> None: ...

    @abstractmethod
    def _is_reduced(self, forward: Forward | None) -> bool: ...

    # What hooks call during a backward: see Reducer

    @abstractmethod
    def begin(self, forward: Forward | None = None) -> None: ...

    @abstractmethod
    def gradient_ready(self, index: int) -> None: ...

    @abstractmethod
    def segment_full(self, number: int) -> None: ...

    @abstractmethod
    def gate_opens(self) -> None: ...
