"""Planted faults, one at a time: what a comparison of scenarios has to find.

Each names the functions of the package that it replaces, and makes the replacement of the original.
A name that is not there any more is an error when the fault is planted.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tritonddp.coordination.agreement import GradSource

# What is planted: the names, as "room.module:Class.method", and what makes the other function.
MUTATIONS: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {}
# Those that scenarios with a sharded optimizer find.
OF_SHARDED = {"values_of_one_rank", "means_that_count_on_one_rank", "norm_of_this_rank"}

_WRAPPER = "ddp:DistributedDataParallel"
_BUCKETS = ("buckets.bucket:Bucket", "buckets.memory.view_bucket:ViewBucket")
_UNPACK = tuple(f"{bucket}.unpack" for bucket in _BUCKETS)
_UNPACK_ALL = (*_UNPACK, "buckets.sparse_bucket:SparseBucket.unpack")


def mutation(*names: str) -> Callable[..., Any]:
    """Decorator of ``make(original) -> replacement``, for each of the names."""

    def note(make: Callable[..., Any]) -> Callable[..., Any]:
        MUTATIONS[make.__name__] = names, make
        return make

    return note


@contextlib.contextmanager
def planted(mutation: str) -> Iterator[None]:
    """Context: the fault is there.

    Raises:
        AttributeError, ImportError: the package has nothing of this name.
    """
    names, make = MUTATIONS[mutation]
    with contextlib.ExitStack() as stack:
        for name in names:
            owner, attribute = _find(name)
            stack.enter_context(patch.object(owner, attribute, make(getattr(owner, attribute))))
        yield


def _find(name: str) -> tuple[Any, str]:
    module, _, path = name.partition(":")
    *owners, attribute = path.split(".")
    owner = importlib.import_module(f"tritonddp.{module}")
    for each in owners:
        owner = getattr(owner, each)
    if not hasattr(owner, attribute):
        raise AttributeError(f"a planted fault is for {name}, which tritonddp does not define")
    return owner, attribute


def is_broken(what: str) -> bool:
    """Whether a traceback says that a fault does not fit the package: it ends in this file."""
    *_, last = what.partition("\nTo play it again")[0].rpartition('  File "')
    return "mutations.py" in last and "Error" in last


def _nothing(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@mutation("comm.reduction:Reduction._announce")
def no_average(original: Any) -> Any:
    """Gradients are summed."""

    def announce(self: Any, *args: Any) -> None:
        original(self, *args)
        self.scale *= self.group.size

    return announce


@mutation("comm.all_reduce:AllReduce.launch")
def forgotten_bucket(original: Any) -> Any:
    """The second bucket stays at home."""

    class Done:
        def wait(self) -> None:
            pass

    def launch(self: Any, bucket: Any, works: list[Any], *args: Any) -> None:
        if bucket.index == 1:
            works.append(Done())
        else:
            original(self, bucket, works, *args)

    return launch


@mutation("comm.all_reduce:AllReduce.launch")
def stale_gradient(original: Any) -> Any:
    """What a bucket's first parameter sends is its gradient of the reduction before."""
    sent: dict[int, Tensor] = {}

    def launch(self: Any, bucket: Any, works: list[Any], *args: Any) -> None:
        view = bucket.flat.views[0]
        before, sent[id(view)] = sent.get(id(view)), view.clone()
        if before is not None and before.shape == view.shape:
            view.copy_(before)
        original(self, bucket, works, *args)

    return launch


@mutation("buckets.bucket:gradient_strides")
def wrong_strides(original: Any) -> Any:
    """Gradients lie row by row in their bucket, whatever their parameters do."""
    return lambda param: torch.empty(param.shape, device="meta").stride()


@mutation(f"{_WRAPPER}.no_sync")
def ignored_no_sync(original: Any) -> Any:
    """``no_sync`` does nothing."""
    return _nothing


@mutation("reducer.graph.backward:Forwards.decide")
def ignored_forward_under_no_sync(original: Any) -> Any:
    """Only the start of a backward decides whether it is reduced, not its forward."""
    return lambda self, forward, sync, *_: GradSource.ELSEWHERE if sync.enabled else None


@mutation(f"{_WRAPPER}.weighted")
def ignored_weights(original: Any) -> Any:
    """``weighted`` does nothing."""
    return _nothing


@mutation(f"{_WRAPPER}._sync_buffers")
def skipped_buffers(original: Any) -> Any:
    """Forwards broadcast no buffers."""
    return lambda self: None


@mutation("comm.broadcast:StateBroadcast.send")
def skipped_initial_state(original: Any) -> Any:
    """Wrapping broadcasts nothing."""

    def send(self: Any, tensors: Any, place: str, what: str) -> None:
        if place != "wrapping":
            original(self, tensors, place, what)

    return send


@mutation(*_UNPACK)
def zeros_for_unused(original: Any) -> Any:
    """A parameter that no rank used gets a gradient all the same."""

    def unpack(self: Any, *args: Any) -> None:
        self.flat.flags.fill_(1)
        original(self, *args)

    return unpack


