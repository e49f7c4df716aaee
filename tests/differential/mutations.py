"""Planted faults, one at a time: what a comparison of scenarios has to find."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tritonddp import DistributedDataParallel
from tritonddp.buckets import bucket, parameters
from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.sparse_bucket import SparseBucket
from tritonddp.buckets.view_bucket import ViewBucket
from tritonddp.comm.all_reduce import AllReduce
from tritonddp.comm.broadcast import StateBroadcast
from tritonddp.comm.run import ReductionRun
from tritonddp.features import grad_norm
from tritonddp.features.metrics.metrics import Metrics
from tritonddp.reducer import participation
from tritonddp.reducer.reducer import Reducer

Mutation = Callable[[], contextlib.AbstractContextManager[None]]

MUTATIONS: dict[str, Mutation] = {}


def mutation(plant: Callable[[], Iterator[None]]) -> Mutation:
    """Decorator: between its start and its end the fault is there."""
    MUTATIONS[plant.__name__] = contextlib.contextmanager(plant)
    return MUTATIONS[plant.__name__]


def _around(owner: Any, name: str, change: Callable[..., Any]) -> Any:
    """Patch: ``change(original, self, *args)`` instead of the method ``name``."""
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(lambda *a, **k: original(self, *a, **k), self, *args, **kwargs)

    return patch.object(owner, name, method)


_nothing = contextlib.ExitStack


@mutation
def no_average() -> Iterator[None]:
    """Gradients are summed."""

    def announce(original: Any, self: Reducer, run: ReductionRun) -> None:
        original(run)
        run.scale *= self.group.size

    with _around(Reducer, "announce", announce):
        yield


@mutation
def forgotten_bucket() -> Iterator[None]:
    """The second bucket stays at home."""

    class Done:
        def wait(self) -> None:
            pass

    def launch(
        original: Any, self: AllReduce, run: ReductionRun, bucket: Bucket, *args: Any
    ) -> None:
        if bucket.index == 1:
            run.works.append(Done())
        else:
            original(run, bucket, *args)

    with _around(AllReduce, "launch", launch):
        yield


@mutation
def stale_gradient() -> Iterator[None]:
    """What a bucket's first parameter sends is its gradient of the reduction before."""
    sent: dict[int, Tensor] = {}

    def launch(
        original: Any, self: AllReduce, run: ReductionRun, bucket: Bucket, *args: Any
    ) -> None:
        view = bucket.flat.views[0]
        before, sent[id(view)] = sent.get(id(view)), view.clone()
        if before is not None and before.shape == view.shape:
            view.copy_(before)
        original(run, bucket, *args)

    with _around(AllReduce, "launch", launch):
        yield


@mutation
def wrong_strides() -> Iterator[None]:
    """Gradients lie row by row in their bucket, whatever their parameters do."""

    def row_major(param: Tensor) -> tuple[int, ...]:
        return torch.empty(param.shape, device="meta").stride()

    with patch.object(bucket, "gradient_strides", row_major):
        yield


@mutation
def ignored_no_sync() -> Iterator[None]:
    """``no_sync`` does nothing."""
    with patch.object(DistributedDataParallel, "no_sync", lambda self: contextlib.nullcontext()):
        yield


@mutation
def ignored_forward_under_no_sync() -> Iterator[None]:
    """Only the start of a backward decides whether it is reduced, not its forward."""
    with patch.object(Reducer, "is_reduced", lambda self, forward: self.sync.enabled):
        yield


@mutation
def ignored_weights() -> Iterator[None]:
    """``weighted`` does nothing."""
    nothing = lambda self, n, reduction="mean": contextlib.nullcontext()  # noqa: E731
    with patch.object(DistributedDataParallel, "weighted", nothing):
        yield


@mutation
def skipped_buffers() -> Iterator[None]:
    """Forwards broadcast no buffers."""
    with patch.object(DistributedDataParallel, "_sync_buffers", lambda self: None):
        yield


@mutation
def skipped_initial_state() -> Iterator[None]:
    """Wrapping broadcasts nothing."""

    def send(original: Any, self: StateBroadcast, tensors: Any, place: str, what: str) -> None:
        if place != "wrapping":
            original(tensors, place, what)

    with _around(StateBroadcast, "send", send):
        yield


def _with_flags(change: Callable[[Bucket], None]) -> contextlib.AbstractContextManager[Any]:
    """Patch: ``change`` sees a reduced bucket before it is unflattened."""

    def unpack(original: Any, self: Bucket, *args: Any) -> None:
        change(self)
        original(*args)

    stack = contextlib.ExitStack()
    for kind in (Bucket, ViewBucket):
        stack.enter_context(_around(kind, "unpack", unpack))
    return stack


