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
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import or_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from tritonddp._compat import (
    compiled_autograd_runs,
    current_autograd_node,
    current_graph_task_id,
    preserve_version_counters,
    queue_end_of_backward,
    register_post_accumulate_grad_hook,
    steps_optimizers,
)
from tritonddp.arrangement import Arrangement
from tritonddp.assignment import BucketCaps
from tritonddp.attendance import Attendance
from tritonddp.ballot import (
    Ballot,
    Disagreement,
    OutOfStep,
    Source,
    StructureMismatch,
    left_out_hash,
)
from tritonddp.bucket import Bucket, GradientError
from tritonddp.comm.grad_bucket import GradBucket
from tritonddp.comm.hooks import Hook, HookError, HookReduction
from tritonddp.comm.optimizers import SteppingReduction, take_over
from tritonddp.comm.reduction import AllReduce, Reduction, Work
from tritonddp.counters import Counters
from tritonddp.delayed import Gate
from tritonddp.lazy_bucket import LazyBucket, LazyViewBucket
from tritonddp.mixed_precision import buckets_on_the_wire
from tritonddp.on_request import reduce_at_once, take_part
from tritonddp.outputs import Forward, Outputs
from tritonddp.participation import Constancy, Unannounced, accumulates, as_trainable
from tritonddp.placement import Placement
from tritonddp.readiness import Readiness
from tritonddp.roll_call import RollCall
from tritonddp.roster import Roster, structure_of
from tritonddp.skipping import unused_buckets
from tritonddp.stock_reducer import StockReducerNames
from tritonddp.unused import unused_error
from tritonddp.view_bucket import ViewBucket
from tritonddp.weighting import Weight, Window

logger = logging.getLogger(__name__)

# What gradients count on a rank that has none.
_NOTHING = Weight(0.0, is_sum=False)

