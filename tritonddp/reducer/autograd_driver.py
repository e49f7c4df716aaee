"""When gradients are reduced: from the start of a backward to its last bucket.

One gradient, from ``backward()`` to ``.grad``::

    backward starts   on_backward       ask the engine which parameters it will reach; open a
                                        reduction
    gradient ready    (no Python)       a hook in C notes it, see graph/readiness.py
    segment full      on_segment_ready  reduction.pack: one flatten; on a GPU a segment is a whole
                                        bucket
    bucket full       launch_ready      bucket.exchange.launch: one asynchronous collective
    backward ends     _compute_ended              launch what is left
    all have ended    finalize_backward      reduction.finish: wait, one unflatten a bucket
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import NoneType
from typing import NoReturn

import torch
from torch import Tensor

from tritonddp import _torch
from tritonddp._device import is_capturing
from tritonddp._torch import COMPILED_AUTOGRAD, IN_COMPILED_AUTOGRAD, current_graph_task_id
from tritonddp.buckets.bucket_set import BucketSet
from tritonddp.comm.comm_hook import CommHook
from tritonddp.comm.reduction import LocalError, Reduction, open_reduction
from tritonddp.coordination.agreement import GradSource, Mismatch
from tritonddp.reducer import capture
from tritonddp.reducer.graph.backward import (
    FAILED,
    RUNNING,
    WAITING,
    Backward,
    Forward,
)
from tritonddp.reducer.graph.participation import (
    accumulates,
    as_trainable,
    is_of_others,
    may_run_inner_backward,
    outer_call,
)
from tritonddp.reducer.graph.readiness import ReadyTracker, WatchedParameters
from tritonddp.reducer.reducer import Reducer

logger = logging.getLogger(__name__)


class AutogradDriver:
    """Follows the backwards of a module, and has the reducer average their gradients.

    Args:
        reducer: averages over the ranks.

    Attributes:
        reducer: see above.
        counters, events, group, parameters, sync, agreement, manager, forwards, deferred: those
            of ``reducer``.
        use: which parameters are used.
        tracker: knows which segments are ready.
        backward: the backward that runs, has failed or waits for ``finalize_backward()``.
        post_backward: the end of the next backward waits for these, or the next forward.
        is_detached: hooks were removed: no backward is noticed any more.
        launching: held while a segment is packed: hooks of a multi-device module run on a thread
            per device.
        reference: a weak one, to this object.
        comm_hook: reduces the buckets; ``None`` if the user has registered none.
        steps_optimizers: optimizers step in the backward.
        finalizes_manually: backwards end in ``finalize_backward()``.
        last: the last reduction of a backward; it holds no gradients any more.
    """

    # A world of one takes the path of many: buckets are packed, sent and unpacked. For benchmarks
    # and tests alone: no user gains from it. (Set while a module is wrapped, it gives the buckets
    # memory of their own, as with many ranks.)
    exchanges_alone = False

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.counters, self.events = reducer.counters, reducer.events
        self.group, self.parameters = reducer.group, reducer.parameters
        self.sync, self.agreement = reducer.sync, reducer.agreement
        self.manager, self.where = reducer.manager, reducer.where
        self.forwards, self.deferred = reducer.forwards, reducer.deferred
        self.backward: Backward | None = None
        self.post_backward: list[torch.futures.Future] = []
        self.is_detached = False
        self.launching = threading.RLock()
        self.comm_hook: CommHook | None = None
        self.steps_optimizers = self.finalizes_manually = False
        self.last: Reduction | None = None
        self.reference = weakref.ref(self)
        self._broke_off = partial(_broke_off, self.reference)
        self._others = WatchedParameters(self.reference)
        self.group.join_forks(self)
        self.manager.notify(weakref.WeakMethod(self.track))
        self.track()

    @property
    def order(self) -> tuple[str, int]:
        """Where it is in an order of all reducers that is the same on all ranks."""
        return self.group.name, self.parameters.number

    @property
    def bucket_set(self) -> BucketSet:
        """The buckets in force."""
        return self.manager.current

    @property
    def backward_runs(self) -> bool:
        """Whether a backward runs now: False if it failed, or waits for ``finalize_backward()``."""
        backward = self.backward
        return not (backward is None or backward.phase is FAILED or backward.is_unfinalized)

    # Before a forward

    def before_forward(self) -> None:
        """Catch up, and look for changed parameters.

        Only with gradients enabled: the module may make collectives then (SyncBatchNorm), and its
        backward will. Raises what the docstring of the wrapper's ``forward()`` lists. (On a GPU
        ranks that do not reduce the same find that in the backward, see :class:`Agreement`.)
        """
        if (self.post_backward or self.deferred or self.group.outstanding) and not self._catch_up():
            return
        if not torch.is_grad_enabled():
            return
        for call in self.events.on_forward:
            call()
        if self.parameters.look_for_changes():
            self.refresh_parameters()

    def _catch_up(self, graph_task: int = -1) -> bool:
        """Recover from failed backwards, and do what was deferred to the next forward.

        Before a forward without gradients, wait for :attr:`post_backward` only.

        Args:
            graph_task: the engine's id of the backward that begins; -1 outside one.

        Returns:
            Whether to go on: False if the hooks were removed.
        """
        if graph_task == -1:
            self.wait_post_backward()
        if not torch.is_grad_enabled() and graph_task == -1:
            return True
        if self.is_detached:
            self.group.refuse_if_forked()
            return False
        self.check_finalized()
        self.group.recover(graph_task)
        if graph_task == -1:
            self.deferred.run()
        return True

    def flush(self, reduces: bool = False) -> None:
        """Make up for a last backward that failed, where no forward follows to do so.

        Where this rank ``reduces`` next, the end of that says whether the ranks have reduced the
        same before: it does so too on a rank whose next reduction is a backward. Else wait for
        :attr:`post_backward`, and look at once.
        """
        self.check_finalized()
        if not reduces:
            self.wait_post_backward()
        self.group.recover()
        if not reduces:
            self.reducer.check_pending()

    def flush_and_refresh(self) -> None:
        """Call :meth:`flush`, and look for changed parameters."""
        self.flush()
        self.refresh_parameters()

    def refresh_parameters(self) -> None:
        """Look for changed parameters; see :meth:`ModuleParameters.refresh`. No collective."""
        if self.parameters.refresh(self.where):
            self.watch_others()

    def adopt_parameters(self) -> None:
        """Parameters have come or gone, before a forward that other ranks run too."""
        if not (self.is_detached or self.backward_runs):
            self.reducer.adopt_parameters()

    def count_any_call(self, afterwards: Callable[[], None]) -> None:
        """Reduce all backwards outside ``no_sync``; call ``afterwards`` when one is reduced."""
        self.forwards.count_any_call()
        self.reducer.call_afterwards(afterwards)
        self.watch_others()

    def watch_others(self) -> None:
        """Where any call counts, notice a backward that reaches nothing that has a bucket.

        No forward may tell of a parameter that was added, or frozen and is trained now.
        """
        if self.forwards.counts_any_call:
            self._others.watch(self.parameters.in_no_bucket())

    def wait_post_backward(self) -> None:
        """Wait for the futures that buffer hooks have returned."""
        if self.post_backward:
            futures, self.post_backward = self.post_backward, []
            torch.futures.wait_all(futures)

    # Start of backward

    def on_backward(
        self, forward: Forward | None = None, first_param: Tensor | None = None
    ) -> None:
        """A backward runs: if it is new, find out which parameters it will reach. For hooks.

        Args:
            forward: the forward whose output it goes through; ``None`` if not known.
            first_param: the ``first_param`` of :class:`Backward`.
        """
        backward = self.backward
        if backward is not None and backward.phase is RUNNING:
            if forward is not None:
                self._on_further_output(backward, forward)
            return
        expected = self.tracker.query()
        if expected is None or not all(expected):
            expected = self._look_at_missing(expected)
        if expected is not None and (self.deferred or self.group.outstanding):
            expected = self._catch_up_in_backward()
        if expected is None:
            return
        if getattr(sys.modules.get(COMPILED_AUTOGRAD), IN_COMPILED_AUTOGRAD, False):
            raise RuntimeError(
                f"{self.where()}: Compiled autograd is not compatible with tritonddp, whose hooks "
                "need autograd's own engine: leave torch._dynamo.config.compiled_autograd at "
                "False. torch.compile does not need it to compile a forward."
            )
        bypasses_forward = forward is None and not self.forwards.was_local
        source = self.forwards.decide(forward, self.sync, self.counters.reductions, self.where)
        if source is None:
            self._prepare_local(expected, forward, first_param, bypasses_forward)
        else:
            if self.parameters.swaps_seen != _torch.swaps[0]:
                self.parameters.check_swaps(self.where)
            self._prepare_for_backward(expected, source, first_param)

    def _look_at_missing(self, expected: list[bool] | None) -> list[bool] | None:
        """The backward that runs does not reach all parameters.

        Returns:
            For each parameter, whether it does. (Hooks may be new.) ``None`` if the backward is
            none of the wrapper's, or ``torch.autograd.grad``.
        """
        if expected is None or all(expected):
            return expected
        if not any(expected) and is_of_others(self.manager.current.params):
            return None
        missing = {index for index, comes in enumerate(expected) if not comes}
        if missing != self.use.missing:
            self.parameters.check_kinds(missing, self.where)
        if not self.tracker.is_outdated(missing):
            return expected
        self.track()
        return self._look_at_missing(self.tracker.query())

    def _catch_up_in_backward(self) -> list[bool] | None:
        """See :meth:`_catch_up`. Returns what is expected: the buckets may be others now."""
        former = self.backward
        if former is not None:
            former.finish_waiting()  # a callback of the user, at the end of it, runs another one
            if self.backward is former and former.phase is WAITING and not former.is_unfinalized:
                raise RuntimeError(
                    f"{former.where}: a communication hook, a signal handler or another thread "
                    "runs a backward through the module, while gradients of its last backward are "
                    "reduced: run it after backward(), or use torch.autograd.grad"
                )
        if not self._catch_up(current_graph_task_id()):
            return None
        return self._look_at_missing(self.tracker.query())

    def _on_further_output(self, backward: Backward, forward: Forward) -> None:
        """The backward that runs goes through an output of this forward too.

        Or another one does, inside it: in a hook of the user, or a reentrant checkpoint.
        """
        if current_graph_task_id() != backward.graph_task and not accumulates():
            return  # torch.autograd.grad
        if backward.reduction is None:
            if backward.may_be_reduced and forward.syncs:
                self._reduce_after_all(backward, forward)
            return
        if self.forwards.by_call and not forward.syncs:
            raise RuntimeError(
                f"{backward.where}: this backward goes through a forward inside no_sync(), after "
                "a gradient that goes through none and is averaged: run both the forward and the "
                "backward inside no_sync(), or outside"
            )
        forward.reach()

    def _reduce_after_all(self, local: Backward, forward: Forward) -> None:
        """A backward that was local so far goes through an output of a synchronized forward."""
        source = self.forwards.decide(forward, self.sync, self.counters.reductions, self.where)
        if source is None:
            local.keep_local(forward)
            return
        use = self.use
        ready, expected = list(use.ready), use.expected
        for call in self.events.on_abort:
            call(None)
        self._prepare_for_backward(expected, source, ready[0] if ready else None, local)
        use.ready.extend(ready)

    def _prepare_for_backward(
        self,
        expected: Sequence[bool],
        source: GradSource,
        first_param: Tensor | None,
        local: Backward | None = None,
    ) -> None:
        """A backward begins that is reduced; or ``local``, which has begun, is reduced too."""
        manager, tracker, group = self.manager, self.tracker, self.group
        current, is_provisional = manager.current, manager.is_provisional
        if self.events.needs_reached:
            self.reducer.check_pending()
        is_captured = current.is_on_gpu and torch.cuda.is_current_stream_capturing()
        if is_captured:
            capture.begin(self.reducer, tracker.gradients.streams, expected, is_reduced=True)
        if manager.former_counts or manager.schema is not self.parameters.schema:
            manager.reduction_begins()
        current.use.begin(expected, self.sync.finds_unused)
        is_inner = False
        if first_param is not None or current.use.suspected:
            is_inner = self._wait_for_inner(first_param is not None and local is None)
        is_alone = group.is_alone and self._needs_no_exchange()
        reduction = open_reduction(
            self.reducer,
            current,
            source,
            where=f"rank {group.rank}, step {self.counters.reductions + 1}",
            is_alone=is_alone,
            is_captured=is_captured,
        )
        backward = Backward(
            reduction.where,
            reduction,
            first_param=first_param,
            is_provisional=is_provisional,
            creates_graph=torch.is_grad_enabled(),
            is_inner=is_inner,
        )
        # From here on the other ranks wait for the collectives of this reduction: see drain.
        self.backward = backward
        self.counters.reductions += 1
        try:
            group.outstanding[self] = None
            tracker.begin(looks=not (is_provisional or is_alone))
            reduction.pending[:] = tracker.pending
            for call in self.events.on_begin:
                call(backward)
            if is_provisional:
                manager.announce()
            for bucket in current.to_release:
                bucket.release()
            backward.queue_end(partial(self._compute_ended), self._broke_off, local)
        except BaseException:
            backward.moves_to(FAILED)
            tracker.stop()
            raise
        if not (reduction.pending[0] or is_provisional):
            (self.on_gradients if first_param is not None else tracker.tell_first)()

    def _wait_for_inner(self, is_first: bool) -> bool:
        """Have segments wait for gradients that inner backwards may bring unannounced.

        With ``is_first`` no output has told of this backward. Returns whether it is an inner one
        itself: a forward has armed the reduction, and the engine announces an inner backward only.
        """
        use = self.use
        if is_first and outer_call(self.manager.current.is_on_gpu):
            use.wait_for_all()
            return True
        is_known = use.inner or self.manager.is_provisional
        if use.suspected and not is_known and may_run_inner_backward():
            use.wait_for(use.suspected)
        return False

    def _needs_no_exchange(self) -> bool:
        """Whether the only rank needs no buckets: its gradients are the sum, divided by 1."""
        manager = self.manager
        wire = manager.factory.wire
        return (
            not self.exchanges_alone
            and self.reducer.weights.divisor == 1
            and self.comm_hook is None
            and not self.finalizes_manually
            and self.sync.join is None
            and wire.reduce_dtype is None
            and wire.compression is None
            and not self.events.needs_buckets
            and not manager.current.needs_reduction
        )

    def _prepare_local(
        self,
        expected: Sequence[bool],
        forward: Forward | None,
        first_param: Tensor | None,
        bypasses_forward: bool,
    ) -> None:
        """A backward begins that only accumulates."""
        ended = self.forwards.ended_inside
        if ended and ended == outer_call(self.manager.current.is_on_gpu):
            raise RuntimeError(
                f"{self.where()}: a gradient became ready again after all were averaged at the end "
                "of an inner backward: use torch.utils.checkpoint with use_reentrant=False"
            )
        if self.manager.current.is_on_gpu and is_capturing():
            capture.begin(self.reducer, self.tracker.gradients.streams, (), is_reduced=False)
        may_be_reduced = self.sync.enabled and self.sync.join is None
        self.use.begin_local(expected)
        backward = Backward(
            self.where(),
            first_param=first_param,
            is_provisional=self.manager.is_provisional,
            may_be_reduced=may_be_reduced,
            forward=forward,
            bypasses_forward=bypasses_forward,
            creates_graph=torch.is_grad_enabled(),
        )
        self.backward = backward
        try:
            self.group.outstanding[self] = None
            self.tracker.begin(looks=False)
            for call in self.events.on_local:
                call(backward)
            for call in self.events.on_begin:
                call(backward)
            backward.queue_end(partial(self._compute_ended), self._broke_off)
        except BaseException:
            backward.moves_to(FAILED)
            self.tracker.stop()
            raise

    # A gradient, a segment, a bucket is ready

    def on_first_gradient(self, param: Tensor) -> None:
        """The first gradient of a backward that has not begun at an output of the module."""
        if self.forwards.counts_any_call and not self.backward_runs:
            self.refresh_parameters()
            if not self.parameters.is_agreed:
                self.reducer.adopt_parameters(in_backward=True)
        self.on_backward(first_param=param)
        if self.backward is not None and self.backward.runs and self.use.has(param):
            self.tracker.gradients.note(param)

    def on_gradients(self) -> None:
        """A gradient has come: launch the buckets at the front that wait for none."""
        reduction = None if self.backward is None else self.backward.reduction
        if reduction is not None:
            with torch.no_grad(), self.launching, self.group.uninterrupted():
                reduction.launch_ready()

    def on_segment_ready(self, segment_index: int) -> None:
        """All gradients of a segment are ready: see :meth:`Listener.on_segment_ready`."""
        backward = self.backward
        reduction = None if backward is None else backward.reduction
        if backward is None or reduction is None or reduction.packed[segment_index]:
            return
        if backward.creates_graph and torch.is_grad_enabled():
            with torch.no_grad():
                return self.on_segment_ready(segment_index)
        try:
            with self.launching:
                if self.tracker.gradients.other_streams:
                    self.tracker.join_streams(segment_index)
                reduction.pack(segment_index, launches=True)
        except KeyboardInterrupt:
            self.group.refuse_further_use()
            raise

    def on_unusual_order(self, segment_index: int) -> None:
        """Gradients came in another order than last time: launch the segment if it is full."""
        reduction = None if self.backward is None else self.backward.reduction
        if reduction is None:
            return
        with self.launching:
            is_full = self.tracker.look(segment_index)
        if self.tracker.has_unannounced:
            self.tracker.note_unannounced(reduction)
        if is_full:
            self.on_segment_ready(segment_index)

    # End of backward

    def _compute_ended(self) -> None:
        """The backward is over: launch the remaining buckets; :class:`EndsOfBackward` waits."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._compute_ended()
        backward = self.backward
        if backward is None or (backward.is_inner and self._outlives_inner(backward)):
            return
        is_usual = self.tracker.stop()
        for call in self.events.on_compute_end:
            call(backward)
        reduction = backward.reduction
        if reduction is None:
            self._close_local(backward, is_usual)
            return
        if not is_usual or self.manager.is_provisional:
            self._look_back(reduction)
        if len(reduction.works) < len(reduction.buckets):
            if self.tracker.gradients.streams:
                self.tracker.join_streams()
            with self.launching, self.group.uninterrupted():
                reduction.launch_ready(rest=True)
        if self.finalizes_manually and any(reduction.works):
            backward.waits_for_user(True)
            self.deferred.append(NoneType)  # so that the next entry looks
            self.group.outstanding.pop(self, None)  # nobody may call finalize_backward()
            self.wait_post_backward()
            return
        backward.ends(self, self._broke_off)

    def _outlives_inner(self, backward: Backward) -> bool:
        """An inner backward is over. Returns whether the reduced one goes on around it.

        (A function or hook of the user may have run a whole backward, and step after it.)
        """
        is_whole = self.forwards.was_armed == 1 and self.use.has_all()
        if not is_whole and backward.outlives_inner(partial(self._compute_ended), self._broke_off):
            return True
        self.forwards.end_inside(outer_call(self.manager.current.is_on_gpu))
        return False

    def _close_local(self, backward: Backward, is_usual: bool) -> None:
        self.use.add_local(is_usual)
        if not is_usual:
            self.tracker.learn()
        self._close(backward)
        self.wait_post_backward()

    def _look_back(self, reduction: Reduction) -> None:
        """Handle gradients that came in another order, did not come, or were not announced."""
        if self.manager.is_provisional:
            self.use.note(self.use.ready_indices())
        self.tracker.note_unannounced(reduction)
        self.tracker.learn()

    def finalize_backward(self) -> None:
        """The backward has ended, and all its buckets are launched: wait for them.

        Raises:
            RuntimeError: see :meth:`Reduction.finish`; or the ranks do not reduce the same.
        """
        backward = self.backward
        if backward is None or backward.phase is not WAITING:
            return
        reduction, manager = backward.reduction, self.manager
        assert reduction is not None
        try:
            reduction.finish()
            if not reduction.is_captured:
                for call in self.events.on_reduced_all:
                    call(reduction)
                if manager.is_provisional or manager.to_remove or self.use.suspected:
                    ready = self.use.ready_indices() if manager.is_provisional else ()
                    self.reducer.complete(reduction, ready)
        except (RuntimeError, Mismatch) as error:
            self._fail(backward, error)
        except BaseException as error:  # of a signal handler
            backward.moves_to(FAILED)
            if isinstance(error, KeyboardInterrupt):
                self.group.refuse_further_use()
            raise
        self._close(backward)
        if self.reducer.afterwards is not None and self.parameters.ignored.syncs_buffers:
            self.reducer.afterwards()
        for call in self.events.on_end:
            call(reduction)
        if self.post_backward:
            self.wait_post_backward()

    def _fail(self, backward: Backward, error: Exception) -> NoReturn:
        """The reduction of ``backward`` has ended with this error: raise it, with a message."""
        try:
            if isinstance(error, Mismatch):
                self.reducer.raise_mismatch(error, backward.reduction)
            raise error
        except RuntimeError as named:
            for report in self.events.on_error:
                report(str(named))
            # After a local error the other ranks go on: drain waits for what is in flight.
            if isinstance(named, LocalError):
                backward.moves_to(FAILED)
            else:
                self._drop(backward)
            raise

    def _close(self, backward: Backward) -> None:
        """The backward is over, with or without an error, and owes no collectives."""
        self.backward = None
        self.group.outstanding.pop(self, None)
        if backward.reduction is not None:
            if self.use.has_local:
                self.use.clear_local()
            self.last = backward.reduction
            for bucket in self.manager.current.to_release:
                bucket.release()
        for call in self.events.on_close:
            call(backward.reduction)

    # After a backward that failed on this rank: all ranks still make the same collectives

    def has_failed(self) -> bool:
        """Whether the last backward failed with an exception."""
        backward = self.backward
        return backward is not None and backward.has_failed(self.manager.current.is_on_gpu)

    def abandon(self) -> None:
        """The last backward has failed: launch its remaining buckets."""
        backward = self.backward
        assert backward is not None
        backward.fail()  # an inner one may have stopped unnoticed
        reduction = backward.reduction
        if reduction is None or reduction.is_captured:
            return
        self.tracker.stop()
        self.reducer.warn_of_nan(reduction)
        try:
            with self.group.uninterrupted():
                self.reducer.abandon(reduction)
        except Exception:
            self._drop(backward)
            raise

    def drain(self) -> None:
        """The last backward has failed: make its remaining collectives."""
        backward = self.backward
        assert backward is not None
        if (reduction := backward.reduction) is None:
            self._close(backward)
            return
        self.tracker.stop()
        if reduction.is_captured:  # a capture executes no collective
            for bucket in reduction.buckets:
                bucket.storage.discard(bucket)
            self._drop(backward)
            return
        ready = self.use.ready_indices() if self.manager.is_provisional else ()
        try:
            with self.group.uninterrupted():
                self.reducer.drain(reduction, ready)
        finally:
            self._drop(backward)

    def _drop(self, backward: Backward) -> None:
        for call in self.events.on_abort:
            call(backward.reduction)
        self._close(backward)

    # Buckets

    def track(self) -> None:
        """Make the lists and hooks anew for the parameters in the current buckets."""
        current = self.manager.current
        self.use = current.use
        self.parameters.set_bucketed(current.names, current.params)
        current.restore_views()
        self.watch_others()
        former = getattr(self, "tracker", None)
        if former is not None:
            former.remove()
        with as_trainable(current.params):
            self.tracker = ReadyTracker(current, self)
        if former is not None:
            self.tracker.inherit(former)

    # What users and features ask for

    def flush_outside_backward(self, problem: str, reduces: bool = False) -> None:
        """Call :meth:`flush`; a RuntimeError that says ``problem`` if a backward runs."""
        if self.backward_runs:
            raise RuntimeError(f"{self.where()}: {problem}")
        self.flush(reduces)

    def prepare_request(self, what: str = "reduced on request") -> None:
        """The user asks for something that needs the gradients of the last backward.

        Raises:
            RuntimeError: gradients cannot be ``what`` now.
        """
        message = f"gradients are not {what} in a replay: do it without a graph"
        capture.refuse(self.manager.current, self.where(), message)
        problem = f"gradients cannot be {what} while a backward runs: wait for its end"
        self.flush_outside_backward(problem, reduces=True)

    def reduce_accumulated(self) -> None:
        """Average ``.grad`` of all trainable parameters: the end of gradient accumulation."""
        self.prepare_request()
        self.parameters.register()
        self.refresh_parameters()
        self.reducer.reduce_accumulated()

    def reduced_parameters(self) -> set[Tensor]:
        """Parameters whose ``.grad`` is still the result of the last reduction, as on all ranks."""
        self.prepare_request("compared")
        self.wait_post_backward()
        found = self.reducer.reduced_parameters()
        return set() if self.is_detached else found

    def check_finalized(self) -> None:
        """Raise a RuntimeError if a backward waits for ``finalize_backward()``."""
        if self.backward is not None and self.backward.is_unfinalized:
            raise RuntimeError(
                f"{self.where()}: Expected to have finalized the prior backward pass before "
                "starting a new one. Call finalize_backward() after backward() when "
                "require_manual_backward_finalization is true."
            )

    def finalize_manually(self, required: bool) -> None:
        """Whether backwards end in ``finalize_backward()``, not by themselves, from now on."""
        self.finalizes_manually = required

    def reduce_by(self, hook: CommHook) -> None:
        """Reduce the buckets of backwards by ``hook`` from now on."""
        self.comm_hook = hook
        self.manager.reduce_by(hook)

    def step_optimizers(self) -> None:
        """Optimizers step in the backward from now on."""
        self.steps_optimizers = True

    def detach(self) -> None:
        """Let go of the parameters for good, without waiting for any other rank."""
        self.is_detached = True
        self.tracker.let_go()
        self._others.watch(())
        self.deferred.append(NoneType)  # so that entries look
        self.group.outstanding.pop(self, None)
        self.backward = None


def _broke_off(reference: weakref.ref[AutogradDriver], _: object) -> None:
    """The engine has dropped the callback of a backward without calling it: it failed."""
    driver = reference()
    if driver is not None and driver.backward is not None:
        driver.backward.fail()
        driver.tracker.stop()
        for call in driver.events.on_abort:
            call(driver.backward.reduction)