def _when_reduced(change: Callable[[Bucket], None]) -> contextlib.AbstractContextManager[Any]:
    """Patch: ``change`` sees a bucket whose gradients are the means."""

    def unpack(original: Any, self: Bucket, *args: Any) -> None:
        original(*args)
        change(self)

    stack = contextlib.ExitStack()
    for kind in (Bucket, ViewBucket, SparseBucket):
        stack.enter_context(_around(kind, "unpack", unpack))
    return stack


@mutation
def zeros_for_unused() -> Iterator[None]:
    """A parameter that no rank used gets a gradient all the same."""
    with _with_flags(lambda bucket: bucket.flat.flags.fill_(1)):
        yield


@mutation
def only_own_gradients() -> Iterator[None]:
    """A parameter that only other ranks used gets no gradient."""

    def forget(bucket: Bucket) -> None:
        for slot, used in enumerate(bucket.used):
            if not used:
                bucket.flat.flags[slot] = 0

    with _with_flags(forget):
        yield


@mutation
def forgotten_microbatches() -> Iterator[None]:
    """What only backwards under ``no_sync`` used is not reduced."""

    def begin(original: Any, self: Reducer, *args: Any) -> None:
        self.forget_accumulated()
        original(*args)

    with _around(Reducer, "_open", begin):
        yield


@mutation
def rows_of_one_rank() -> Iterator[None]:
    """Of a sparse gradient, rows of the last rank are forgotten."""

    def receive(original: Any, self: SparseBucket, indices: Tensor, values: Tensor) -> None:
        values[len(values) - self.announced()[-1].rows :] = 0
        original(indices, values)

    with _around(SparseBucket, "receive_rows", receive):
        yield


@mutation
def other_rounding_on_one_rank() -> Iterator[None]:
    """The last bit of a gradient differs between ranks."""

    def change(bucket: Bucket) -> None:
        grad = bucket.params[0].grad
        if torch.distributed.get_rank() == 1 and grad is not None:
            grad.mul_(1 + torch.finfo(grad.dtype).eps)

    with _when_reduced(change):
        yield


@mutation
def one_reduction_per_forward() -> Iterator[None]:
    """A second backward of one graph only accumulates."""

    def begin(original: Any, self: Reducer, forward: Any = None) -> None:
        reached = forward is not None and forward.reached
        with patch.object(self, "is_reduced", lambda _: False) if reached else _nothing():
            original(forward)

    with _around(Reducer, "on_backward", begin):
        yield


@mutation
def gradients_of_others_memory() -> Iterator[None]:
    """A bucket fills its buffer although somebody holds a gradient that lies in it."""
    with patch.object(Bucket, "_memory", lambda self: ()):
        yield


@mutation
def parameters_of_the_first_day() -> Iterator[None]:
    """Parameters that are replaced or unfrozen are not taken up."""
    with patch.object(parameters.ModuleParameters, "has_changed", lambda self: False):
        yield


@mutation
def lost_gradient_of_a_hook() -> Iterator[None]:
    """Reentrant checkpoints, which the engine does not announce, are not waited for."""
    with patch.object(participation.ReentrantGrads, "may_come", lambda self, missing: set()):
        yield


@mutation
def norm_of_the_reduction() -> Iterator[None]:
    """What is done to gradients after the reduction does not change their norm."""
    with patch.object(grad_norm._Reduced, "is_current", lambda self: True):
        yield


@mutation
def metrics_of_this_rank() -> Iterator[None]:
    """A rank tells the times that it has measured itself."""

    def take_reports(original: Any, self: Metrics, reports: Any) -> None:
        original([reports[self._group.rank]] * len(reports))

    with _around(Metrics, "take_reports", take_reports):
        yield


@mutation
def ignored_communication_hook() -> Iterator[None]:
    """Hooks are registered, and never called."""
    with patch.object(DistributedDataParallel, "register_comm_hook", lambda self, *args: None):
        yield


@mutation
def complex_gradients_conjugated() -> Iterator[None]:
    """Complex gradients come back with the other sign of their imaginary parts."""

    def change(bucket: Bucket) -> None:
        for param in bucket.params:
            if param.is_complex() and param.grad is not None:
                param.grad.copy_(param.grad.conj().resolve_conj())

    with _when_reduced(change):
        yield
