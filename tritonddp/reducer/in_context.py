"""Gradients that ``torch.distributed.autograd`` keeps in its context, averaged there.

One gradient, from ``torch.distributed.autograd.backward()`` to ``get_gradients()``::

    forward           watch     a hook on each output, which knows the context
    backward starts   _begin    buckets for this backward, hooks on the parameters' nodes
    gradient ready    _arrived  one counter goes down
    bucket full       _send     read its gradients from the context; one all-reduce
    backward ends     _end      send what is left, wait, write the means into the context

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
from typing import TYPE_CHECKING, Any

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
from tritonddp.buckets.bucket_set import BucketSet
from tritonddp.comm.run import ReductionRun
from tritonddp.coordination.agreement import (
    GradSource,
    Mismatch,
)
from tritonddp.coordination.interrupts import Uninterrupted
from tritonddp.reducer import recovery
from tritonddp.reducer.output_hooks import Forward, tensors_in

if TYPE_CHECKING:
    from tritonddp.reducer.reducer import Reducer

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
        build: makes buckets of what stands in for the parameters. Its ``.grad`` are the tensors of
            the context.
        sparse: those of the parameters whose gradients are sparse.
    """

    def __init__(
        self,
        context: int,
        named_params: Sequence[tuple[str, Parameter]],
        build: Callable[[list[tuple[str, Any]], set[Any]], BucketSet],
        sparse: Collection[Tensor],
    ) -> None:
        self._context = context
        named = [(name, param.detach()) for name, param in named_params]
        origin = {
            stand_in: param for (_, stand_in), (_, param) in zip(named, named_params, strict=True)
        }
        stand_ins_of_sparse = {stand_in for stand_in, param in origin.items() if param in sparse}
        self.bucket_set = build(named, stand_ins_of_sparse)
        self.params = [origin[stand_in] for stand_in in self.bucket_set.params]

    def numbers(self, bucket: Bucket) -> range:
        """Of the parameters in ``bucket``."""
        return range(bucket.first, bucket.first + len(bucket.params))

    def read(self, numbers: range) -> list[bool]:
        """Take the gradients of these parameters; which of them the context has."""
        found = gradients_in_context(self._context)
        for number in numbers:
            self.bucket_set.params[number].grad = found.get(self.params[number])
        return [self.params[number] in found for number in numbers]

    def write(self) -> None:
        """Put into the context what has not been written to its tensors: what it did not have."""
        found = gradients_in_context(self._context)
        for stand_in, param in zip(self.bucket_set.params, self.params, strict=True):
            if stand_in.grad is not None and stand_in.grad is not found.get(param):
                put_into_context(self._context, param, stand_in.grad)


class ContextBackward:
    """The part of this rank in one backward of ``torch.distributed.autograd``.

    ``.grad`` and what is accumulated there under ``no_sync`` are not touched. Gradients travel as
    those of ``reduce_gradients()`` do: cast to ``reduce_dtype``, but not quantised.

    Attributes:
        context: id of its context.
        stand_ins: of the parameters that are in buckets.
        run: reduces them.
        came: for each parameter, whether a gradient has.
        is_announced: the others know that this rank takes part.
        hooks: handles.
    """

    def __init__(self, context: int, stand_ins: StandIns, run: ReductionRun) -> None:
        self.context = context
        self.stand_ins = stand_ins
        self.run = run
        self.bucket_of = [bucket.index for bucket in run.buckets for _ in stand_ins.numbers(bucket)]
        run.unfilled = [len(stand_ins.numbers(bucket)) for bucket in run.buckets]
        run.graph_task = current_graph_task_id()
        self.came = [False] * len(stand_ins.params)
        self.is_announced = False
        self.hooks: list[Any] = []

    @property
    def runs(self) -> bool:
        """Whether it has neither come to its end nor broken off."""
        return self.run.end() is not None


def watch(reducer: Reducer, output: Any, context: int, syncs: bool) -> None:
    """A forward in the context of this id has returned ``output``; see :meth:`Reducer.watch`.

    Raises:
        RuntimeError: gradients in a context cannot be averaged as the user has asked for.
    """
    if not reducer.is_detached:
        _check(reducer)
    reference = weakref.ref(reducer)
    forward = reducer.forwards.ended(reducer.counters.reductions, syncs)

    def backward(_: Tensor) -> None:
        told = reference()
        if told is None:
            return
        if distributed_engine_runs():
            with _telling_at_end():
                _begin(told, context, forward)
        else:  # loss.backward() inside the context: its gradients go to .grad
            told.on_backward(forward)

    for tensor in (*tensors_in(output), *tensors_in(values_of_rrefs(output))):
        if tensor.grad_fn is not None:
            tensor.register_hook(backward)


