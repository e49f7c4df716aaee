"""Gradients that ``torch.distributed.autograd`` keeps in its context, averaged there.

One gradient, from ``torch.distributed.autograd.backward()`` to ``get_gradients()``::

    forward           watch_in_context  a hook on each output, which knows the context
    backward starts   _begin            buckets for this backward, hooks on the parameters' nodes
    gradient ready    _arrived          one counter goes down
    bucket full       _send             read its gradients from the context; one all-reduce
    backward ends     _end              send what is left, wait, write the means into the context

The distributed engine calls none of the hooks that backwards into ``.grad`` rest on: it does not
accumulate into ``.grad``, and does not know which nodes it will reach. It gives each gradient to
the context and then runs the hooks of the AccumulateGrad node. So every parameter is waited for; a
bucket with one that is unused, and those behind it, are sent at the end.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp._torch import (
    current_graph_task_id,
    distributed_engine_runs,
    gradients_in_context,
    put_into_context,
    queue_end_of_backward,
    values_of_rrefs,
)
from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.placement import Placement
from tritonddp.comm.reduction import Reduction
from tritonddp.comm.run import fill_and_start, reduce_at_once, take_part
from tritonddp.coordination.agreement import Source
from tritonddp.coordination.collectives import Work
from tritonddp.coordination.forks import refuse_inherited
from tritonddp.coordination.interrupts import Uninterrupted
from tritonddp.reducer.on_demand import OnRequest
from tritonddp.reducer.output_hooks import Forward, tensors_in
from tritonddp.reducer.state import Phase

logger = logging.getLogger("tritonddp.in_context")

_BY_HAND = (
    "call .module instead, and average what torch.distributed.autograd.get_gradients() returns "
    "with reduce_gradients()"
)


class StandIns:
    """Buckets whose gradients are those of a context, not ``.grad``.

    Args:
        context: id of the context.
        named_params: whose gradients.
        place: makes buckets of what stands in for the parameters. Its ``.grad`` are the tensors of
            the context.
        sparse: those of the parameters whose gradients are sparse.
    """

    def __init__(
        self,
        context: int,
        named_params: Sequence[tuple[str, Parameter]],
        place: Callable[[list[tuple[str, Any]], set[Any]], Placement],
        sparse: Collection[Tensor],
    ) -> None:
        self._context = context
        named = [(name, param.detach()) for name, param in named_params]
        origin = {
            stand_in: param for (_, stand_in), (_, param) in zip(named, named_params, strict=True)
        }
        stand_ins_of_sparse = {stand_in for stand_in, param in origin.items() if param in sparse}
        self.placement = place(named, stand_ins_of_sparse)
        self.params = [origin[stand_in] for stand_in in self.placement.params]

    def numbers(self, bucket: Bucket) -> range:
        """Of the parameters in ``bucket``."""
        places = [
            self.placement.places[number] for number in self.placement.places_of[bucket.index]
        ]
        return range(places[0].first, places[-1].last)

    def read(self, numbers: range) -> list[bool]:
        """Take the gradients of these parameters; which of them the context has."""
        found = gradients_in_context(self._context)
        for number in numbers:
            self.placement.params[number].grad = found.get(self.params[number])
        return [self.params[number] in found for number in numbers]

    def write(self) -> None:
        """Put into the context what has not been written to its tensors: what it did not have."""
        found = gradients_in_context(self._context)
        for stand_in, param in zip(self.placement.params, self.params, strict=True):
            if stand_in.grad is not None and stand_in.grad is not found.get(param):
                put_into_context(self._context, param, stand_in.grad)


class ContextBackward:
    """The part of this rank in one backward of ``torch.distributed.autograd``.

    Attributes:
        context: id of its context.
        stand_ins: of the parameters that are in buckets.
        waiting: for each bucket, how many gradients have not come.
        came: for each parameter, whether a gradient has.
        in_flight: the buckets that are on their way.
        next: the first that is not.
        is_announced: the reduction has begun with what this rank says to the others.
        graph_task: its id in the engine.
        is_queued: returns ``None`` once it is over, or has broken off.
        hooks: handles.
    """

    def __init__(self, context: int, stand_ins: StandIns) -> None:
        self.context = context
        self.stand_ins = stand_ins
        placement = stand_ins.placement
        self.bucket_of = [
            bucket.index for bucket in placement.buckets for _ in stand_ins.numbers(bucket)
        ]
        self.waiting = [len(stand_ins.numbers(bucket)) for bucket in placement.buckets]
        self.came = [False] * len(stand_ins.params)
        self.in_flight: list[tuple[Bucket, Work]] = []
        self.next = 0
        self.is_announced = False
        self.graph_task = current_graph_task_id()
        self.is_queued: Callable[[], object] = lambda: None
        self.hooks: list[Any] = []


class InContext(OnRequest):
    """What a :class:`~tritonddp.reducer.reducer.Reducer` does for ``torch.distributed.autograd``.

    ``.grad`` and what is accumulated there under ``no_sync`` are not touched. Gradients travel as
    those of ``reduce_gradients()`` do: cast to ``reduce_dtype``, but not quantised.
    """

    def watch_in_context(self, output: Any, context: int, syncs: bool) -> None:
        """A forward in the context of this id has returned ``output``; see :meth:`watch`.

        Raises:
            RuntimeError: gradients in a context cannot be averaged as the user has asked for.
        """
        if self._phase is not Phase.DETACHED:
            self._check_context()
        reference = weakref.ref(self)
        forward = self._forwards.ended(self.counters.reductions, syncs)

        def backward(_: Tensor) -> None:
            reducer = reference()
            if reducer is None:
                return
            if distributed_engine_runs():
                with _telling_at_end():
                    reducer._begin_in_context(context, forward)
            else:  # loss.backward() inside the context: its gradients go to .grad
                reducer.begin(forward)

        for tensor in (*tensors_in(output), *tensors_in(values_of_rrefs(output))):
            if tensor.grad_fn is not None:
                tensor.register_hook(backward)

    def _check_context(self) -> None:
        inside = f"{self._where()}: inside torch.distributed.autograd.context()"
        if self._weight() is not None:
            raise RuntimeError(f"{inside} a mean cannot be weighted by weighted(n): {_BY_HAND}")
        if self._attendance.is_open:
            raise RuntimeError(
                f"{inside} no forward can be joined: ranks that have no inputs left cannot follow "
                "its backward, leave join() out"
            )
        if self._run_hook is not None:
            raise RuntimeError(f"{inside} no communication hook is called: {_BY_HAND}")
        if self._steps:
            raise RuntimeError(
                f"{inside} no optimizer steps in the backward, as torch's own "
                "_apply_optimizer_in_backward waits for .grad: use a DistributedOptimizer"
            )
        if self._finalizes_on_request:
            raise RuntimeError(
                f"{inside} finalize_backward() has nothing to wait for: set "
                "require_manual_backward_finalization to False"
            )

    def _stand_ins(self, context: int, named_params: Sequence[tuple[str, Parameter]]) -> StandIns:
        buckets = self._wire.buckets(Bucket, Bucket)

        def place(named: list[tuple[str, Any]], sparse: set[Any]) -> Placement:
            return self.arrangement.place(named, buckets, sparse=sparse)

        return StandIns(context, named_params, place, self._roster.sparse)

    def _plain(self, source: Source) -> Reduction:
        """A reduction that begins, in buckets made for the occasion."""
        reduction = self._reduction.plain
        self._begin_reduction(source, None, self._roster.structure, reduction=reduction)
        return reduction

    # Start of backward

    def _begin_in_context(self, context: int, forward: Forward) -> None:
        """A distributed backward goes through an output of a forward that ran in ``context``."""
        if self._phase is Phase.DETACHED:
            refuse_inherited(self._group)
            return
        with self._launching, torch.no_grad():
            backward, graph_task = self._in_context, current_graph_task_id()
            begun = None if backward is None else backward.graph_task
            if graph_task in (self._seen_in_context, begun):
                return  # through another output, which has decided; perhaps its begin has failed
            self._seen_in_context = graph_task
            is_reduced = self._is_reduced(forward)
            self._forwards.backward_begins(is_reduced)
            if not is_reduced:
                return  # no_sync: the context keeps this rank's gradients
            if backward is not None and backward.is_queued() is not None:
                raise RuntimeError(
                    f"{self._where()}: a backward in another torch.distributed.autograd context "
                    "still runs, and the order of the two may differ between ranks: make one "
                    "after the other"
                )
            self._recover_all()
            self._settle()
            self._roster.enroll()
            named = list(zip(self.placement.names, self.placement.params, strict=True))
            backward = self._in_context = ContextBackward(context, self._stand_ins(context, named))
            self._check_context()  # if that fails, the others will not wait in vain: see _recover
            self._plain(Source.CONTEXT)
            backward.is_announced = True
            nodes = dict(
                zip(self.placement.params, self._readiness.participation.nodes, strict=True)
            )
            backward.hooks = [
                nodes[param].register_hook(_arrival_hook(weakref.ref(self), number))
                for number, param in enumerate(backward.stand_ins.params)
            ]
            self._queue_end_in_context(backward)

    def _queue_end_in_context(self, backward: ContextBackward) -> None:
        """Have :meth:`_end_in_context` called at the end; see ``Reducer._queue_end``."""

        def end() -> None:
            if backward.is_queued() is None:
                return
            try:
                self._end_in_context(backward)
            finally:  # not before: other threads may run forwards meanwhile
                backward.is_queued = lambda: None

        backward.is_queued = weakref.ref(end)
        queue_end_of_backward(end)

    # A gradient, a bucket is ready

    def _arrived_in_context(self, number: int, is_defined: bool) -> None:
        """The context has the gradient of a parameter."""
        backward = self._in_context
        if (
            backward is None
            or backward.is_queued() is None
            or backward.graph_task != current_graph_task_id()
        ):
            return  # the hook is left from a backward that broke off
        # Sends of a context may run on several threads.
        with _telling_at_end(), self._launching, torch.no_grad():
            backward.came[number] = is_defined
            backward.waiting[backward.bucket_of[number]] -= 1
            buckets = backward.stand_ins.placement.buckets
            try:
                while backward.next < len(buckets) and backward.waiting[backward.next] == 0:
                    self._send(backward, buckets[backward.next])
            except Exception:
                backward.is_queued = lambda: None  # it has broken off
                raise

    def _send(self, backward: ContextBackward, bucket: Bucket) -> None:
        """Send a bucket, with zeros for the gradients that the context does not have."""
        stand_ins = backward.stand_ins
        numbers = stand_ins.numbers(bucket)
        used = stand_ins.read(numbers)
        for number, is_there in zip(numbers, used, strict=True):
            if backward.came[number] and not is_there:
                raise RuntimeError(
                    f"{self._where()}: this backward was called with another "
                    "torch.distributed.autograd context than the one that its forward ran in: "
                    f"the latter has no gradient of {stand_ins.placement.names[number]!r}"
                )
        with Uninterrupted():
            work = fill_and_start(stand_ins.placement, self._reduction.plain, bucket, used)
            backward.in_flight.append((bucket, work))
            backward.next += 1

    # End of backward

    @torch.no_grad()
    def _end_in_context(self, backward: ContextBackward) -> None:
        """The backward is over on this rank: bring the means into the context."""
        placement, reduction = backward.stand_ins.placement, self._reduction.plain
        with self._launching:
            while backward.next < len(placement.buckets):
                self._send(backward, placement.buckets[backward.next])
        try:
            with self._finite.telling(self._where_in_context), self._naming_disagreements():
                while backward.in_flight:
                    reduction.finish(*backward.in_flight[0])
                    del backward.in_flight[0]
                reduction.settle()
                self._finite.look_at(placement.buckets)
                backward.stand_ins.write()
                # Now the ranks know that they have added the same.
                if self._roster.added:
                    self._reduce_added_in_context(backward.context)
            if self._strict:
                self._note_unused_in_context(backward.context)
        finally:
            self._leave_context(backward)

    def _reduce_added_in_context(self, context: int) -> None:
        """Parameters that are in no bucket of ``.grad`` yet have no hooks: reduce them now."""
        stand_ins = self._stand_ins(context, self._roster.added)
        used = stand_ins.read(range(len(stand_ins.params)))
        reduction = self._plain(Source.CONTEXT)
        reduce_at_once(stand_ins.placement, reduction, used)
        reduction.settle()
        self._finite.look_at(stand_ins.placement.buckets)
        stand_ins.write()

    def _note_unused_in_context(self, context: int) -> None:
        found = gradients_in_context(context)
        self._raise_of_unused(
            [name for name, param in self._roster.trainable if param not in found]
        )

    def _where_in_context(self) -> str:
        return f"{self._where()}, torch.distributed.autograd"

    def _leave_context(self, backward: ContextBackward) -> None:
        self._in_context = None
        for hook in backward.hooks:
            hook.remove()

    # After a backward that broke off

    def _recover_in_context(self) -> None:
        """If a backward broke off: take part in what the other ranks reduce, see ``_recover``."""
        backward = self._in_context
        if backward is None or backward.is_queued() is not None:
            return
        self._leave_context(backward)
        buckets = backward.stand_ins.placement.buckets
        logger.warning(
            "%s: the last backward did not come to its end. On the other ranks gradients are NaN "
            "in this step in %d of %d buckets, which had not been sent",
            self._where_in_context(),
            len(buckets) - backward.next,
            len(buckets),
        )
        with Uninterrupted(), torch.no_grad(), self._naming_disagreements():
            if not backward.is_announced:
                self._plain(Source.BROKEN)
            reduction = self._reduction.plain
            for bucket in buckets[backward.next :]:
                backward.in_flight.append((bucket, reduction.start_poisoned(bucket)))
            for bucket, work in backward.in_flight:
                reduction.discard(bucket, work)
            if self._roster.added:
                stand_ins = self._stand_ins(backward.context, self._roster.added)
                take_part(stand_ins.placement, self._plain(Source.BROKEN))


@contextmanager
def _telling_at_end() -> Iterator[None]:
    """Context, inside a hook: an error is raised at the end of the backward.

    Of what a hook raises the distributed engine says "python_error", and no more.
    """
    try:
        yield
    except Exception as error:
        queue_end_of_backward(_raising(error))


def _raising(error: Exception) -> Callable[[], None]:
    # Here, not where it was caught: its traceback would hold the frame, and that the function.
    def tell() -> None:
        raise error

    return tell


def _arrival_hook(reference: weakref.ref[InContext], number: int) -> Callable[..., None]:
    """For an autograd node, which the reducer holds: so it refers to that weakly."""

    def arrived(_: Any, gradients: tuple[Tensor | None, ...]) -> None:
        reducer = reference()
        if reducer is not None:
            reducer._arrived_in_context(number, gradients[0] is not None)

    return arrived
