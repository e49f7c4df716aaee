"""Averages gradients in the contexts of ``torch.distributed.autograd``, as stock DDP does.

Imported by the first forward that runs in such a context. One gradient, from
``torch.distributed.autograd.backward()`` to ``get_gradients()``::

    forward           watch     a hook on each output, which knows the context
    backward starts   _begin    buckets for this backward, hooks on the parameters' nodes
    gradient ready    _arrives  the hook records it
    backward ends     end       read the context, reduce, write the means into the context

The distributed engine does not accumulate into ``.grad``, cannot predict which nodes it will reach,
and does not call the hooks that other backwards use. It adds each gradient to the context and then
runs the hooks of the AccumulateGrad node. Therefore, all buckets are sent at the end.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.autograd import get_gradients
from torch.distributed.rpc import PyRRef
from torch.nn import Parameter

from tritonddp._torch import (
    current_graph_task_id,
    put_into_context,
    queue_end_of_backward,
    tree_leaves,
)
from tritonddp.comm.reduction import open_reduction
from tritonddp.coordination.agreement import GradSource, Mismatch
from tritonddp.coordination.failures import listed
from tritonddp.reducer.autograd_driver import AutogradDriver
from tritonddp.reducer.deferred import raise_error
from tritonddp.reducer.extension import Extension
from tritonddp.reducer.graph.backward import (
    FAILED,
    Backward,
    Forward,
    call_back,
    one_of_each_node,
    tensors_in,
)
from tritonddp.reducer.graph.participation import (
    accumulating_nodes,
    as_trainable,
    distributed_engine_runs,
)
from tritonddp.reducer.reducer import detached

_BY_HAND = (
    "call .module instead, and average the result of torch.distributed.autograd.get_gradients() "
    "with reduce_gradients()"
)


class _Seen(Extension):
    """Holds the ID of the last backward through an output of a wrapper, reduced or not."""

    graph_task = -1


def watch(driver: AutogradDriver, output: Any, context: int, syncs: bool) -> None:
    """Watch ``output`` of a forward in this context; ``syncs`` if it ran outside ``no_sync``.

    Raises:
        RuntimeError: an option of the user does not support gradients in a context.
    """
    if not driver.is_detached:
        _check(driver)
    if driver.events.of(_Seen) is None:
        driver.events.install(_Seen())
    reference: weakref.ref[Any] = driver.reference  # an output may outlive the driver
    forward = driver.forwards.ended(driver.counters.reductions, syncs)

    def hook(gradient: Tensor) -> None:
        if not distributed_engine_runs():  # loss.backward(): its gradients go to .grad
            call_back(reference, forward, gradient)
        elif (found := reference()) is not None:
            try:
                _begin(found, context, forward)
            except Exception as error:  # raised here, it would become "python_error"
                queue_end_of_backward(partial(raise_error, error))

    # As stock DDP does, look into the RRefs of this process.
    rrefs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, PyRRef) and leaf.is_owner()]
    values = [rref.local_value() for rref in rrefs]
    for tensor in one_of_each_node((*tensors_in(output), *tensors_in(values))):
        tensor.register_hook(hook)


def _check(driver: AutogradDriver) -> None:
    inside = f"{driver.where()}: inside torch.distributed.autograd.context()"
    sync = driver.sync
    if sync.weight is not None:
        raise RuntimeError(f"{inside} weighted(n) is not supported: {_BY_HAND}")
    if sync.join is not None and sync.join.is_open:
        raise RuntimeError(
            f"{inside} join() is not supported, because ranks without inputs cannot take part in "
            "such a backward: remove join()"
        )
    if driver.comm_hook is not None:
        raise RuntimeError(f"{inside} communication hooks are not supported: {_BY_HAND}")
    if driver.steps_optimizers:
        raise RuntimeError(
            f"{inside} optimizers cannot step in the backward, because torch's "
            "_apply_optimizer_in_backward requires .grad: use a DistributedOptimizer"
        )
    if driver.finalizes_manually:
        raise RuntimeError(
            f"{inside} manual finalization is not supported: set "
            "require_manual_backward_finalization to False"
        )


def _begin(driver: AutogradDriver, context: int, forward: Forward) -> None:
    """Start the reduction when a backward reaches an output of a forward in ``context``."""
    group, reducer = driver.group, driver.reducer
    if driver.is_detached:
        group.refuse_if_forked()
        return
    with driver.launching, torch.no_grad():
        graph_task, seen = current_graph_task_id(), driver.events.of(_Seen)
        assert seen is not None
        owing = [each for each in group.outstanding if isinstance(each, ContextBackward)]
        former = [each.backward for each in owing if each.driver is driver]
        if graph_task in (seen.graph_task, *(each.graph_task for each in former)):
            return  # already decided at another output; it may have failed since
        seen.graph_task = graph_task
        counters = reducer.counters
        source = reducer.forwards.decide(forward, driver.sync, counters.reductions, driver.where)
        if source is None:
            return  # no_sync: the context keeps local gradients
        if any(each.runs for each in former):
            raise RuntimeError(
                f"{driver.where()}: a backward in another torch.distributed.autograd context is "
                "still running, and the order of the two may differ between ranks: run them one "
                "after the other"
            )
        group.recover()
        reducer.parameters.register()
        ContextBackward(driver, context).begin()


class ContextBackward:
    """One backward on this rank whose gradients are in a context. It does not use ``.grad``.

    Its buckets are made for stand-ins: detached parameters whose ``.grad`` are the tensors of the
    context. The ``.grad`` of the parameters, possibly accumulated under ``no_sync``, is unchanged.
    As in ``reduce_gradients()``, gradients are cast to ``reduce_dtype`` but not quantized.

    While it runs, or after it has failed, it is in :attr:`Group.outstanding`.

    Args:
        driver: driver of the wrapper.
        context: ID of the context of the forward.
    """

    def __init__(self, driver: AutogradDriver, context: int) -> None:
        self.driver, self.context = driver, context
        current = driver.manager.current
        origin: dict[Any, Parameter] = {detached(param): param for param in current.params}
        sparse = {each for each, param in origin.items() if param in driver.parameters.sparse}
        named = list(zip(current.names, origin, strict=True))
        stand_ins = driver.manager.temporary(named, sparse=sparse)
        where = f"{driver.where()}, torch.distributed.autograd"
        self._params = [origin[each] for each in stand_ins.params]
        used = [False] * len(origin)
        self.reduction = open_reduction(
            driver.reducer, stand_ins, GradSource.GIVEN, used, where=where
        )
        self.backward = Backward(where, self.reduction)
        self._arrived: set[int] = set()  # indices of parameters whose gradients are ready
        self._hooks: list[Any] = []

    def begin(self) -> None:
        """Schedule :meth:`end` for the end of this backward."""
        try:
            self.driver.group.outstanding[self] = None
            _check(self.driver)
            with as_trainable(self._params):
                nodes = accumulating_nodes(self._params)
            for number, node in enumerate(nodes):
                self._hooks.append(node.register_hook(partial(_arrives, self._arrived, number)))
            self.backward.queue_end(self.end, partial(_broke_off, weakref.ref(self.backward)))
        except BaseException:
            self.backward.moves_to(FAILED)  # drain() runs this rank's collectives
            raise

    @torch.no_grad()
    def end(self) -> None:
        """Reduce when the backward is over on this rank: write the means into the context."""
        reducer, reduction = self.driver.reducer, self.reduction
        if not self.backward.runs:
            return
        try:
            self._read()
            try:
                with reducer.group.uninterrupted():
                    reduction.reduce_now()
                self._write()
            except Mismatch as error:
                reducer.raise_mismatch(error, reduction)
            finally:
                self._leave()
            if reducer.sync.finds_unused is False:
                self._refuse_unused()
            for call in reducer.events.on_end:
                call(reduction)
        except BaseException:
            self.backward.moves_to(FAILED)
            raise

    def _read(self) -> None:
        """Read the gradients of the context. A parameter is used if it has one there."""
        found, reduction = get_gradients(self.context), self.reduction
        used = [number for number, param in enumerate(self._params) if param in found]
        if missing := self._arrived.difference(used):
            raise RuntimeError(
                f"{reduction.where}: this backward and its forward used different contexts: "
                f"context {self.context} of the forward has no gradient of "
                f"{reduction.bucket_set.names[min(missing)]!r}. Use one context for both"
            )
        for number in used:
            reduction.bucket_set.params[number].grad = found[self._params[number]]
        reduction.bucket_set.use.note(used)

    def _write(self) -> None:
        """Write the means of gradients that the context did not have on this rank."""
        found = get_gradients(self.context)
        for stand_in, param in zip(self.reduction.bucket_set.params, self._params, strict=True):
            if stand_in.grad is not None and stand_in.grad is not found.get(param):
                put_into_context(self.context, param, stand_in.grad)

    def _refuse_unused(self) -> None:
        """Raise at the next forward if parameters are unused (``find_unused_parameters=False``)."""
        flags = [is_used for bucket in self.reduction.buckets for is_used in bucket.sent_flags]
        rows = zip(self.reduction.bucket_set.names, self._params, flags, strict=True)
        unused = [name for name, p, is_used in rows if p.requires_grad and not is_used]
        if unused:
            error = RuntimeError(
                f"{self.reduction.where}: the backward left parameters without a gradient, which "
                f"is an error with find_unused_parameters=False: {listed(unused)}. Leave "
                "find_unused_parameters at its default"
            )
            self.driver.deferred.raise_later(error)

    def _leave(self) -> None:
        self.driver.group.outstanding.pop(self, None)
        for hook in self._hooks:
            hook.remove()

    # Recovery of a failed backward: see Outstanding

    @property
    def order(self) -> tuple[str, int]:
        """Sort key, the same as for other backwards of the wrapper: see :meth:`abandon`."""
        return self.driver.order

    def has_failed(self) -> bool:
        """Return True if the backward has failed and still owes its collectives.

        A thread of the distributed engine may drop the callback shortly after the error, as in a
        backward on a GPU.
        """
        return not self.driver.is_detached and self.backward.has_failed(is_on_gpu=True)

    def abandon(self) -> None:
        """Do nothing: :meth:`drain` launches the collectives.

        Raises:
            RuntimeError: another backward of the wrapper has failed too, and other ranks may
                complete the collectives of the two in another order.
        """
        if self.driver.has_failed():
            raise RuntimeError(
                f"{self.reduction.where}: two backwards of this module failed, this one and a "
                "loss.backward(), and their order may differ between ranks. Restart all ranks "
                "from a checkpoint"
            )

    @torch.no_grad()
    def drain(self) -> None:
        """Complete the collectives together with the other ranks."""
        reducer, reduction = self.driver.reducer, self.reduction
        reducer.warn_of_nan(reduction)
        with reducer.group.uninterrupted():
            self._leave()
            try:
                reduction.abandon()
                reduction.drain()
            except Mismatch as error:
                reducer.raise_mismatch(error, reduction)


def _arrives(arrived: set[int], number: int, _: Any, gradients: tuple[Tensor | None, ...]) -> None:
    if gradients[0] is not None:
        arrived.add(number)


def _broke_off(reference: weakref.ref[Backward], _: object) -> None:
    """Mark a backward as failed because the engine dropped its callback without calling it."""
    if (backward := reference()) is not None:
        backward.fail()