def _check(reducer: Reducer) -> None:
    inside = f"{reducer.where()}: inside torch.distributed.autograd.context()"
    if reducer.sync.weight is not None:
        raise RuntimeError(f"{inside} a mean cannot be weighted by weighted(n): {_BY_HAND}")
    if reducer.sync.join is not None and reducer.sync.join.is_open:
        raise RuntimeError(
            f"{inside} no forward can be joined: ranks that have no inputs left cannot follow "
            "its backward, leave join() out"
        )
    if reducer.comm_hook is not None:
        raise RuntimeError(f"{inside} no communication hook is called: {_BY_HAND}")
    if reducer.steps_optimizers:
        raise RuntimeError(
            f"{inside} no optimizer steps in the backward, as torch's own "
            "_apply_optimizer_in_backward waits for .grad: use a DistributedOptimizer"
        )
    if reducer.finalizes_manually:
        raise RuntimeError(
            f"{inside} finalize_backward() has nothing to wait for: set "
            "require_manual_backward_finalization to False"
        )


def _stand_ins(
    reducer: Reducer, context: int, named_params: Sequence[tuple[str, Parameter]]
) -> StandIns:
    def build(named: list[tuple[str, Any]], sparse: set[Any]) -> BucketSet:
        return reducer.manager.temporary(named, sparse=sparse)

    return StandIns(context, named_params, build, reducer.parameters.sparse)


def _run(
    reducer: Reducer, stand_ins: StandIns, source: GradSource = GradSource.CONTEXT
) -> ReductionRun:
    run = ReductionRun(
        *(stand_ins.bucket_set, reducer.plain, reducer.agreement, reducer.events),
        *([False] * len(stand_ins.params), source),
    )
    run.where, run.of_backwards = f"{reducer.where()}, torch.distributed.autograd", False
    return run


# Start of backward


def _begin(reducer: Reducer, context: int, forward: Forward) -> None:
    """A distributed backward goes through an output of a forward that ran in ``context``."""
    if reducer.is_detached:
        reducer.group.refuse_if_forked()
        return
    with reducer.launching, torch.no_grad():
        former, graph_task = reducer.in_context, current_graph_task_id()
        begun = None if former is None else former.run.graph_task
        if graph_task in (reducer.seen_in_context, begun):
            return  # through another output, which has decided; perhaps its begin has failed
        reducer.seen_in_context = graph_task
        if not reducer.is_reduced(forward):
            return  # no_sync: the context keeps this rank's gradients
        if former is not None and former.runs:
            raise RuntimeError(
                f"{reducer.where()}: a backward in another torch.distributed.autograd context "
                "still runs, and the order of the two may differ between ranks: make one "
                "after the other"
            )
        reducer.recover()
        reducer.check_pending()
        reducer.parameters.register()
        current = reducer.manager.current
        stand_ins = _stand_ins(
            reducer, context, list(zip(current.names, current.params, strict=True))
        )
        backward = ContextBackward(context, stand_ins, _run(reducer, stand_ins))
        reducer.in_context = backward
        reducer.mark_open()
        _check(reducer)  # if that fails, the others will not wait in vain: see recover
        reducer.announce(backward.run)
        backward.is_announced = True
        nodes = dict(zip(current.params, reducer.tracker.nodes, strict=True))
        backward.hooks = [
            nodes[param].register_hook(_arrival_hook(weakref.ref(reducer), number))
            for number, param in enumerate(stand_ins.params)
        ]
        _queue_end(reducer, backward)


def _queue_end(reducer: Reducer, backward: ContextBackward) -> None:
    """Have :func:`_end` called when the backward is over; see ``Reducer._queue_end``."""

    def end() -> None:
        if not backward.runs:
            return
        try:
            _end(reducer, backward)
        finally:  # not before: other threads may run forwards meanwhile
            backward.run.end = _over

    backward.run.end = weakref.ref(end)
    queue_end_of_backward(end)


def _over() -> None:
    """In the place of a reference to the end of a backward that is over."""


