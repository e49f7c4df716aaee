"""When gradients are reduced: from the start of a backward to its last bucket.

One gradient, from ``backward()`` to ``.grad``::

    backward starts   on_backward       ask the engine which parameters it will reach; open a run
    gradient ready    (no Python)       a hook in C notes it, see readiness.py
    segment full      on_segment_ready  run.pack: one flatten; on a GPU a segment is a whole bucket
    bucket full       run.launch_ready  transport.launch: one asynchronous all-reduce
    backward ends     _end              launch what is left; run.finish: wait, one unflatten
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import attrgetter, or_
from types import NoneType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp._device import is_capturing
from tritonddp._torch import (
    compiled_autograd_runs,
    current_graph_task_id,
    queue_end_of_backward,
    register_post_accumulate_grad_hook,
)
from tritonddp.buckets.assignment import BucketCaps
from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.formats import BucketFactory, WireFormat
from tritonddp.buckets.manager import REBUILD_AFTER, BucketManager
from tritonddp.buckets.parameters import ModuleParameters
from tritonddp.comm.all_reduce import AllReduce
from tritonddp.comm.broadcast import StateBroadcast
from tritonddp.comm.comm_hook import CommHook, Hook
from tritonddp.comm.peer_memory import PeerMemory
from tritonddp.comm.quantized import QuantizedAllReduce
from tritonddp.comm.run import LocalError, ReductionRun, Transport, begin_logger, run_logger
from tritonddp.coordination.agreement import Agreement, GradSource, Mismatch
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group
from tritonddp.coordination.interrupts import Uninterrupted
from tritonddp.reducer import capture, on_demand, recovery
from tritonddp.reducer.extension import Events, Extension, SyncState
from tritonddp.reducer.output_hooks import (
    EndsOfBackward,
    Forward,
    Forwards,
    forget_unreduced,
    tell,
    tell_unreduced,
    unreduced,
)
from tritonddp.reducer.participation import ReentrantGrads, as_trainable, is_of_others
from tritonddp.reducer.readiness import ReadyTracker

_grad_of = attrgetter("grad")
_NONE: frozenset[int] = frozenset()


def _over() -> None:
    """Stands in for ``ReductionRun.end``: the end was called, or will never be."""


def _opening() -> bool:
    """Stands in for ``ReductionRun.end`` until the engine has the callback: the backward runs."""
    return True


class Reducer:
    """Reduces the gradients of a module over a process group during each backward.

    Args:
        parameters: of the module, the same on every rank.
        group: the ranks to average over.
        caps: bucket sizes.
        sync: settings of the next backward, written by the wrapper.
        broadcast: overwrites added parameters with those of one rank; ``None`` if each rank keeps
            its own.
        wire: the dtype and the compression in which gradients are sent.
        counters: count launches and bytes sent.
        views: ``.grad`` tensors are views of the buckets.
        lazy: buckets have memory during backwards only.
        check_finite: buckets record which gradients are not finite.
        peer_memory: makes the transport between ranks of one host, from the group, the plain
            transport and the counters; ``None`` if there shall be none.
        reporters: extensions that send reports to the other ranks, the same on every rank.
    """

    def __init__(
        self,
        parameters: ModuleParameters,
        group: Group,
        caps: BucketCaps,
        sync: SyncState,
        broadcast: StateBroadcast | None = None,
        wire: WireFormat | None = None,
        counters: Counters | None = None,
        views: bool = False,
        lazy: bool = False,
        check_finite: bool = False,
        peer_memory: Callable[..., PeerMemory] | None = None,
        reporters: Sequence[Extension] = (),
    ) -> None:
        self.counters = counters or Counters()  # of what was launched and sent so far
        self.events = Events(reporters)  # callbacks of extensions
        self.group = group
        self.parameters = parameters
        self.sync = sync
        self.broadcast = broadcast
        self.wire = wire or WireFormat()
        self.caps = caps
        self.agreement = Agreement(group, sum(each.report_nbytes for each in reporters))
        self.agreement.on_reports = self.events.on_reports
        factory = BucketFactory(self.wire, group, self.counters, views, lazy, check_finite)
        factory.header_nbytes = self.agreement.nbytes
        self.manager = BucketManager(parameters, group, caps, factory, self.counters)
        # For gradients that no backward has put into the current buckets.
        self.plain = AllReduce(group, self.counters)
        self.transport: Transport = self.plain  # of a bucket in a backward
        if self.wire.compression is not None:
            self.transport = QuantizedAllReduce(group, self.counters)
        self.peer_memory: PeerMemory | None = None
        if peer_memory is not None and self.transport is self.plain:
            self.peer_memory = peer_memory(group, self.plain, self.counters)
        self.comm_hook: tuple[Any, Hook] | None = None
        # The backward that runs, has failed or waits for ``finalize_backward()``.
        self.run: ReductionRun | None = None
        # For each parameter, whether a backward that was not reduced has used it.
        self.accumulated: list[bool] = []
        self.has_accumulated = False
        self.reentrant = ReentrantGrads()
        self.forwards = Forwards()
        self.has_told_of_unreduced = False  # see UnreducedGradient
        self.forwards_begun = 0  # with gradients
        # Numbers of the parameters that the last reduced backward has not reached.
        self.missing: Collection[int] | None = None
        self.is_static = True  # all reduced backwards have reached the same parameters
        self.skipped_last: Collection[int] = ()  # buckets that the last run left out
        self.buckets_reduced = 0  # number of buckets that the last run reduced
        self.last_alone: ReductionRun | None = None  # the last run, if it exchanged nothing
        self.own_gradients_at = 0  # counters.reductions when .grad last became this rank's alone
        self.deferred_error: str | None = None  # what the next forward raises
        # The end of the next backward waits for these.
        self.post_backward: list[torch.futures.Future] = []
        self.logger: Any = None  # of the wrapper: gets errors that end a backward
        self.finalizes_manually = False  # backwards end in finalize_backward()
        self.is_detached = False  # hooks were removed: no backward is noticed any more
        self.steps_optimizers = False  # in the backward
        self.counts_dropped = True  # gradients that hooks drop count as zero: see ReductionRun
        # Buckets that CUDA graphs reduce. The graphs use the buckets' memory as long as they live.
        self.captured: list[Bucket] = []
        # Of torch.distributed.autograd: the backward that is reduced, or has failed, and the id of
        # the last backward that went through an output, reduced or not; see in_context.py.
        self.in_context: Any = None
        self.seen_in_context = -1
        # Held while a segment is packed: hooks of a multi-device module run on a thread per device.
        self.launching = threading.RLock()
        self.reference = weakref.ref(self, group.open_runs.discard)
        hash(self.reference)  # cached now: it cannot be computed after this object is freed
        self._broke_off = partial(_broke_off, self.reference)
        self._added_hooks: list[Any] = []
        group.join_forks(self)
        self._follow_buckets()

    def where(self) -> str:
        """This rank and its step, for messages."""
        return f"rank {self.group.rank}, step {self.counters.reductions}"

    # Before a forward

    def before_forward(self) -> None:
        """Make up for a last backward that failed, and look for changed parameters.

        Raises what the docstring of the wrapper's ``forward()`` lists. (On a GPU the host does not
        wait for headers, so a mismatch may be one reduction older than the last.)
        """
        if self.is_detached:
            self.group.refuse_if_forked()
            return
        has_grad = torch.is_grad_enabled()
        if has_grad and self.run is not None:
            on_demand.check_finalized(self)
        if self.group.open_runs:
            recovery.recover(self.group)
        if self.agreement.pending:
            self.check_pending()
        if self.post_backward:
            self.wait_post_backward()
        if not has_grad:
            return
        self.forwards_begun += 1
        for call in self.events.on_forward:
            call()
        self.forwards.was_local = False  # a forward inside this one, as in Lightning, is separate
        if self.parameters.has_changed():
            self.refresh_parameters()
        if self.deferred_error is not None:
            message, self.deferred_error = self.deferred_error, None
            raise RuntimeError(message)

    def settle(self) -> None:
        """Make up for a last backward that failed, where no forward follows to do so."""
        on_demand.check_finalized(self)
        self.wait_post_backward()
        recovery.recover(self.group)
        self.check_pending()

    def settle_and_refresh(self) -> None:
        """Call :meth:`settle`, and look for changed parameters."""
        self.settle()
        if self.parameters.has_changed():
            self.refresh_parameters()

    def refresh_parameters(self) -> None:
        """Look for changed parameters."""
        self.parameters.refresh(self.where)
        # A backward may reach no other tensor that has a hook of ours.
        self._watch_added([param for _, param in self.parameters.added])

    def _watch_added(self, params: Sequence[Parameter]) -> None:
        """Notice a backward by a gradient of one of these parameters, which have no bucket yet."""
        while self._added_hooks:
            self._added_hooks.pop().remove()
        hook = partial(tell, self.reference, None)
        with as_trainable(params):
            self._added_hooks = [register_post_accumulate_grad_hook(p, hook) for p in params]

    def check_pending(self) -> None:
        """On a GPU: raise a mismatch that was found too late, see :class:`Agreement`."""
        try:
            self.agreement.check_pending()
        except Mismatch as error:
            if self.is_on_gpu and is_capturing():
                capture.refuse_mismatch(self, error)
            recovery.raise_mismatch(self, error, None)

    def wait_post_backward(self) -> None:
        """Wait for the futures that buffer hooks have returned."""
        if self.post_backward:
            futures, self.post_backward = self.post_backward, []
            torch.futures.wait_all(futures)

    @property
    def backward_runs(self) -> bool:
        """Whether a backward runs now: False if it failed, or waits to be finalised."""
        return self.run is not None and self.run.end() is not None

    # Start of backward

    def on_backward(self, forward: Forward | None = None) -> None:
        """A backward runs: if it is new, find out which parameters it will reach. For hooks.

        Args:
            forward: the forward whose output it goes through; ``None`` if not known.
        """
        run = self.run
        if run is not None and run.end() is not None and not run.is_ended:
            if forward is not None:
                if not run.is_local:
                    forward.reached = True
                elif run.may_be_reduced and forward.syncs:
                    self._reduce_after_all(run, forward)
            return
        if self.is_detached:
            self.group.refuse_if_forked()
            return
        if self.group.open_runs:
            recovery.recover(self.group)
        tracker = self.tracker
        reached = tracker.query()
        if reached is None:
            return  # torch.autograd.grad: it returns gradients
        missing: Collection[int] = _NONE
        if not all(reached):
            if not any(reached) and is_of_others(self.manager.current.params, tracker.nodes):
                return
            missing = {number for number, comes in enumerate(reached) if not comes}
            self.parameters.check_kinds(missing, self.where)
        if self.run is not None:
            on_demand.check_finalized(self)
        if compiled_autograd_runs():
            raise RuntimeError(
                f"{self.where()}: Compiled autograd is not compatible with tritonddp, whose "
                "hooks need autograd's own engine: leave "
                "torch._dynamo.config.compiled_autograd at False. torch.compile does not need it "
                "to compile a forward."
            )
        if self.agreement.pending:
            self.check_pending()
        is_around = forward is None and not self.forwards.was_local
        if self.forwards.decide(forward, self.sync, self.where):
            self._open(forward, reached, missing)
        else:
            self._open_local(forward, reached, is_around)

    def _reduce_after_all(self, local: ReductionRun, forward: Forward) -> None:
        """A backward that was local so far goes through an output of a synchronised forward."""
        if not self.forwards.decide(forward, self.sync, self.where):
            local.may_be_reduced = False
            return
        came = list(self.tracker.log)
        reached = list(local.reached)
        missing = {number for number, comes in enumerate(reached) if not comes}
        for call in self.events.on_abort:
            call(local)
        self._open(forward, reached, missing, local)
        for param in came:
            self._note_early(param)

    def _open(
        self,
        forward: Forward | None,
        reached: list[bool],
        missing: Collection[int],
        local: ReductionRun | None = None,
    ) -> None:
        """A backward begins that is reduced; or ``local``, which has begun, is reduced too."""
        is_captured = self.is_on_gpu and is_capturing()
        if is_captured:
            capture.begin(self, missing, is_reduced=True)
        if unreduced:
            tell_unreduced(self)
        manager, tracker, events = self.manager, self.tracker, self.events
        if self.parameters.number < 0:
            self.parameters.register()
        if missing != self.missing:
            self.is_static = self.is_static and self.missing is None
            self.missing = missing
        source = self._source(forward)
        used = list(map(or_, reached, self.accumulated)) if self.has_accumulated else list(reached)
        run = ReductionRun(manager.current, self.transport, self.agreement, events, used, source)
        run.is_provisional = manager.is_provisional
        run.is_late, run.reached = forward is None or local is not None, reached
        run.earlier, run.came = self.accumulated, tracker.log
        run.has_missing, run.counts_dropped = bool(missing), self.counts_dropped
        if is_captured:
            run.is_captured = True
        doubtful: Collection[int] = _NONE
        if not manager.is_provisional and (missing or self.reentrant.has_come):
            doubtful = self.reentrant.may_come(set(missing))
            run.doubtful = doubtful
        # From here on the other ranks wait for the collectives of this run: see recovery.py.
        run.end = _opening
        self.group.open_runs.add(self.reference)
        self.run = run
        self.counters.reductions += 1
        run.where = f"rank {self.group.rank}, step {self.counters.reductions}"
        try:
            run.is_alone = self.group.size == 1 and self._exchanges_nothing()
            tracker.begin(reached, doubtful, looks=not (run.is_provisional or run.is_alone))
            run.unfilled = list(tracker.waiting)
            for call in events.on_begin:
                call(run)
            if manager.former_counts or manager.schema is not self.parameters.schema:
                manager.reduction_begins()
            if run.is_alone:
                self._queue_end(run, local)
                return
            self.announce(run)
            for bucket in manager.current.to_prepare:
                bucket.prepare()
            grads = list(map(_grad_of, manager.current.params))
            if set(map(type, grads)) != {NoneType}:
                for bucket in manager.current.buckets:
                    bucket.note_before(grads[bucket.first :][: len(bucket.params)])
            for index in run.skipped:
                for number in manager.current.segments_of[index]:
                    run.filled[number] = True  # these segments are never packed
            self._queue_end(run, local)
        except BaseException:
            run.end = _over
            tracker.stop()
            raise
        if not manager.is_provisional and not all(run.unfilled):
            with self.launching:
                run.launch_ready()

    def _exchanges_nothing(self) -> bool:
        """Whether the buckets are not needed: the gradients of the only rank are the mean."""
        current = self.manager.current
        return (
            self.transport is self.plain
            and not self.finalizes_manually
            and self.sync.join is None
            and self.wire.reduce_dtype is None
            and not self.manager.is_provisional
            and not self.events.has_of_runs
            and not current.needs_reduction
        )

    def _open_local(self, forward: Forward | None, reached: list[bool], is_around: bool) -> None:
        """A backward begins that only accumulates."""
        if self.is_on_gpu and is_capturing():
            capture.begin(self, (), is_reduced=False)
        run = ReductionRun(
            *(self.manager.current, self.transport, self.agreement, self.events),
            *(self.accumulated, GradSource.ELSEWHERE),
        )
        run.is_local = True
        run.may_be_reduced = self.sync.enabled and self.sync.join is None
        if self.group.size > 1 and self.sync.join is None:
            is_inside = forward is not None and forward.syncs
            run.is_doubted = is_inside or (is_around and run.may_be_reduced)
        run.is_late, run.reached = forward is None, reached
        run.where = self.where()
        run.end = _opening
        self.mark_open()
        self.run = run
        try:
            self.tracker.begin(reached, _NONE, looks=False)
            for call in self.events.on_begin:
                call(run)
            self._queue_end(run)
        except BaseException:
            run.end = _over
            self.tracker.stop()
            raise

    def _source(self, forward: Forward | None) -> GradSource:
        """The source, for the header, of a backward that begins at an output of ``forward``."""
        if forward is None:
            return GradSource.ELSEWHERE
        was_reached, forward.reached = forward.reached, True
        if was_reached:
            return GradSource.AGAIN
        # The backward of an older forward may not have gone through its outputs, for example.
        is_new = forward.reductions == self.counters.reductions
        return GradSource.FORWARD if is_new else GradSource.ELSEWHERE

    def mark_open(self) -> None:
        """This reducer owes collectives to the other ranks."""
        self.group.open_runs.add(self.reference)

    def mark_closed(self) -> None:
        """This reducer has launched all collectives that it owes."""
        if self.run is None and self.in_context is None:
            self.group.open_runs.discard(self.reference)

    def announce(self, run: ReductionRun) -> None:
        """Prepare the header of this rank in ``run``, and the scale of its gradients."""
        agreement, join, weight = self.agreement, self.sync.join, run.weight
        over_present = False
        if join is not None:
            join.is_due = False
            # Communication hooks divide by a number of ranks themselves.
            over_present = join.mean_over_present and run.transport.averages
        schema = self.parameters.schema if run.schema is None else run.schema
        key = (
            *(schema, run.source, weight, tuple(run.skipped)),
            *(over_present, run.transport.averages),
        )
        if key != agreement.key or weight is not None:  # the unit of weights may have changed
            agreement.open(*key)
        run.scale = agreement.scale
        run.header = run.said = agreement.encoded
        if self.events.reporters:
            run.said = agreement.with_report(self.events.report(run))
        if self.manager.is_provisional and self.peer_memory is not None:
            self.peer_memory.begin()
        run.is_logged = run_logger.isEnabledFor(logging.DEBUG)
        if begin_logger.isEnabledFor(logging.DEBUG):
            run.log_begin(schema)

    def _queue_end(self, run: ReductionRun, local: ReductionRun | None = None) -> None:
        """Have :meth:`_end` called when this backward is over; it will be if ``local`` is given.

        A backward that fails drops its callbacks. So a weak reference to a callback that only the
        engine holds tells whether the backward of ``run`` still runs. If it does not, no further
        gradient is expected, and the next backward finds that out.
        """
        run.creates_graph = torch.is_grad_enabled()
        if local is not None:  # (This may be an inner backward, of a reentrant checkpoint.)
            run.graph_task, run.end = local.graph_task, local.end
            return
        run.graph_task = current_graph_task_id()
        end = partial(self._end)
        run.end = weakref.ref(end, self._broke_off)
        queue_end_of_backward(end)

    # A gradient, a segment, a bucket is ready

    def on_first_gradient(self, param: Tensor) -> None:
        """The first gradient of a backward that has not begun at an output of the module."""
        self.on_backward()
        if self.backward_runs:
            self._note_early(param)

    def _note_early(self, param: Tensor) -> None:
        """A gradient had come before the reduction was opened."""
        number = self.tracker.number_of(param)
        if self.run is not None and not self.run.is_local:
            bucket, _ = self.manager.current.segments[self.tracker.segment_of[number]]
            bucket.note_early(number - bucket.first)
        self.tracker.log.append(param)

    def on_segment_ready(self, number: int) -> None:
        """All gradients of a segment are ready."""
        run = self.run
        if run is None or run.is_local or run.filled[number]:
            return
        if run.creates_graph and torch.is_grad_enabled():
            with torch.no_grad():
                return self.on_segment_ready(number)
        with self.launching:
            if self.tracker.streams_beside:
                self.tracker.follow(number)
            run.pack(number)
            index = run.bucket_set.segments[number][0].index
            run.unfilled[index] -= 1
            if run.unfilled[index] == 0:
                run.launch_ready()

    def on_unusual_order(self, number: int) -> None:
        """Gradients came in another order than last time: launch the segment if it is full."""
        run = self.run
        if run is None or run.is_local:
            return
        if self.tracker.has_unannounced():
            self._note_unannounced(run)
        if self.tracker.look(number):
            self.on_segment_ready(number)

    # End of backward

    def _end(self) -> None:
        """The backward is over: launch the remaining buckets; :class:`EndsOfBackward` waits."""
        run = self.run
        if run is None:  # detached
            return
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._end()
        run.end = _over
        self.tracker.stop()
        for call in self.events.on_compute_end:
            call(run)
        is_usual = run.is_alone or self.tracker.is_usual()
        if run.is_local:
            self._accumulate(run, is_usual)
            self.wait_post_backward()
            return
        if not run.is_alone:
            if not is_usual or self.manager.is_provisional:
                self._look_back(run)
                if self.tracker.streams:
                    self.tracker.follow()
            if len(run.works) < len(run.buckets):
                with self.launching:
                    run.launch_ready(rest=True)
            if self.finalizes_manually and any(run.works):
                run.awaits_finalize = True
                self.wait_post_backward()
                return
        run.is_ended = True
        ends = EndsOfBackward.of(run.graph_task)
        ends.reducers.append(self)
        run.end = weakref.ref(ends, self._broke_off)

    def _accumulate(self, run: ReductionRun, is_usual: bool) -> None:
        """Note which parameters this local backward has used: they are reduced later."""
        self.has_accumulated = True
        if is_usual:
            self.accumulated = list(map(or_, self.accumulated, run.reached))
        else:
            for number in self.tracker.arrivals():
                self.accumulated[number] = True
            for number, _ in self.tracker.unannounced():
                self.reentrant.came(number)
            self.tracker.learn()
        if run.is_doubted:
            current = self.manager.current
            named = zip(current.names, current.params, run.reached, strict=True)
            left = [(name, param) for name, param, comes in named if comes]
            ends = EndsOfBackward.of(run.graph_task)
            ends.local.append((self, left, run.where, not run.may_be_reduced))
        self.close(run)

    def _look_back(self, run: ReductionRun) -> None:
        """Handle gradients that came in another order, did not come, or were not announced."""
        tracker = self.tracker
        if self.manager.is_provisional:
            arrived = tracker.arrivals()
            run.used[:] = self.accumulated
            for number in arrived:
                run.used[number] = True
            run.arrived = arrived
        self._note_unannounced(run)
        tracker.learn()

    def _note_unannounced(self, run: ReductionRun) -> None:
        """Note gradients of inner backwards, which the engine has not announced.

        Raises:
            RuntimeError: a gradient came after its bucket had been launched.
        """
        tracker = self.tracker
        late: list[int] = []
        for number, position in tracker.unannounced():
            self.reentrant.came(number)
            run.used[number] = True
            segment = tracker.segment_of[number]
            if run.filled[segment] and position >= run.packed_at.get(segment, 0):
                late.append(number)
        if late:
            tracker.learn()
            bucket, _ = self.manager.current.segments[tracker.segment_of[late[0]]]
            raise RuntimeError(
                f"{self.where()}: the gradient of {self.manager.current.names[late[0]]!r} arrived "
                f"after its bucket {bucket.index} had been flattened or left out. It comes from an "
                "inner backward (torch.utils.checkpoint with use_reentrant=True), and in "
                "earlier steps it did not. From the next step on such gradients are waited "
                "for; with use_reentrant=False they are announced beforehand."
            )

    def finish(self, run: ReductionRun) -> None:
        """All buckets have been launched: wait for them, and end the run."""
        manager, run.end = self.manager, _over
        try:
            if run.is_alone:
                run.bucket_set.make_views()
            run.finish()
            if run.is_captured:
                run.is_finished = True
            elif (
                manager.is_provisional
                or manager.since_change + 1 == REBUILD_AFTER
                or self.parameters.is_uncommitted
                or self.reentrant.suspected
                or self.events.on_reduced_all
            ):
                with Uninterrupted():
                    for call in self.events.on_reduced_all:
                        call(run)
                    self.after_reduction(run)
                    run.is_finished = True
            else:
                manager.since_change += 1
                run.is_finished = True
        except (RuntimeError, Mismatch) as error:
            self._fail(run, error)
        # (After a KeyboardInterrupt, for example, all-reduces may still be in flight: recovery
        # waits for them.)
        self.close(run)
        for call in self.events.on_end:
            call(run)
        if self.post_backward:
            self.wait_post_backward()

    def _fail(self, run: ReductionRun, error: Exception) -> NoReturn:
        """``run`` has ended with this error: raise it, with a message."""
        try:
            if isinstance(error, Mismatch):
                recovery.raise_mismatch(self, error, run)
            raise error
        except RuntimeError as named:
            if self.logger is not None:
                self.logger.set_error_and_log(str(named))
            # After a local error the other ranks go on: recovery waits for what is in flight.
            if not isinstance(named, LocalError):
                for call in self.events.on_abort:
                    call(run)
                self.close(run)
            raise

    def after_reduction(self, run: ReductionRun) -> None:
        """Rebuild buckets if the order of gradients, or the set of trainable parameters, changed.

        Every rank that took part in this reduction calls this, so its collectives match.
        """
        if self.parameters.is_uncommitted:
            self.parameters.commit()
        missing: Collection[int] | None = None
        if self.manager.is_provisional:
            missing = self.manager.agree_on_order(run.arrived, self.where(), self.sync.source_rank)
            if run.source.is_empty:  # this rank ran no backward that could show what is missing
                missing = ()
        self.reentrant.stayed_away(missing)
        failure = recovery.take_up_added(self, run) if self.parameters.added else None
        if (former := self.manager.renew()) is not None:
            self.renumber(former)
        memory = self.peer_memory
        if memory is not None and memory.followed() is not self.manager.current:
            self.follow_memory(memory)
        if failure is not None:
            raise failure

    def follow_memory(self, memory: PeerMemory) -> None:
        """Move new buckets to peer memory, if possible. All ranks call this at the same time."""
        self.transport = memory if memory.follow(self.manager.current, self.where()) else self.plain

    def renumber(self, former: Sequence[int | None]) -> None:
        """Update numbers: parameter ``i`` had number ``former[i]``, or ``None`` if it is new."""
        self.reentrant.renumber(former)
        if self.missing:
            self.missing = {new for new, old in enumerate(former) if old in self.missing}
        earlier = self.accumulated
        self._follow_buckets()
        # (The end of a reduced backward clears this.)
        self.accumulated = [old is not None and earlier[old] for old in former]

    def _follow_buckets(self) -> None:
        """Make the lists and hooks anew for the parameters in the current buckets."""
        current = self.manager.current
        self.is_on_gpu = any(param.is_cuda for param in current.params)
        self.accumulated = [False] * len(current.params)
        self.parameters.set_bucketed(current.names, current.params)
        self._watch_added(())
        former = getattr(self, "tracker", None)
        if former is not None:
            former.remove()
        with as_trainable(current.params):
            self.tracker = ReadyTracker(current.params, current.ranges, current.segments_of, self)
        if former is not None:
            self.tracker.inherit(former)

    def close(self, run: ReductionRun) -> None:
        """``run`` is over, with or without an error. (Recovery calls it again after Ctrl-C.)"""
        if not run.is_local:
            self.skipped_last = run.skipped
            self.buckets_reduced = len(run.buckets) - len(run.skipped)
            if self.has_accumulated:
                self.forget_accumulated()
            for bucket in self.manager.current.to_release:
                bucket.release()
            if run.skipped or run.is_alone:
                for bucket in self.manager.current.buckets:
                    bucket.before = {}  # gradients of before the backward, not needed any more
        for call in self.events.on_close:
            call(run)
        self.run = None
        self.last_alone = run if run.is_alone else None
        if self.in_context is None:
            self.group.open_runs.discard(self.reference)

    def forget_accumulated(self) -> None:
        """Clear the accumulated flags: those gradients have been reduced."""
        if unreduced:
            forget_unreduced(self)
        self.accumulated = [False] * len(self.accumulated)
        self.has_accumulated = False

    # What users register

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Have ``hook`` reduce the buckets of all backwards from now on.

        See :class:`~tritonddp.comm.comm_hook.CommHook`, and for what it raises the method of the
        wrapper.
        """
        if self.wire.compression is not None:
            raise RuntimeError(
                f"compression={self.wire.compression!r} and a communication hook both decide "
                "how gradients are sent: leave one of them out"
            )
        if self.comm_hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        if self.backward_runs:
            raise RuntimeError(
                f"{self.where()}: a communication hook cannot be registered during a backward, "
                "or inside trace()"
            )
        on_demand.check_finalized(self)
        recovery.recover(self.group)
        self.check_pending()
        self.comm_hook = state, hook
        self.peer_memory = self.plain.announce = None
        for bucket in self.manager.current.buckets:
            bucket.unshare()
        self.transport = CommHook(hook, state, self.group, self.counters)

    def detach(self) -> None:
        """Let go of the parameters for good, without waiting for any other rank."""
        self.is_detached = True
        self.tracker.remove()
        self._watch_added(())
        self.group.open_runs.discard(self.reference)
        self.run = None


def _broke_off(reference: weakref.ref[Reducer], _: object) -> None:
    """The engine has dropped the callback of a backward without calling it: it failed."""
    reducer = reference()
    if reducer is not None and reducer.run is not None:
        if reference in reducer.group.open_runs:
            reducer.group.owing.add(reducer)
        reducer.tracker.stop()
        for call in reducer.events.on_abort:
            call(reducer.run)
