"""Gradients that ``torch.distributed.autograd`` keeps in its context, averaged there.

One gradient, from ``torch.distributed.autograd.backward()`` to ``get_gradients()``::

    forward           watch     a hook on each output, which knows the context
    backward starts   _begin    buckets for this backward, hooks on the parameters' nodes
    gradient ready    _arrived  one counter goes down
    bucket full       _send     read its gradients from the context; one all-reduce
    backward ends     _end      send what is left, wait, write the means into the context

The distributed engine does not accumulate into ``.grad``, cannot tell which nodes it will reach,
and does not call the hooks that other backwards use. It gives each gradient to the context and then
runs the hooks of the AccumulateGrad node. So every parameter is waited for: a bucket with an unused
parameter, and all buckets behind it, are sent at the end.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
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
from tritonddp.comm.run import ReductionRun
from tritonddp.coordination.agreement import GradSource, Mismatch
from tritonddp.coordination.interrupts import Uninterrupted
from tritonddp.reducer import recovery
from tritonddp.reducer.output_hooks import Forward, tell, tensors_in

if TYPE_CHECKING:
    from tritonddp.reducer.reducer import Reducer

logger = logging.getLogger("tritonddp.in_context")

_BY_HAND = (
    "call .module instead, and average what torch.distributed.autograd.get_gradients() returns "
    "with reduce_gradients()"
)


class ContextReduction:
    """One reduction of the gradients in a context, on this rank; ``.grad`` takes no part.

    Its buckets are made for stand-ins: detached parameters whose ``.grad`` are the tensors of the
    context. The ``.grad`` of the parameters, accumulated under ``no_sync`` perhaps, stays as it is.
    As in ``reduce_gradients()`` gradients are cast to ``reduce_dtype``, but not quantised.
    """

    def __init__(
        self,
        reducer: Reducer,
        context: int,
        named_params: Iterable[tuple[str, Parameter]],
        source: GradSource = GradSource.CONTEXT,
    ) -> None:
        origin = {param.detach(): (name, param) for name, param in named_params}
        named: list[tuple[str, Any]] = [(name, each) for each, (name, _) in origin.items()]
        sparse = {each for each, (_, param) in origin.items() if param in reducer.parameters.sparse}
        bucket_set = reducer.manager.temporary(named, sparse=sparse)
        self.context = context  # its id
        # Those that the numbers of the buckets' parameters stand for.
        self.params = [origin[each][1] for each in bucket_set.params]
        self.run = run = ReductionRun(
            *(bucket_set, reducer.plain, reducer.agreement, reducer.events),
            *([False] * len(named), source),
        )
        run.where, run.of_backwards = f"{reducer.where()}, torch.distributed.autograd", False
        run.unfilled = [len(bucket.params) for bucket in run.buckets]
        self.bucket_of = [bucket.index for bucket in run.buckets for _ in bucket.params]
        self.came = [False] * len(named)  # for each parameter, whether its gradient has come
        self.hooks: list[Any] = []  # handles

    @property
    def runs(self) -> bool:
        """Whether its backward has neither ended nor failed."""
        return self.run.end() is not None

    def read(self, numbers: range) -> None:
        """Take the gradients of these parameters. A parameter is used if the context has one."""
        found = gradients_in_context(self.context)
        for number in numbers:
            self.run.bucket_set.params[number].grad = found.get(self.params[number])
            self.run.used[number] = self.params[number] in found

    def write(self) -> None:
        """Add means to the context for the gradients that it did not have on this rank."""
        found = gradients_in_context(self.context)
        for stand_in, param in zip(self.run.bucket_set.params, self.params, strict=True):
            if stand_in.grad is not None and stand_in.grad is not found.get(param):
                put_into_context(self.context, param, stand_in.grad)


def watch(reducer: Reducer, output: Any, context: int, syncs: bool) -> None:
    """A forward in the context of this id has returned ``output``; see output_hooks.

    Raises:
        RuntimeError: gradients in a context cannot be averaged as the user has asked for.
    """
    if not reducer.is_detached:
        _check(reducer)
    reference = weakref.ref(reducer)
    forward = reducer.forwards.ended(reducer.counters.reductions, syncs)

    def backward(gradient: Tensor) -> None:
        told = reference()
        if told is not None and distributed_engine_runs():
            with _telling_at_end():
                _begin(told, context, forward)
        else:  # loss.backward() inside the context: its gradients go to .grad
            tell(reference, forward, gradient)

    for tensor in (*tensors_in(output), *tensors_in(values_of_rrefs(output))):
        if tensor.grad_fn is not None:
            tensor.register_hook(backward)


def _check(reducer: Reducer) -> None:
    inside = f"{reducer.where()}: inside torch.distributed.autograd.context()"
    if reducer.sync.weight is not None:
        raise RuntimeError(f"{inside} a mean cannot be weighted by weighted(n): {_BY_HAND}")
    if reducer.sync.join is not None and reducer.sync.join.is_open:
        raise RuntimeError(
            f"{inside} join() cannot be used, since ranks that have no inputs left cannot take "
            "part in such a backward: leave join() out"
        )
    if reducer.comm_hook is not None:
        raise RuntimeError(f"{inside} no communication hook is called: {_BY_HAND}")
    if reducer.steps_optimizers:
        raise RuntimeError(
            f"{inside} no optimizer can step in the backward, since torch's "
            "_apply_optimizer_in_backward waits for .grad: use a DistributedOptimizer"
        )
    if reducer.finalizes_manually:
        raise RuntimeError(
            f"{inside} finalize_backward() has nothing to wait for: set "
            "require_manual_backward_finalization to False"
        )


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
            return  # already decided, at another output; its _begin may have failed
        reducer.seen_in_context = graph_task
        if not reducer.forwards.decide(forward, reducer.sync, reducer.where):
            return  # no_sync: the context keeps this rank's gradients
        if former is not None and former.runs:
            raise RuntimeError(
                f"{reducer.where()}: a backward in another torch.distributed.autograd context "
                "still runs, and the order of the two may differ between ranks: run one "
                "after the other"
            )
        recovery.recover(reducer.group)
        reducer.check_pending()
        reducer.parameters.register()
        current = reducer.manager.current
        named_params = zip(current.names, current.params, strict=True)
        backward = ContextReduction(reducer, context, named_params)
        backward.run.graph_task = graph_task
        reducer.in_context = backward
        reducer.mark_open()
        _check(reducer)  # if it raises, recover() makes the collectives of this rank
        reducer.announce(backward.run)
        nodes = dict(zip(current.params, reducer.tracker.nodes, strict=True))
        reference = weakref.ref(reducer)  # which holds the nodes
        backward.hooks = [
            nodes[param].register_hook(partial(_arrived, reference, number))
            for number, param in enumerate(backward.params)
        ]
        # See Reducer._queue_end.
        end = partial(_end, reducer, backward)
        backward.run.end = weakref.ref(end)
        queue_end_of_backward(end)


def _over() -> None:
    """Stands in for the reference to the callback of a backward that is over."""


# A gradient, a bucket is ready


def _arrived(
    reference: weakref.ref[Reducer], number: int, _: Any, gradients: tuple[Tensor | None, ...]
) -> None:
    """The context has the gradient of a parameter: called by its autograd node."""
    reducer = reference()
    backward: ContextReduction | None = None if reducer is None else reducer.in_context
    if reducer is None or backward is None or not backward.runs:
        return
    run = backward.run
    if run.graph_task != current_graph_task_id():
        return  # this hook belongs to an earlier backward, which failed
    # Sends of a context may run on several threads.
    with _telling_at_end(), reducer.launching, torch.no_grad():
        backward.came[number] = gradients[0] is not None
        run.unfilled[backward.bucket_of[number]] -= 1
        try:
            _send(reducer, backward)
        except Exception:
            run.end = _over  # the backward has failed
            raise


def _send(reducer: Reducer, backward: ContextReduction, rest: bool = False) -> None:
    """Send the buckets that have all their gradients, in bucket order.

    With ``rest`` send all, with zeros for gradients that the context does not have.
    """
    run = backward.run
    for bucket in run.buckets[len(run.works) :]:
        if run.unfilled[bucket.index] and not rest:
            return
        numbers = range(bucket.first, bucket.first + len(bucket.params))
        backward.read(numbers)
        for number in numbers:
            if backward.came[number] and not run.used[number]:
                raise RuntimeError(
                    f"{reducer.where()}: this backward was called with another "
                    "torch.distributed.autograd context than its forward: the context of the "
                    f"forward has no gradient of {run.bucket_set.names[number]!r}"
                )
        run.launch_now(bucket)


# End of backward


@torch.no_grad()
def _end(reducer: Reducer, backward: ContextReduction) -> None:
    """The backward is over on this rank: write the means into the context."""
    run = backward.run
    if not backward.runs:
        return
    try:
        with reducer.launching:
            _send(reducer, backward, rest=True)
        try:
            with Uninterrupted():
                run.finish()
                reducer.agreement.check_pending()
                for call in reducer.events.on_reduced_all:
                    call(run)
                backward.write()
                _take_up_added(reducer, backward)
        except Mismatch as error:
            recovery.raise_mismatch(reducer, error, run)
        finally:
            _leave(reducer, backward)
        for call in reducer.events.on_end:
            call(run)
    finally:  # not before: other threads may run forwards meanwhile
        run.end = _over


def _take_up_added(
    reducer: Reducer, backward: ContextReduction, source: GradSource = GradSource.CONTEXT
) -> None:
    """Reduce gradients of added parameters, which have no bucket and no hooks yet.

    (The headers have shown that all ranks have added the same parameters.)
    """
    if reducer.parameters.added:
        added = ContextReduction(reducer, backward.context, reducer.parameters.added, source)
        reducer.announce(added.run)
        if source is GradSource.BROKEN:
            added.run.take_part()
        else:
            added.read(range(len(added.params)))
            added.run.reduce_now()
            added.write()


def _leave(reducer: Reducer, backward: ContextReduction) -> None:
    reducer.in_context = None
    reducer.mark_closed()
    for hook in backward.hooks:
        hook.remove()


# After a backward that broke off


def recover(reducer: Reducer) -> None:
    """If a backward failed: take part in the collectives of the other ranks, see recovery.py."""
    backward: ContextReduction | None = reducer.in_context
    if backward is None or backward.runs:
        return
    _leave(reducer, backward)
    run = backward.run
    logger.warning(
        "%s: the last backward did not come to its end. On the other ranks gradients are NaN "
        "in this step in %d of %d buckets, which this rank had not sent",
        run.where,
        len(run.buckets) - len(run.works),
        len(run.buckets),
    )
    try:
        with Uninterrupted(), torch.no_grad():
            if not run.header:  # the header was not prepared yet
                run.source = GradSource.BROKEN
                reducer.announce(run)
            run.take_part()
            _take_up_added(reducer, backward, GradSource.BROKEN)
    except Mismatch as error:
        recovery.raise_mismatch(reducer, error, run)


@contextmanager
def _telling_at_end() -> Iterator[None]:
    """Context inside a hook: an error is raised at the end of the backward.

    If a hook raises, the distributed engine only reports "python_error".
    """
    try:
        yield
    except Exception as error:
        queue_end_of_backward(partial(_raise, error))


def _raise(error: Exception) -> None:
    raise error