# A gradient, a bucket is ready


def _arrived(reducer: Reducer, number: int, is_defined: bool) -> None:
    """The context has the gradient of a parameter."""
    backward: ContextBackward | None = reducer.in_context
    if backward is None or not backward.runs or backward.run.graph_task != current_graph_task_id():
        return  # the hook is left from a backward that broke off
    run = backward.run
    # Sends of a context may run on several threads.
    with _telling_at_end(), reducer.launching, torch.no_grad():
        backward.came[number] = is_defined
        run.unfilled[backward.bucket_of[number]] -= 1
        try:
            while len(run.works) < len(run.buckets) and run.unfilled[len(run.works)] == 0:
                _send(reducer, backward, run.buckets[len(run.works)])
        except Exception:
            run.end = _over  # it has broken off
            raise


def _send(reducer: Reducer, backward: ContextBackward, bucket: Bucket) -> None:
    """Send a bucket, with zeros for the gradients that the context does not have."""
    stand_ins, run = backward.stand_ins, backward.run
    numbers = stand_ins.numbers(bucket)
    used = stand_ins.read(numbers)
    for number, is_there in zip(numbers, used, strict=True):
        if backward.came[number] and not is_there:
            raise RuntimeError(
                f"{reducer.where()}: this backward was called with another "
                "torch.distributed.autograd context than the one that its forward ran in: "
                f"the latter has no gradient of {stand_ins.bucket_set.names[number]!r}"
            )
    run.used[numbers.start : numbers.stop] = used
    run.launch_now(bucket)


# End of backward


@torch.no_grad()
def _end(reducer: Reducer, backward: ContextBackward) -> None:
    """The backward is over on this rank: bring the means into the context."""
    run = backward.run
    with reducer.launching:
        while len(run.works) < len(run.buckets):
            _send(reducer, backward, run.buckets[len(run.works)])
    try:
        with Uninterrupted():
            run.finish()
            reducer.agreement.check_pending()
            for call in reducer.events.on_reduced_all:
                call(run)
            backward.stand_ins.write()
            # Now the ranks know that they have added the same.
            if reducer.parameters.added:
                _reduce_added(reducer, backward.context)
    except Mismatch as error:
        recovery.raise_mismatch(reducer, error, run)
    finally:
        _leave(reducer, backward)
    for call in reducer.events.on_end:
        call(run)


def _reduce_added(reducer: Reducer, context: int) -> None:
    """Parameters that are in no bucket of ``.grad`` yet have no hooks: reduce them now."""
    stand_ins = _stand_ins(reducer, context, reducer.parameters.added)
    run = _run(reducer, stand_ins)
    run.used = stand_ins.read(range(len(stand_ins.params)))
    reducer.announce(run)
    run.reduce_now()
    stand_ins.write()


def _leave(reducer: Reducer, backward: ContextBackward) -> None:
    reducer.in_context = None
    reducer.mark_closed()
    for hook in backward.hooks:
        hook.remove()


# After a backward that broke off


def recover(reducer: Reducer) -> None:
    """If a backward broke off: take part in what the other ranks reduce, see recovery.py."""
    backward: ContextBackward | None = reducer.in_context
    if backward is None or backward.runs:
        return
    _leave(reducer, backward)
    run = backward.run
    logger.warning(
        "%s: the last backward did not come to its end. On the other ranks gradients are NaN "
        "in this step in %d of %d buckets, which had not been sent",
        run.where,
        len(run.buckets) - len(run.works),
        len(run.buckets),
    )
    try:
        with Uninterrupted(), torch.no_grad():
            if not backward.is_announced:
                run.source = GradSource.BROKEN
                reducer.announce(run)
            run.take_part()
            if reducer.parameters.added:
                stand_ins = _stand_ins(reducer, backward.context, reducer.parameters.added)
                added = _run(reducer, stand_ins, GradSource.BROKEN)
                reducer.announce(added)
                added.take_part()
    except Mismatch as error:
        recovery.raise_mismatch(reducer, error, run)


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


def _arrival_hook(reference: weakref.ref[Reducer], number: int) -> Callable[..., None]:
    """For an autograd node, which the reducer holds: so it refers to that weakly."""

    def arrived(_: Any, gradients: tuple[Tensor | None, ...]) -> None:
        reducer = reference()
        if reducer is not None:
            _arrived(reducer, number, gradients[0] is not None)

    return arrived
