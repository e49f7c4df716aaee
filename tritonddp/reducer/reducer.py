"""When gradients are reduced: readiness, launch order, end of backward.

One gradient, from ``backward()`` to ``.grad``::

    backward starts   begin      ask the engine which parameters it will reach, and count them
    gradient ready    hook       one counter goes down, nothing else
    segment full      _fill      reduction.fill: one flatten; on a GPU a segment is a whole bucket
    bucket full       _launch    reduction.start: one asynchronous all-reduce
    backward ends     _end       launch what is left; reduction.finish: wait, one unflatten
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import or_

import torch

from tritonddp._torch import (
    compiled_autograd_runs,
    current_autograd_node,
    current_graph_task_id,
    queue_end_of_backward,
)
from tritonddp.buckets.bucket import Bucket, GradientError
from tritonddp.comm.reduction import LocalError
from tritonddp.coordination.agreement import Source
from tritonddp.coordination.forks import refuse_inherited
from tritonddp.coordination.interrupts import Uninterrupted
from tritonddp.features.skipping import unused_buckets
from tritonddp.reducer.in_context import InContext
from tritonddp.reducer.output_hooks import Forward
from tritonddp.reducer.participation import accumulates
from tritonddp.reducer.state import Phase


class Reducer(InContext):
    """Reduces the gradients of a module over a process group during each backward.

    Its state is :class:`~tritonddp.reducer.state.ReducerState`. What it does while no backward
    runs is in :class:`~tritonddp.reducer.between.BetweenBackwards`, and what it owes to the other
    ranks whatever happens in :class:`~tritonddp.reducer.recovery.InStep`.
    """

    # Start of backward

    def begin(self, forward: Forward | None = None) -> None:
        """A backward runs: if it is a new one, find out what it will reach. Called from hooks."""
        if self._phase is not Phase.IDLE and self._end_is_queued() is not None:
            if forward is not None and self._phase is not Phase.LOCAL:
                forward.reached = True
            return
        if self._phase is Phase.DETACHED:
            refuse_inherited(self._group)
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
        reduced, weight = self._is_reduced(forward), self._weight()
        if reduced:
            if self._skip_unused:
                self._left_out = self._unused_buckets(reached, missing)
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
                self._forwards.backward_begins(reduced)
            raise
        with Uninterrupted():
            self._open(forward, reached, missing, reduced)

    def _is_reduced(self, forward: Forward | None) -> bool:
        """Whether this backward is reduced, or only accumulates; see :class:`Forwards`."""
        if self._attendance.is_open:  # the ranks without inputs have heard what the forward said
            return (forward is None or forward.syncs) and self._should_sync()
        if self._forwards.forces(forward):
            return True
        return not self._forwards.keep_local(forward) and self._should_sync()

    def _open(
        self, forward: Forward | None, reached: Sequence[bool], missing: set[int], reduced: bool
    ) -> None:
        """This backward has begun."""
        self._reduces = reduced
        self._queue_end()
        self._graph_task = current_graph_task_id()
        self._creates_graph = torch.is_grad_enabled()
        self._forwards.backward_begins(reduced)
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

    def _unused_buckets(self, reached: Sequence[bool], missing: set[int]) -> list[int]:
        # Provisionally, the buckets themselves are; and a rank without inputs expects them all.
        if self.arrangement.is_provisional or self._attendance.is_open:
            return []
        used = list(map(or_, reached, self._used_earlier))
        return unused_buckets(self.placement, used, self._unannounced.may_come(missing))

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
        with Uninterrupted():
            if bucket.index not in self._left_out:
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
        with Uninterrupted(), self._finite.telling(self._where):
            self._conclude()

    def _conclude(self) -> None:
        try:
            with self._naming_disagreements():
                self._finish()
                if self._finite.mode is not None:
                    # Marks of ranks that do not reduce the same mean nothing, and the host waits
                    # for the device anyway.
                    self._reduction.settle()
                    self._finite.look_at(self.buckets, self._left_out)
                self._roster.agreed()
                # Nothing of the frames above may still hold a bucket: some are let go here.
                self._rearrange()
        except RuntimeError as error:
            self._note(error)
            # After a local error the other ranks go on: _recover does with what is in flight.
            if not (isinstance(error, LocalError) and self._in_flight):
                self._reset()
            raise
        # (After anything else, a KeyboardInterrupt say, buckets may be on their way: see _recover.)
        self._reset()

    def _finish(self) -> None:
        """Wait for the buckets in launch order, emptying one while the next is on its way."""
        if not self._in_flight:
            return  # a hook has done so already, see finalize_backward()
        self.num_buckets_reduced = len(self._in_flight)
        while self._in_flight:
            self._reduction.finish(*self._in_flight[0])
            del self._in_flight[0]

    # End of backward, when the caller says so

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
            self._phase = Phase.REDUCING  # if it fails, the next forward makes up for it
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
                with Uninterrupted(), self._naming_disagreements():
                    self._finish()  # the rest comes at the end: hooks may change then
                return
        raise RuntimeError(
            f"{self._where()}: finalize_backward() called but no gradient reduction requires "
            "finalization. This can happen if no_sync() is active or finalize_backward() was "
            "already called for this backward pass."
        )
