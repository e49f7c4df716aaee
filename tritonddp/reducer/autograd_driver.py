"""Follow a backward from its start to its last bucket, and launch the buckets.

One gradient, from ``backward()`` to ``.grad``::

    backward starts   on_backward       ask the engine which parameters it will reach; open a
                                        reduction
    gradient ready    (no Python)       a hook in C records it, see graph/readiness.py
    segment full      on_segment_ready  reduction.pack: one flatten; on a GPU a segment is a whole
                                        bucket
    bucket full       launch_ready      bucket.exchange.launch: one asynchronous collective
    backward ends     _compute_ended    launch the remaining buckets
    all have ended    finalize_backward reduction.finish: wait, one unflatten per bucket
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
    """Follow the backwards of a module, and have the reducer average their gradients.

    Args:
        reducer: averages over the ranks.

    Attributes:
        reducer: see above.
        counters, events, group, parameters, sync, agreement, manager, forwards, deferred: see
            ``reducer``.
        use: records which parameters are used.
        tracker: tracks which segments are ready.
        backward: the backward that is running, waits for its buckets, or has failed.
        post_backward: futures to wait for at the end of a backward, or before a forward.
        is_detached: hooks were removed; later backwards are not noticed.
        launching: lock that is held while a segment is packed, because hooks of a multi-device
            module run on one thread per device.
        reference: weak reference to this object.
        comm_hook: reduces the buckets; ``None`` if the user has registered none.
        steps_optimizers: optimizers step during the backward.
        finalizes_manually: the user calls ``finalize_backward()`` after each backward.
        last: last reduction of a backward; it holds no gradients any more.
    """

    # If True, one rank packs, sends and unpacks buckets as many ranks do. Only benchmarks and tests
    # use it. It must be set before the module is wrapped to allocate separate bucket memory, as
    # with many ranks.
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
        """Sort key of this reducer; identical on all ranks."""
        return self.group.name, self.parameters.number

    @property
    def bucket_set(self) -> BucketSet:
        """The current buckets."""
        return self.manager.current

    @property
    def backward_runs(self) -> bool:
        """Whether a backward is running; False if it failed or awaits finalization."""
        backward = self.backward
        return not (backward is None or backward.phase is FAILED or backward.is_unfinalized)

    # Before a forward

    def before_forward(self) -> None:
        """Complete outstanding work, and look for changed parameters.

        Without gradients, only wait for :attr:`post_backward`. With gradients, the module may run
        collectives (SyncBatchNorm), and its backward will. For errors see ``forward()`` of the
        wrapper. On a GPU, a mismatch is found in the backward, see :class:`Agreement`.
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
        """Recover failed backwards, and run the actions that were deferred to the next forward.

        Before a forward without gradients, only wait for :attr:`post_backward`.

        Args:
            graph_task: the engine's ID of the backward that begins; -1 outside a backward.

        Returns:
            Whether to continue: False if the hooks were removed.
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
        """Recover the last backward if it failed. Used where no forward follows that would do so.

        Also wait for :attr:`post_backward`, and check for mismatches between ranks. Skip both with
        ``reduces``: this rank starts a reduction next, whose end checks for mismatches, as on a
        rank whose next reduction is a backward.
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
        """Look for changed parameters, without collectives; see :class:`ModuleParameters`."""
        if self.parameters.refresh(self.where):
            self.watch_others()

    def adopt_parameters(self) -> None:
        """Adopt added or removed parameters, before a forward that the other ranks run too."""
        if not (self.is_detached or self.backward_runs):
            self.reducer.adopt_parameters()

    def count_any_call(self, afterwards: Callable[[], None]) -> None:
        """Reduce all backwards outside ``no_sync``; call ``afterwards`` after each reduction."""
        self.forwards.count_any_call()
        self.reducer.call_afterwards(afterwards)
        self.watch_others()

    def watch_others(self) -> None:
        """If every call counts, notice backwards that reach only parameters without a bucket.

        For a parameter that was added or unfrozen, there may be no forward that detects it.
        """
        if self.forwards.counts_any_call:
            self._others.watch(self.parameters.in_no_bucket())

    def wait_post_backward(self) -> None:
        """Wait for the futures that buffer hooks returned."""
        if self.post_backward:
            futures, self.post_backward = self.post_backward, []
            torch.futures.wait_all(futures)

    # Start of backward

    def on_backward(
        self, forward: Forward | None = None, first_param: Tensor | None = None
    ) -> None:
        """Prepare a new backward: find out which parameters it will reach. Called by hooks.

        Args:
            forward: the forward whose output the backward goes through; ``None`` if not known.
            first_param: see :class:`Backward`.
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
                "require the autograd engine. Set torch._dynamo.config.compiled_autograd = False. "
                "torch.compile(ddp) does not need compiled autograd."
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
        """Handle a backward that does not reach all parameters.

        Returns:
            For each parameter, whether the backward reaches it; hooks may have been rebuilt.
            ``None`` if the backward does not belong to this wrapper, or is ``torch.autograd.grad``.
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
        """Call :meth:`_catch_up`, then query the expected parameters: buckets may have changed."""
        former = self.backward
        if former is not None:
            former.finish_waiting()  # if a user's callback at its end runs this backward
            if self.backward is former and former.phase is WAITING and not former.is_unfinalized:
                raise RuntimeError(
                    f"{former.where}: a communication hook, a signal handler or another thread "
                    "started a backward through the module while the gradients of its last "
                    "backward were being reduced. Run it after backward(), or use "
                    "torch.autograd.grad"
                )
        if not self._catch_up(current_graph_task_id()):
            return None
        return self._look_at_missing(self.tracker.query())

    def _on_further_output(self, backward: Backward, forward: Forward) -> None:
        """Handle an output of ``forward`` that the backward reaches after it has begun.

        An inner backward, run by a user's hook or a reentrant checkpoint, may reach it too.
        """
        if current_graph_task_id() != backward.graph_task and not accumulates():
            return  # torch.autograd.grad
        if backward.reduction is None:
            if backward.may_be_reduced and forward.syncs:
                self._reduce_after_all(backward, forward)
            return
        if self.forwards.by_call and not forward.syncs:
            raise RuntimeError(
                f"{backward.where}: this backward first reached a parameter without a forward of "
                "the module (for example, in a weight penalty), then a forward inside no_sync(). "
                "It cannot average only the former. Run both the forward and the backward inside "
                "no_sync(), or both outside"
            )
        forward.reach()

    def _reduce_after_all(self, local: Backward, forward: Forward) -> None:
        """Reduce a backward that was local, and now reaches an output of a synchronized forward."""
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
        """Open the reduction of a new backward, or of ``local``, which began as a local one."""
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
        # From here on the other ranks wait for the collectives of this reduction; see abandon().
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
        """Make segments wait for gradients of inner backwards, which the engine does not announce.

        With ``is_first``, a gradient was ready before an output hook could report this backward.
        Return True if it is itself an inner backward: then the engine knows only its nodes.
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
        """Return True if a single rank needs no buckets: the sum is its gradient, divided by 1."""
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
        """Prepare a backward that only accumulates."""
        ended = self.forwards.ended_inside
        if ended and ended == outer_call(self.manager.current.is_on_gpu):
            raise RuntimeError(
                f"{self.where()}: a gradient became ready again after all gradients were averaged "
                "at the end of an inner backward. Use torch.utils.checkpoint with "
                "use_reentrant=False"
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

    # Gradients, segments and buckets become ready

    def on_first_gradient(self, param: Tensor) -> None:
        """Handle the first gradient of a backward that did not begin at an output of the module."""
        if self.forwards.counts_any_call and not self.backward_runs:
            self.refresh_parameters()
            if not self.parameters.is_agreed:
                self.reducer.adopt_parameters(in_backward=True)
        self.on_backward(first_param=param)
        if self.backward is not None and self.backward.runs and self.use.has(param):
            self.tracker.gradients.note(param)

    def on_gradients(self) -> None:
        """Launch the leading buckets that wait for no gradient, after a gradient became ready."""
        reduction = None if self.backward is None else self.backward.reduction
        if reduction is not None:
            with torch.no_grad(), self.launching, self.group.uninterrupted():
                reduction.launch_ready()

    def on_segment_ready(self, segment_index: int) -> None:
        """Pack a segment whose gradients are all ready; see :meth:`Listener.on_segment_ready`."""
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
        """Launch the segment if it is full, after gradients were ready in a different order."""
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
        """Launch the remaining buckets; :class:`EndsOfBackward` waits for them."""
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
            self.deferred.append(NoneType)  # makes the next forward or backward call _catch_up()
            self.group.outstanding.pop(self, None)  # finalize_backward() may never be called
            self.wait_post_backward()
            return
        backward.ends(self, self._broke_off)

    def _outlives_inner(self, backward: Backward) -> bool:
        """Return True if the reduced backward continues after this inner backward has ended.

        False if a user's function or hook has run a whole backward: an optimizer may step next.
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
        """Handle gradients that were ready in a different order, not ready, or not announced."""
        if self.manager.is_provisional:
            self.use.note(self.use.ready_indices())
        self.tracker.note_unannounced(reduction)
        self.tracker.learn()

    def finalize_backward(self) -> None:
        """Wait for all buckets of a backward that has ended and launched them.

        Raises:
            RuntimeError: see :meth:`Reduction.finish`, or ranks reduced different gradients.
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
        except BaseException as error:  # raised by a signal handler
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
        """Raise ``error`` of the reduction of ``backward``, with an explanation."""
        try:
            if isinstance(error, Mismatch):
                self.reducer.raise_mismatch(error, backward.reduction)
            raise error
        except RuntimeError as named:
            for report in self.events.on_error:
                report(str(named))
            # After a local error the other ranks continue; drain() waits for collectives in flight.
            if isinstance(named, LocalError):
                backward.moves_to(FAILED)
            else:
                self._drop(backward)
            raise

    def _close(self, backward: Backward) -> None:
        """Close a backward that has ended, with or without an error, and owes no collectives."""
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

    # A backward that failed on this rank: all ranks still run the same collectives

    def has_failed(self) -> bool:
        """Return True if the last backward failed with an exception."""
        backward = self.backward
        return backward is not None and backward.has_failed(self.manager.current.is_on_gpu)

    def abandon(self) -> None:
        """Launch the remaining buckets of the last backward, which has failed."""
        backward = self.backward
        assert backward is not None
        backward.fail()  # an inner backward may have stopped unnoticed
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
        """Complete the remaining collectives of the last backward, which has failed."""
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
        """Rebuild the lists and hooks for the parameters in the current buckets."""
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

    # Requests of users and features

    def flush_outside_backward(self, problem: str, reduces: bool = False) -> None:
        """Call :meth:`flush`; raise a RuntimeError with ``problem`` if a backward is running."""
        if self.backward_runs:
            raise RuntimeError(f"{self.where()}: {problem}")
        self.flush(reduces)

    def prepare_request(self, what: str = "reduced on request") -> None:
        """Prepare a request that needs the gradients of the last backward.

        Raises:
            RuntimeError: gradients cannot be ``what`` now.
        """
        message = f"gradients cannot be {what} during capture. Make this call outside the graph"
        capture.refuse(self.manager.current, self.where(), message)
        problem = f"gradients cannot be {what} during a backward. Make this call after backward()"
        self.flush_outside_backward(problem, reduces=True)

    def reduce_accumulated(self) -> None:
        """Average ``.grad`` of all trainable parameters at the end of gradient accumulation."""
        self.prepare_request()
        self.parameters.register()
        self.refresh_parameters()
        self.reducer.reduce_accumulated()

    def reduced_parameters(self) -> set[Tensor]:
        """Return the parameters whose ``.grad`` still is the last mean, identical on all ranks."""
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
        """Set whether the user ends each backward with ``finalize_backward()``, from now on."""
        self.finalizes_manually = required

    def reduce_by(self, hook: CommHook) -> None:
        """Reduce the buckets of backwards with ``hook`` from now on."""
        self.comm_hook = hook
        self.manager.reduce_by(hook)

    def step_optimizers(self) -> None:
        """Step optimizers during the backward from now on."""
        self.steps_optimizers = True

    def detach(self) -> None:
        """Release the parameters permanently, without waiting for any other rank."""
        self.is_detached = True
        self.tracker.let_go()
        self._others.watch(())
        self.deferred.append(NoneType)  # makes the next forward or backward call _catch_up()
        self.group.outstanding.pop(self, None)
        self.backward = None


def _broke_off(reference: weakref.ref[AutogradDriver], _: object) -> None:
    """Handle a failed backward: the engine dropped its callback without calling it."""
    driver = reference()
    if driver is not None and driver.backward is not None:
        driver.backward.fail()
        driver.tracker.stop()
        for call in driver.events.on_abort:
            call(driver.backward.reduction)
