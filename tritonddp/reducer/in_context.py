"""Gradients that ``torch.distributed.autograd`` keeps in its context, averaged there.

One gradient, from ``torch.distributed.autograd.backward()`` to ``get_gradients()``::

    forward           watch     a hook on each output, which knows the context
    backward starts   _begin    buckets for this backward, hooks on the parameters' nodes
    gradient ready    _arrived  its hook notes it
    backward ends     _end      read the context, reduce, write the means into the context

The distributed engine does not accumulate into ``.grad``, cannot tell which nodes it will reach,
and does not call the hooks that other backwards use. It gives each gradient to the context and then
runs the hooks of the AccumulateGrad node. So all buckets are sent at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp._torch import (
    current_graph_task_id,
    gradients_in_context,
    put_into_context,
    queue_end_of_backward,
    values_of_rrefs,
)
from tritonddp.comm.reduction import open_reduction
from tritonddp.coordination.agreement import GradSource, Mismatch
from tritonddp.reducer.autograd_driver import AutogradDriver
from tritonddp.reducer.graph.backward import (
    FAILED,
    Backward,
    Forward,
    call_back,
    one_of_each_node,
    tensors_in,
)
from tritonddp.reducer.graph.participation import accumulating_nodes, distributed_engine_runs
from tritonddp.reducer.reducer import Reducer, detached

_BY_HAND = (
    "call .module instead, and average what torch.distributed.autograd.get_gradients() returns "
    "with reduce_gradients()"
)


class ContextBackward:
    """One backward whose gradients are in a context, on this rank; ``.grad`` takes no part.

    Its buckets are made for stand-ins: detached parameters whose ``.grad`` are the tensors of the
    context. The ``.grad`` of the parameters, accumulated under ``no_sync`` perhaps, stays as it is.
    As in ``reduce_gradients()`` gradients are cast to ``reduce_dtype``, but not quantised.

    Attributes:
        context: id of the context.
        params: those that the numbers of the buckets' parameters stand for.
        reduction: of the gradients.
        backward: its phase.
        arrived: numbers of the parameters whose gradients have come.
        hooks: handles.
    """

    def __init__(
        self,
        reducer: Reducer,
        context: int,
        named_params: Iterable[tuple[str, Parameter]],
    ) -> None:
        origin = {detached(param): (name, param) for name, param in named_params}
        named: list[tuple[str, Any]] = [(name, each) for each, (name, _) in origin.items()]
        of_module = reducer.parameters.sparse
        sparse = {each for each, (_, param) in origin.items() if param in of_module}
        bucket_set = reducer.manager.temporary(named, sparse=sparse)
        where = f"{reducer.where()}, torch.distributed.autograd"
        self.context = context
        self.params = [origin[each][1] for each in bucket_set.params]
        used = [False] * len(named)
        self.reduction = open_reduction(
            reducer, bucket_set, GradSource.CONTEXT, used, where=where, from_grad=False
        )
        self.backward = Backward(where, self.reduction)
        self.arrived: set[int] = set()
        self.hooks: list[Any] = []

    def read(self) -> None:
        """Take the gradients of the context. A parameter is used if it has one there."""
        found, reduction = gradients_in_context(self.context), self.reduction
        used = [number for number, param in enumerate(self.params) if param in found]
        if missing := self.arrived.difference(used):
            raise RuntimeError(
                f"{reduction.where}: this backward was called with another context than its "
                "forward: the context of the forward has no gradient of "
                f"{reduction.bucket_set.names[min(missing)]!r}"
            )
        for number in used:
            reduction.bucket_set.params[number].grad = found[self.params[number]]
        reduction.bucket_set.use.note(used)

    def write(self) -> None:
        """Add means to the context for the gradients that it did not have on this rank."""
        found = gradients_in_context(self.context)
        for stand_in, param in zip(self.reduction.bucket_set.params, self.params, strict=True):
            if stand_in.grad is not None and stand_in.grad is not found.get(param):
                put_into_context(self.context, param, stand_in.grad)


class ContextReducer:
    """Reduces gradients in contexts, beside the driver of a wrapper, which does not know it."""

    def __init__(self, driver: AutogradDriver) -> None:
        self._driver, self._reducer = driver, driver.reducer
        # The backward that is reduced, or has failed; and the id of the last backward that went
        # through an output, reduced or not.
        self._current: ContextBackward | None = None
        self._seen = -1
        self._group = driver.group
        self._group.join_forks(self)
        self._reference = weakref.ref(self)

    @property
    def order(self) -> tuple[str, int, int]:
        """See :class:`Outstanding`: before the driver of the wrapper."""
        return self._group.name, self._reducer.parameters.number, 0

    def watch(self, output: Any, context: int, syncs: bool) -> None:
        """A forward in the context of this id has returned ``output``.

        Args:
            output: what the forward returned.
            context: id of the context.
            syncs: the forward ran outside ``no_sync``.

        Raises:
            RuntimeError: gradients in a context cannot be averaged as the user has asked for.
        """
        if not self._driver.is_detached:
            self._check()
        reference = self._reference
        driver: weakref.ref[Any] = self._driver.reference  # called back for loss.backward()
        forward = self._driver.forwards.ended(self._reducer.counters.reductions, syncs)

        def hook(gradient: Tensor) -> None:
            if distributed_engine_runs():
                contexts = reference()
                if contexts is not None:
                    with _raising_at_end():
                        contexts._begin(context, forward)
            else:  # its gradients go to .grad
                call_back(driver, forward, gradient)

        outputs = (*tensors_in(output), *tensors_in(values_of_rrefs(output)))
        for tensor in one_of_each_node(outputs):
            tensor.register_hook(hook)

    def _check(self) -> None:
        inside = f"{self._reducer.where()}: inside torch.distributed.autograd.context()"
        sync, driver = self._reducer.sync, self._driver
        if sync.weight is not None:
            raise RuntimeError(f"{inside} a mean cannot be weighted by weighted(n): {_BY_HAND}")
        if sync.join is not None and sync.join.is_open:
            raise RuntimeError(
                f"{inside} join() cannot be used, since ranks that have no inputs left cannot take "
                "part in such a backward: leave join() out"
            )
        if driver.comm_hook is not None:
            raise RuntimeError(f"{inside} no communication hook is called: {_BY_HAND}")
        if driver.steps_optimizers:
            raise RuntimeError(
                f"{inside} no optimizer can step in the backward, since torch's "
                "_apply_optimizer_in_backward waits for .grad: use a DistributedOptimizer"
            )
        if driver.finalizes_manually:
            raise RuntimeError(
                f"{inside} finalize_backward() has nothing to wait for: set "
                "require_manual_backward_finalization to False"
            )

    # Start of backward

    def _begin(self, context: int, forward: Forward) -> None:
        """A distributed backward goes through an output of a forward that ran in ``context``."""
        group, reducer = self._group, self._reducer
        if self._driver.is_detached:
            group.refuse_if_forked()
            return
        with self._driver.launching, torch.no_grad():
            former, graph_task = self._current, current_graph_task_id()
            begun = None if former is None else former.backward.graph_task
            if graph_task in (self._seen, begun):
                return  # already decided, at another output; this may have failed then
            self._seen = graph_task
            source = reducer.forwards.decide(
                forward, reducer.sync, reducer.counters.reductions, reducer.where
            )
            if source is None:
                return  # no_sync: the context keeps this rank's gradients
            if former is not None and former.backward.runs:
                raise RuntimeError(
                    f"{reducer.where()}: a backward in another torch.distributed.autograd "
                    "context still runs, and the order of the two may differ between ranks: run "
                    "one after the other"
                )
            group.recover()
            reducer.parameters.register()
            current = reducer.manager.current
            begins = ContextBackward(
                reducer, context, zip(current.names, current.params, strict=True)
            )
            self._current = begins
            try:
                group.outstanding[self] = None
                self._check()
                begins.hooks = [
                    node.register_hook(partial(_arrived, begins.arrived, number))
                    for number, node in enumerate(accumulating_nodes(begins.params))
                ]
                begins.backward.queue_end(
                    partial(self._end, begins), partial(_broke_off, weakref.ref(begins))
                )
            except BaseException:
                begins.backward.moves_to(FAILED)  # drain() makes the collectives of this rank
                raise

    # End of backward

    @torch.no_grad()
    def _end(self, current: ContextBackward) -> None:
        """The backward is over on this rank: write the means into the context."""
        reduction, events = current.reduction, self._reducer.events
        if not current.backward.runs:
            return
        try:
            current.read()
            try:
                with self._group.uninterrupted():
                    reduction.reduce_now()
                current.write()
            except Mismatch as error:
                self._reducer.raise_mismatch(error, reduction)
            finally:
                self._leave(current)
            for call in events.on_end:
                call(reduction)
        except BaseException:
            current.backward.moves_to(FAILED)
            raise

    def _leave(self, current: ContextBackward) -> None:
        self._current = None
        self._group.outstanding.pop(self, None)
        for hook in current.hooks:
            hook.remove()

    # After a backward that broke off

    def detach(self) -> None:
        """No collective is owed any more."""
        self._group.outstanding.pop(self, None)

    def has_failed(self) -> bool:
        """Whether the last backward in a context failed."""
        current = self._current if not self._driver.is_detached else None
        return current is not None and current.backward.phase is FAILED

    def abandon(self) -> None:
        """Nothing: :meth:`drain` launches."""

    def drain(self) -> None:
        """The last backward failed: take part in the collectives of the other ranks."""
        current = self._current
        assert current is not None
        reduction = current.reduction
        self._reducer.warn_of_nan(reduction)
        with self._group.uninterrupted(), torch.no_grad():
            self._leave(current)
            try:
                reduction.abandon()
                reduction.drain()
            except Mismatch as error:
                self._reducer.raise_mismatch(error, reduction)


def _arrived(arrived: set[int], number: int, _: Any, gradients: tuple[Tensor | None, ...]) -> None:
    if gradients[0] is not None:
        arrived.add(number)


def _broke_off(reference: weakref.ref[ContextBackward], _: object) -> None:
    """The engine has dropped the callback of a backward without calling it: it failed."""
    current = reference()
    if current is not None:
        current.backward.fail()


@contextmanager
def _raising_at_end() -> Iterator[None]:
    """Context inside a hook: an error is raised at the end of the backward.

    If a hook raises, the distributed engine only reports "python_error".
    """
    try:
        yield
    except Exception as error:
        queue_end_of_backward(partial(_raise, error))


def _raise(error: Exception) -> None:
    raise error