# Those that are alive, by process group.
_reducers: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[Reducer]] = (
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


class Reducer(StockReducerNames):
    """Reduces the gradients of a module over ``process_group`` during each backward.

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
        wire_dtype: in which gradients travel, ``None`` for their own dtypes.
        lazy_buckets: buckets have memory during backwards only.

    Attributes:
        counters: what was launched and sent so far.
        forwards: how many began so far, with gradients.
        arrangement: which buckets there are.
        num_buckets_reduced: in the last backward.
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
        broadcast: Callable[[], Callable[[list[Tensor]], None] | None] = lambda: None,
        gradient_as_bucket_view: bool = False,
        strict: bool = False,
        skip_unused: bool = False,
        delay_until: Tensor | None = None,
        wire_dtype: torch.dtype | None = None,
        lazy_buckets: bool = False,
    ) -> None:
        self.counters = Counters()
        self.forwards = 0
        self.num_buckets_reduced = 0
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
        self._reduction: Reduction = AllReduce(process_group, self.counters, self._roll_call)
        self._run_hook: Callable[[GradBucket], Any] | None = None
        self._steps = False  # are there optimizers that step in the backward?
        self._steps_in_hook = False

        self._phase = Phase.IDLE
        self._graph_task = -1
        self._creates_graph = False
        self._end_is_queued: Callable[[], object] = lambda: None
        self._outputs = Outputs(self)
        self._window = Window(lambda: [param for _, param in roster.params])
        self._next = 0  # first bucket that is not launched
        self._in_flight: list[tuple[Bucket, Work]] = []
        self._hooks_of_added: list[Any] = []
        self._post_backward: list[torch.futures.Future] = []
        _reducers.setdefault(process_group, weakref.WeakSet()).add(self)
        self._unused_error: str | None = None
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
        bucket_class: Callable[..., Bucket] = views if gradient_as_bucket_view else copying
        if wire_dtype is not None:
            bucket_class = buckets_on_the_wire(wire_dtype, bucket_class, copying)
        self.arrangement = Arrangement(
            roster, process_group, caps, bucket_class, self.counters, self._roll_call
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

    # Communication hooks

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Have ``hook`` reduce the buckets of all backwards from now on.

        Args:
            state: handed to the hook.
            hook: see :class:`~tritonddp.comm.hooks.HookReduction`.

        Raises:
            RuntimeError: there is one already, or a backward or a trace is under way.
        """
        if self._run_hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        if self.is_traced or self._end_is_queued() is not None:
            raise RuntimeError(
                f"{self._where()}: a communication hook cannot be registered during a backward, "
                "or inside trace()"
            )
        self._recover_all()
        self._settle()
        arrangement = self.arrangement
        reduction = HookReduction(
            hook,
            state,
            self._group,
            self.counters,
            self._roll_call,
            lambda: arrangement.placement.buckets,
        )
        self._run_hook = lambda bucket: hook(state, bucket)
        self._steps_in_hook = steps_optimizers(hook)
        steps = self._steps and not self._steps_in_hook
        self._reduction = SteppingReduction(reduction) if steps else reduction

    # Forward

    def prepare_for_forward(self) -> None:
        """See that the last backward came to its end, and what has become of the parameters.

        Raises:
            NotImplementedError: a parameter was added that cannot be reduced.
            RuntimeError: in strict mode, with gradients, the last backward left parameters unused;
                or the ranks did not reduce the same (on a GPU, where the backward itself does not
                wait for the answer).
        """
        if self._phase is Phase.DETACHED:
            return
        if torch.is_grad_enabled():
            self._check_finalized()
        self._recover_all()
        self._settle()
        self._wait_post_backward()
        if torch.is_grad_enabled():
            self.forwards += 1
            self._look()
            if self._unused_error is not None:
                message, self._unused_error = self._unused_error, None
                raise RuntimeError(message)

    def _look(self) -> None:
        """See what has become of the parameters."""
        if self._roster.look(self._where):
            _remove_all(self._hooks_of_added)
            # A backward may reach nothing else that has a hook of ours.
            added = [param for _, param in self._roster.added]
            with as_trainable(added):
                self._hooks_of_added = [
                    register_post_accumulate_grad_hook(param, _gradient_hook(weakref.ref(self)))
                    for param in added
                ]
        if take_over(param for _, param in self._roster.params) and not self._steps:
            self._steps = True
            if not self._steps_in_hook:
                self._reduction = SteppingReduction(self._reduction)

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """A forward has returned ``outputs``."""
        self._outputs.watch(outputs, self.counters.reductions)

    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future]) -> None:
        """Wait for these at the end of the next backward, or before the next forward.

        They come from hooks for buffers.
        """
        self._post_backward.extend(futures)

    def _wait_post_backward(self) -> None:
        if self._post_backward:
            futures, self._post_backward = self._post_backward, []
            torch.futures.wait_all(futures)

    def missing(self) -> list[Parameter]:
        """Parameters that the last reduced backward has not reached."""
        return [self.placement.params[number] for number in self._constancy.missing or ()]

    def _check_reducer_finalized(self) -> None:
        """Raise what the next forward would raise, or make up for.

        Raises:
            RuntimeError: the last backward has not come to its end, or has left parameters unused
                in strict mode.
        """
        if self._phase not in (Phase.IDLE, Phase.DETACHED):
            runs = self._end_is_queued() is not None
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration before starting a new "
                f"one. {self._where()}: a backward {'still runs' if runs else 'broke off'}. The "
                "next forward takes care of what it has left."
            )
        if self._unused_error is not None:
            raise RuntimeError(self._unused_error)

    def _remove_autograd_hooks(self) -> None:
        """Let go of the parameters for good, without waiting for any other rank."""
        self._phase = Phase.DETACHED
        self._readiness.remove()
        _remove_all(self._hooks_of_added)
        self._in_flight.clear()
        _reducers[self._group].discard(self)

    # Start of backward

    def begin(self, forward: Forward | None = None) -> None:
        """A backward runs: if it is a new one, find out what it will reach. Called from hooks."""
        if self._phase is not Phase.IDLE and self._end_is_queued() is not None:
            if forward is not None and self._phase is not Phase.LOCAL:
                forward.reached = True
            return
        if self._phase is Phase.DETACHED:
            return
        self._recover_all()
        reached = self._readiness.participation.query()
        if reached is None or (not any(reached) and not accumulates(current_autograd_node())):
            return  # torch.autograd.grad: it returns gradients, and none is ours
        self._check_finalized()
        if compiled_autograd_runs():
            raise RuntimeError(
                f"{self._where()}: Compiled autograd is not compatible with tritonddp, whose "
                "gradients come from autograd's own engine: leave "
                "torch._dynamo.config.compiled_autograd at False. What torch.compile makes of a "
                "forward needs none of it."
            )
        self._settle()
        missing: set[int] = set()
        if not all(reached):
            missing = {number for number, comes in enumerate(reached) if not comes}
            self._roster.check_kinds(missing, self._where)
        reduced, weight = self._should_sync(), self._weight()
        if self._skip_unused:
            self._left_out = self._unused_buckets(reached, missing)
        if reduced:
            self._roster.enroll()
            self._constancy.see(missing)
        try:
            self._window.open(
                self._all_params,
                weight,
                is_last=reduced,
                is_first=not any(self._used_earlier),
                is_late=forward is None,
            )
        except RuntimeError:
            if reduced:  # the others will not wait in vain: see _recover
                self.counters.reductions += 1
                self._next, self._phase = 0, Phase.REDUCING
            raise
        self._queue_end()
        self._graph_task = current_graph_task_id()
        self._creates_graph = torch.is_grad_enabled()
        if not reduced:
            self._phase = Phase.LOCAL
            return
        for bucket in self.buckets:
            if bucket.index not in self._left_out:
                bucket.begin()
        source = self._source(forward)
        self.counters.reductions += 1
        self._next = 0
        self.arrangement.reduction_begins()
        self._begin_reduction(source, self._window.weight, self._roster.structure, self._left_out)
        if self.arrangement.is_provisional:
            self._phase = Phase.OBSERVING
            self._used = list(self._used_earlier)
            return
        self._used = list(map(or_, reached, self._used_earlier))
        self._readiness.expect(reached, self._unannounced.may_come(missing))
        self._unfilled = [0] * len(self.buckets)
        for number, place in enumerate(self.placement.places):
            self._unfilled[place.bucket.index] += self._readiness.waits(number)
        if self._gate is not None and self._gate.begin():
            for index in self._delayed_buckets():
                self._unfilled[index] += 1
        for index in self._left_out:
            for number in self.placement.places_of[index]:
                self._filled[number] = True  # or a late gradient would wait for nothing
        with self._launching:
            self._phase = Phase.REDUCING
            self._launch_full()

    def _source(self, forward: Forward | None) -> Source:
        """What to say of a backward that begins at an output of ``forward``."""
        if forward is None:
            return Source.ELSEWHERE
        was_reached, forward.reached = forward.reached, True
        if was_reached:
            return Source.AGAIN
        # An older one may have been passed by, by a backward beside the outputs for example.
        is_new = forward.reductions == self.counters.reductions
        return Source.FORWARD if is_new else Source.ELSEWHERE

    def _all_params(self) -> list[Parameter]:
        return [*self.placement.params, *(param for _, param in self._roster.added)]

    def _unused_buckets(self, reached: Sequence[bool], missing: set[int]) -> list[int]:
        # Provisionally, the buckets themselves are; and a rank without inputs expects them all.
        if self.arrangement.is_provisional or self._attendance.is_open:
            return []
        used = list(map(or_, reached, self._used_earlier))
        return unused_buckets(self.placement, used, self._unannounced.may_come(missing))

    def _begin_reduction(
        self,
        source: Source,
        weight: Weight | None,
        structure: bytes,
        left_out: Sequence[int] = (),
        reduction: Reduction | None = None,
    ) -> None:
        """Tell the reduction what this rank says to the others, and how much its means count."""
        self._attendance.is_due = False
        items = None if weight is None else weight.items
        ballot = Ballot(
            structure, source, items, left_out_hash(left_out), self._attendance.mean_over_present
        )
        reduction = reduction or self._reduction
        reduction.begin(ballot, 1.0 if weight is None else weight.scale)

    def _queue_end(self) -> None:
        """Have :meth:`_end` called when this backward is over.

        A backward that breaks off drops its callbacks. So a weak reference to one, held by the
        engine alone, tells whether the backward that set the phase is still running. Where it is
        not, no gradient is expected any more: the next one finds out.
        """

        def end() -> None:
            # Whatever keeps this function, a traceback say, must not make the reducer believe that
            # the backward goes on.
            self._end_is_queued = lambda: None
            self._end()
            self._wait_post_backward()

        for replace in tuple(self.on_backward):
            end = replace(end)
        reference = weakref.ref(self)

        def broke_off(_: object) -> None:
            reducer = reference()
            if reducer is not None:
                reducer._readiness.forget()
                reducer._window.abandon()

        self._end_is_queued = weakref.ref(end, broke_off)
        queue_end_of_backward(end)

    # A gradient, a segment, a bucket is ready

    def gradient_ready(self, index: int) -> None:
        """A gradient arrived that :class:`Readiness` did not expect.

        Args:
            index: number of the parameter.

        Raises:
            RuntimeError: its segment has been flattened already.
        """
        if self._phase is Phase.IDLE or self._end_is_queued() is None:
            self.begin()
            place = self.placement.places[self._readiness.segment_of(index)]
            segment = place.bucket.segments[place.number]
            place.bucket.touched(segment.first + index - place.first)
            if self._readiness.arrive(index):
                return
        from_inner = current_graph_task_id() != self._graph_task
        if self._phase is Phase.LOCAL:
            self._used_earlier[index] = True
        elif self._phase is Phase.OBSERVING:
            self.arrangement.arrived(index)
            self._used[index] = True
        elif self._phase is Phase.REDUCING:
            from_inner = True
            self._used[index] = True
            number = self._readiness.segment_of(index)
            if self._filled[number]:
                self._unannounced.came(index)
                bucket = self.placement.places[number].bucket.index
                raise RuntimeError(
                    f"{self._where()}: the gradient of {self.placement.names[index]!r} arrived "
                    f"after its bucket {bucket} had been flattened or left out. It comes from an "
                    "inner backward (torch.utils.checkpoint with use_reentrant=True), and in "
                    "earlier steps it did not. From the next step on such gradients are waited "
                    "for; with use_reentrant=False they are announced beforehand."
                )
        if from_inner and self._phase is not Phase.IDLE:
            self._unannounced.came(index)

    def segment_full(self, number: int) -> None:
        """All gradients of a segment are ready."""
        if self._phase is not Phase.REDUCING or self._filled[number]:
            return
        with self._launching:  # hooks of a multi-device module run on one thread per device
            self._fill(number)
            self._unfilled[self.placement.places[number].bucket.index] -= 1
            self._launch_full()

    def gate_opens(self) -> None:
        """The gradient that delayed parameters wait for is there."""
        if self._phase is Phase.REDUCING and self._end_is_queued() is not None:
            with self._launching:
                for index in self._delayed_buckets():
                    self._unfilled[index] -= 1
                self._launch_full()

    def _delayed_buckets(self) -> list[int]:
        return [each.index for each in self.buckets if each.names[0] in self._caps.delayed]

    def _fill(self, number: int) -> None:
        if self._creates_graph and torch.is_grad_enabled():
            with torch.no_grad():
                return self._fill(number)
        place = self.placement.places[number]
        segment = place.bucket.segments[place.number]
        for slot in place.bucket.untouched(segment):
            index = place.first + slot - segment.first
            self._used[index] = self._used_earlier[index]
        numbers = slice(place.first, place.last)
        params, used = self.placement.params[numbers], self._used[numbers]
        self._window.merge(params)
        self._window.divide(params, used)
        try:
            self._reduction.fill(place.bucket, segment, used)
        except GradientError as error:
            raise GradientError(f"{self._where()}: {error}") from None
        self._filled[number] = True

    def _launch_full(self) -> None:
        """Launch the buckets that have all their gradients, in bucket order."""
        while self._next < len(self.buckets) and self._unfilled[self._next] == 0:
            self._launch(self.buckets[self._next])

    def _launch(self, bucket: Bucket) -> None:
        """Send a bucket, with zeros for the gradients that did not come."""
        if bucket.index not in self._left_out:
            for number in self.placement.places_of[bucket.index]:
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
        if self._phase is Phase.DETACHED:
            return
        if self._phase is Phase.LOCAL:
            self._window.close(self._all_params())
            self._phase = Phase.IDLE
            return
        while self._next < len(self.buckets):
            self._launch(self.buckets[self._next])
        if self._strict:
            self._note_unused()
        if self._finalizes_on_request and self._in_flight:
            self._phase = Phase.UNFINISHED
        else:
            self._bring_home()

    def _bring_home(self) -> None:
        """All buckets have been launched."""
        try:
            with self._naming_disagreements():
                self._finish()
                self._roster.agreed()
                # Nothing of the frames above may still hold a bucket: some are let go here.
                self._rearrange()
        except HookError as error:
            self._note(error)
            raise  # the other ranks go on: see _recover
        except RuntimeError as error:
            self._note(error)
            self._reset()
            raise
        # (After anything else, a KeyboardInterrupt say, buckets may be on their way: see _recover.)
        self._reset()

    def _finish(self) -> None:
        """Wait for the buckets in launch order, emptying one while the next is on its way."""
        if not self._in_flight:
            return  # a hook has done so already, see finalize_backward()
        self.num_buckets_reduced = len(self._in_flight)
        for bucket, work in self._in_flight:
            self._reduction.finish(bucket, work)
        self._in_flight.clear()

    # On request

    @property
    def launches_at_end(self) -> bool:
        """Whether the buckets of the next reduced backward are launched at its end only."""
        return self.arrangement.is_provisional

    def finalize_on_request(self, required: bool) -> None:
        """Whether backwards end in :meth:`finalize_backward`, not by themselves.

        Raises:
            RuntimeError: a backward runs, or is not finalised.
        """
        if self._phase not in (Phase.IDLE, Phase.DETACHED):
            raise RuntimeError(
                f"{self._where()}: set_manual_finalization_required cannot be called after forward "
                "while a backward pass is expected or in progress. Set "
                "require_manual_backward_finalization before forward or after backward finalization"
            )
        self._finalizes_on_request = required

    @torch.no_grad()
    def finalize_backward(self) -> None:
        """Wait for the buckets of a backward that is over, or has launched all of them.

        Raises:
            RuntimeError: there are none, or not all have been launched.
        """
        if not self._finalizes_on_request:
            raise RuntimeError(
                "finalize_backward() called but manual backward finalization is not required. Set "
                "require_manual_backward_finalization to true first."
            )
        if self._phase is Phase.UNFINISHED:
            self._bring_home()
            return
        is_running = self._end_is_queued() is not None
        if is_running and self._phase in (Phase.OBSERVING, Phase.REDUCING):
            if self._next < len(self.buckets):
                raise RuntimeError(
                    f"{self._where()}: finalize_backward() called before all DDP buckets were "
                    f"ready. next_bucket_={self._next}. Call finalize_backward() only after all "
                    "DDP-managed parameters have computed gradients."
                )
            if self._in_flight:
                with self._naming_disagreements():
                    self._finish()  # the rest comes at the end: hooks may change then
                return
        raise RuntimeError(
            f"{self._where()}: finalize_backward() called but no gradient reduction requires "
            "finalization. This can happen if no_sync() is active or finalize_backward() was "
            "already called for this backward pass."
        )

    def _check_finalized(self) -> None:
        if self._phase is Phase.UNFINISHED:
            raise RuntimeError(
                f"{self._where()}: Expected to have finalized the prior backward pass before "
                "starting a new one. Call finalize_backward() after backward() when "
                "require_manual_backward_finalization is true."
            )

    def _reset(self) -> None:
        self._in_flight.clear()
        for bucket in self.buckets:
            bucket.release()
        self._filled = [False] * len(self.placement.places)
        self._readiness.forget()
        self._used_earlier = [False] * len(self._used_earlier)
        self._window.clear()
        self._phase = Phase.IDLE

    def _recover_all(self) -> None:
        """If a backward broke off, of this reducer or another one of the group, make up for it.

        Of another one too, since collectives of a group are matched by their order.
        """
        for reducer in sorted(_reducers[self._group], key=lambda each: each._roster.number):
            reducer._recover()

    def _recover(self) -> None:
        """If the last backward broke off with an exception: leave no collective half-done.

        The other ranks will issue, or have issued, all collectives of that step. This rank takes
        part in those it has not launched yet, with NaN, so that the next step starts in step.
        """
        if self._phase in (Phase.IDLE, Phase.DETACHED) or self._end_is_queued() is not None:
            return
        if self._phase is Phase.UNFINISHED:
            return  # all its collectives have been issued
        if self._phase is Phase.LOCAL:
            self._phase = Phase.IDLE
            return
        logger.warning("%s: the last backward did not come to its end", self._where())
        try:
            if self._next == 0:
                self._begin_reduction(Source.BROKEN, None, self._roster.structure, self._left_out)
            with torch.no_grad():
                while self._next < len(self.buckets):
                    bucket = self.buckets[self._next]
                    if bucket.index not in self._left_out:
                        self._in_flight.append((bucket, self._reduction.start_poisoned(bucket)))
                    self._next += 1
                with self._naming_disagreements():
                    for bucket, work in self._in_flight:
                        self._reduction.discard(bucket, work)
                    self._in_flight.clear()
                    self._roster.agreed()
                    self._rearrange(Source.BROKEN)
        finally:
            self._reset()

    @contextmanager
    def _naming_disagreements(
        self, named_params: Sequence[tuple[str, Parameter]] | None = None
    ) -> Iterator[None]:
        """Ranks that do not reduce the same: the error, when nothing is under way any more.

        Args:
            named_params: what is reduced on request, ``None`` in a backward.
        """
        try:
            yield
        except OutOfStep:  # what is under way may never end
            here = [bucket.title for bucket in self.buckets if bucket.index in self._left_out]
            raise RuntimeError(
                f"{self._where()}, bucket 0: skip_all_reduce_unused_params=True needs parameters "
                "that are unused on all ranks alike, but the ranks leave out different buckets. "
                f"Here these are left out: {', '.join(here) or 'none'}. The process group is of "
                "no use any more: leave skip_all_reduce_unused_params off"
            ) from None
        except (Disagreement, StructureMismatch) as error:
            for _, work in self._in_flight:
                work.wait()
            if isinstance(error, Disagreement):
                raise RuntimeError(f"{self._where()}, bucket 0: {error}") from None
            self._roster.verify(self._where(), named_params)

    def _settle(self) -> None:
        with self._naming_disagreements():
            self._reduction.settle()

    def _note_unused(self) -> None:
        trainable = {param for _, param in self._roster.trainable}
        unused = [
            name
            for name, param, used in zip(
                self.placement.names, self.placement.params, self._used, strict=True
            )
            if param in trainable and (not used or param.grad is None)
        ]
        if unused:
            index_of = {name: index for index, (name, _) in enumerate(self._roster.trainable)}
            self._unused_error = unused_error(
                self._where(), self._group.rank(), {name: index_of[name] for name in unused}
            )

    def _where(self) -> str:
        return f"rank {self._group.rank()}, step {self.counters.reductions}"

    # On request

    def reduce(
        self,
        named_params: Sequence[tuple[str, Parameter]],
        bucket_class: type[Bucket],
        weight: Weight | None,
        sparse: Collection[Tensor] = (),
    ) -> None:
        """Average ``.grad`` of these parameters over the ranks, now.

        Args:
            named_params: the same on every rank.
            bucket_class: :class:`ViewBucket` replaces gradients, :class:`Bucket` writes to them.
            weight: how much they count; ``None`` where all ranks count alike.
            sparse: those whose gradients may be sparse.

        Raises:
            GradientError: a gradient does not fit its parameter.
            RuntimeError: the ranks do not reduce the same, or a backward is under way.
        """
        self._prepare_for_request()
        if weight is not None and weight.is_sum:
            for _, param in named_params:
                param.grad = None if param.grad is None else param.grad / weight.scale
        names = [f"sparse {name}" for name, param in named_params if param in sparse]
        structure = structure_of(named_params, *names)
        self._reduce_at_once(named_params, bucket_class, weight, structure, sparse=sparse)

    def _prepare_for_request(self) -> None:
        if self._phase is not Phase.IDLE and self._end_is_queued() is not None:
            raise RuntimeError(
                f"{self._where()}: gradients cannot be reduced on request while a backward runs: "
                "wait for its end"
            )
        self._check_finalized()
        self._recover_all()
        self._settle()

    def _reduce_at_once(
        self,
        named_params: Sequence[tuple[str, Parameter]],
        bucket_class: type[Bucket],
        weight: Weight | None,
        structure: bytes,
        stale: Collection[Parameter] = (),
        sparse: Collection[Tensor] | None = None,
    ) -> None:
        placement = self.arrangement.place(named_params, bucket_class, sparse=sparse)
        used = [param.grad is not None and param not in stale for param in placement.params]
        reduction = self._reduction.plain
        self._begin_reduction(Source.REQUEST, weight, structure, reduction=reduction)
        with self._naming_disagreements(named_params):
            reduce_at_once(placement, reduction, used)
            reduction.settle()

    def reduce_window(self, weight: Weight | None) -> None:
        """Average ``.grad`` of all trainable parameters, and so end what was accumulated.

        Raises:
            RuntimeError: see :meth:`reduce`; or the accumulated backwards have a weight of their
                own beside ``weight``.
        """
        self._prepare_for_request()
        self._roster.enroll()
        self._look()
        self._window.clear_if_dropped()
        if weight is not None and self._window.weight is not None:
            raise RuntimeError(
                f"{self._where()}: the accumulated gradients have the weights of their backwards "
                "already: call reduce_gradients() outside weighted(n)"
            )
        if weight is not None:
            self._window.weight = weight
        params = self._all_params()
        # Frozen since the last reduction, and no backward has used it before: its place in a bucket
        # is there still, and its gradient is no business of this reduction.
        stale = {
            param
            for param, used in zip(self.placement.params, self._used_earlier, strict=True)
            if not used and not param.requires_grad
        }
        used = [param.grad is not None and param not in stale for param in params]
        self._window.divide(params, used)
        # First what is in buckets, which is alike on all ranks: their ballots tell whether what
        # was added since is, too.
        placed = list(zip(self.placement.names, self.placement.params, strict=True))
        for named_params in filter(None, (placed, self._roster.added)):
            self._reduce_at_once(
                named_params, Bucket, self._window.weight, self._roster.structure, stale
            )
        self._window.clear()
        self._used_earlier = [False] * len(self._used_earlier)

    # Without a backward

    def prepare_to_follow(self) -> None:
        """No forward follows: see that the last backward came to its end, as if one did.

        Raises:
            RuntimeError: it waits for ``finalize_backward()``; or see :meth:`prepare_for_forward`.
        """
        self._check_finalized()
        self._wait_post_backward()
        self._recover_all()
        self._settle()
        self._look()

    def follow(self, source: Source) -> None:
        """Make the collectives of a reduced backward, of which this rank has none.

        Its gradients count as zero. Those of the other ranks come into ``.grad`` here too.

        Args:
            source: why it has none.
        """
        self._settle()
        self._roster.enroll()
        self.counters.reductions += 1
        self.arrangement.reduction_begins()
        self._begin_reduction(source, _NOTHING, self._roster.structure)
        with torch.no_grad(), self._naming_disagreements():
            unused = [False] * len(self.placement.params)
            reduce_at_once(self.placement, self._reduction, unused)
            self._reduction.settle()
            self._roster.agreed()
            self._rearrange(source)
        for bucket in self.buckets:
            bucket.release()

    # Buckets

    def _rearrange(self, source: Source = Source.ELSEWHERE) -> None:
        """After a reduction: buckets follow the order of gradients, and hold what is trainable.

        Every rank that took part in that reduction is here, so the collectives here match.

        Args:
            source: of this rank's gradients. After a backward that broke off, or none at all, it
                has none to offer.
        """
        missing: Collection[int] | None = None
        if self.arrangement.is_provisional:
            missing = self.arrangement.agree_on_order(self._where, self._attendance.source_rank)
            if source.is_empty:
                missing = ()
        self._unannounced.stayed_away(missing)
        failure: GradientError | None = None
        if self._roster.added:
            try:
                self._take_up(source)
            except GradientError as error:  # of this rank alone: the others go on
                failure = GradientError(f"{self._where()}: {error}")
        former = self.arrangement.renew()
        if former is not None:
            self._unannounced.renumber(former)
            self._constancy.renumber(former)
            earlier = self._used_earlier
            self._count_anew()
            # (Where a backward was reduced, it ends the window.)
            self._used_earlier = [old is not None and earlier[old] for old in former]
        if failure is not None:
            raise failure

    def _take_up(self, source: Source) -> None:
        """Reduce the gradients of parameters that were added, in buckets of their own."""
        self._reduction.settle()
        params = [param for _, param in self._roster.added]
        broadcast = self._broadcast()
        if broadcast is not None:
            # Mostly of values that are alike already: a graph that is kept may be used again.
            with preserve_version_counters(params):
                broadcast([param.detach() for param in params])
        placement = self.arrangement.place(self._roster.added)
        weight = _NOTHING if source.is_empty else self._window.weight
        reduction = self._reduction.plain
        self._begin_reduction(source, weight, self._roster.structure, reduction=reduction)
        if source is Source.BROKEN:
            take_part(placement, reduction)
        elif source.is_empty:
            reduce_at_once(placement, reduction, [False] * len(params))
        else:
            self._window.merge(params)
            used = [self._roster.has_new_gradient(param) for param in params]
            self._window.divide(params, used)
            reduce_at_once(placement, reduction, used)

    def _count_anew(self) -> None:
        """Lists and hooks by the numbers of the present placement."""
        params = self.placement.params
        self._used = [False] * len(params)
        self._used_earlier = [False] * len(params)
        self._filled = [False] * len(self.placement.places)  # per segment
        self._unfilled = [0] * len(self.buckets)  # segments that wait for gradients
        self._roster.place(self.placement.names, params)
        _remove_all(self._hooks_of_added)
        self._readiness.remove()
        segments = [range(place.first, place.last) for place in self.placement.places]
        with as_trainable(params):
            self._readiness = Readiness(params, segments, self)


def _gradient_hook(reducer: weakref.ref[Reducer]) -> Callable[[Tensor], None]:
    """Hook on a parameter that is in no bucket yet."""

    def gradient_came(_: Tensor) -> None:
        owner = reducer()
        if owner is not None:
            owner.begin()

    return gradient_came


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