@mutation(*_UNPACK)
def only_own_gradients(original: Any) -> Any:
    """A parameter that only other ranks used gets no gradient."""

    def unpack(self: Any, *args: Any) -> None:
        for slot, used in enumerate(self.used):
            if not used:
                self.flat.flags[slot] = 0
        original(self, *args)

    return unpack


@mutation("reducer.reducer:Reducer._open")
def forgotten_microbatches(original: Any) -> Any:
    """What only backwards under ``no_sync`` used is not reduced."""

    def begin(self: Any, *args: Any) -> None:
        self.unreduced.clear(self.manager.current.params)
        original(self, *args)

    return begin


@mutation("buckets.sparse_bucket:SparseBucket.receive_rows")
def rows_of_one_rank(original: Any) -> Any:
    """Of a sparse gradient, rows of the last rank are forgotten."""

    def receive(self: Any, indices: Tensor, values: Tensor) -> None:
        values[len(values) - self.announced()[-1].rows :] = 0
        original(self, indices, values)

    return receive


@mutation(*_UNPACK_ALL)
def other_rounding_on_one_rank(original: Any) -> Any:
    """The last bit of a gradient differs between ranks."""

    def unpack(self: Any, *args: Any) -> None:
        original(self, *args)
        grad = self.params[0].grad
        if torch.distributed.get_rank() == 1 and grad is not None:
            grad.mul_(1 + torch.finfo(grad.dtype).eps)

    return unpack


@mutation("reducer.graph.backward:Forwards.decide")
def one_reduction_per_forward(original: Any) -> Any:
    """A second backward of one graph only accumulates."""

    def decide(self: Any, forward: Any, *args: Any) -> GradSource | None:
        reached = forward is not None and forward.reached
        source = original(self, forward, *args)
        return None if reached else source

    return decide


@mutation("buckets.bucket:Bucket.unpack")
def gradients_of_others_memory(original: Any) -> Any:
    """A gradient is written where that of the first reduction lies, whoever holds that."""
    first: dict[Tensor, Tensor] = {}

    def unpack(self: Any, *args: Any) -> None:
        original(self, *args)
        for param in self.params:
            if param.grad is not None and param.grad is not first.setdefault(param, param.grad):
                first[param].copy_(param.grad)
                param.grad = first[param]

    return unpack


@mutation("buckets.parameters:ModuleParameters.has_changed")
def parameters_of_the_first_day(original: Any) -> Any:
    """Parameters that are replaced or unfrozen are not taken up."""
    return lambda self: False


@mutation("reducer.graph.participation:ReentrantGrads.may_come")
def lost_gradient_of_a_hook(original: Any) -> Any:
    """Reentrant checkpoints, which the engine does not announce, are not waited for."""
    return lambda self, missing: set()


@mutation("features.grad_norm:GradientNorms._total")
def norm_that_counts_on_one_rank(original: Any) -> Any:
    """A rank leaves its first gradient out of the wrapper's own norm."""

    def total(self: Any, module: Any) -> Any:
        first = next((param for param in module.parameters() if param.grad is not None), None)
        if first is None or self._core.group.rank:
            return original(self, module)
        kept, first.grad = first.grad, None
        try:
            return original(self, module)
        finally:
            first.grad = kept

    return total


@mutation("features.metrics:Metrics._take")
def metrics_of_this_rank(original: Any) -> Any:
    """A rank tells the times that it has measured itself."""

    def take(self: Any, rows: Any) -> None:
        original(self, rows[[self._group.rank]].expand_as(rows))

    return take


@mutation(f"{_WRAPPER}.register_comm_hook")
def ignored_communication_hook(original: Any) -> Any:
    """Hooks are registered, and never called."""
    return lambda self, *args: None


@mutation(*_UNPACK_ALL)
def complex_gradients_conjugated(original: Any) -> Any:
    """Complex gradients come back with the other sign of their imaginary parts."""

    def unpack(self: Any, *args: Any) -> None:
        original(self, *args)
        for param in self.params:
            if param.is_complex() and param.grad is not None:
                param.grad.copy_(param.grad.conj().resolve_conj())

    return unpack


@mutation("zero.zero_redundancy_optimizer:ZeroRedundancyOptimizer.step")
def values_of_one_rank(original: Any) -> Any:
    """The last parameter that another rank owns gets another value."""

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(self, *args, **kwargs)
        for param in self._values._others[-1:]:
            param.detach().mul_(1.5)
        return loss

    return step


@mutation("reducer.earlier_means:EarlierMeans.set_aside")
def means_that_count_on_one_rank(original: Any) -> Any:
    """A mean that is in ``.grad`` already is reduced as this rank's gradient."""
    return lambda self: None


@mutation("zero.zero_redundancy_optimizer:ZeroRedundancyOptimizer.norms")
def norm_of_this_rank(original: Any) -> Any:
    """Gradients are clipped by the norm of those that this rank owns."""

    def norms(self: Any, given: Any, norm_type: float) -> Tensor:
        there = [param.grad for param in self._owners if param.grad is not None]
        given.clear()
        return torch.stack([grad.norm(norm_type).float() for grad in there] or [torch.zeros(())])

    return norms
