"""Programs that call the wrapper while a backward of it runs, ends, or has failed.

Nothing that makes no collective may touch the reduction: a communication hook, a signal handler, a
hook of a parameter or another thread that evaluates the module.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, ranks, recorded_collectives
from modules import mlp, normed
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from training import (
    assert_gradients_alike,
    assert_right_step,
    breaking_off,
    drawn,
    gradients,
    raises_if,
    train_step,
    wrap,
)

import tritonddp
from tritonddp.comm.all_reduce import Collective
from tritonddp.comm.host.memory_exchange import MemoryExchange
from tritonddp.reducer.graph.backward import FAILED, RUNNING, WAITING, Backward

Evaluate = Callable[[], object]
WAYS = {"memory": {}, "process group": {"transport": "process_group"}}


def net() -> nn.Sequential:
    return mlp(4, 6, 6, 2)


def batch(step: int) -> Tensor:
    return drawn(5, 4, step=step)


@contextmanager
def in_a_communication_hook(ddp: Any, evaluate: Evaluate) -> Iterator[None]:
    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        evaluate()
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(dist.group.WORLD, hook)
    yield


@contextmanager
def in_a_signal_handler(ddp: Any, evaluate: Evaluate) -> Iterator[None]:
    """While the backward waits for its buckets."""

    def interrupted(method: Any) -> Any:
        def wait(*arguments: Any) -> Any:
            signal.raise_signal(signal.SIGUSR1)
            return method(*arguments)

        return wait

    signal.signal(signal.SIGUSR1, lambda *_: evaluate())
    with (
        mock.patch.object(Collective, "wait", interrupted(Collective.wait)),
        mock.patch.object(MemoryExchange, "wait", interrupted(MemoryExchange.wait)),
    ):
        yield


@contextmanager
def in_a_hook(ddp: Any, evaluate: Evaluate) -> Iterator[None]:
    handles = [p.register_hook(lambda _: evaluate() and None) for p in ddp.parameters()]
    yield
    for handle in handles:
        handle.remove()


@contextmanager
def on_another_thread(ddp: Any, evaluate: Evaluate) -> Iterator[None]:
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            evaluate()

    thread = threading.Thread(target=run)
    thread.start()
    yield
    is_over.set()
    thread.join()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "evaluating", [in_a_communication_hook, in_a_signal_handler, in_a_hook, on_another_thread]
)
@ranks(2)
def test_a_module_may_be_evaluated_while_its_gradients_are_reduced(
    evaluating: Any, way: str
) -> None:
    ddp = wrap(net(), bucket_cap_mb=1e-4, **WAYS[way])
    evaluations: list[Tensor] = []

    def evaluate() -> bool:
        with torch.no_grad():
            evaluations.append(ddp(torch.ones(2, 4)))
        return True

    with evaluating(ddp, evaluate):
        for step in range(4):
            assert_right_step(ddp, batch(step))
    assert evaluations


@pytest.mark.parametrize("evaluating", [in_a_communication_hook, on_another_thread])
@ranks(2)
def test_a_replicated_module_may_be_evaluated_while_its_gradients_are_reduced(
    evaluating: Any,
) -> None:
    module, twin = net(), net()
    twin.load_state_dict(module.state_dict())
    tritonddp.replicate(module)
    wrapper = tritonddp.DistributedDataParallel(twin)

    def evaluate() -> bool:
        with torch.no_grad():
            module(torch.ones(2, 4))
        return True

    with evaluating(module, evaluate):
        for step in range(3):
            for each in module, wrapper:
                train_step(each, batch(step))
            assert_same_bits(gradients(module), gradients(twin))


@ranks(2)
def test_a_gradient_of_a_forward_in_a_hook_does_not_make_a_local_backward_a_reduced_one() -> None:
    """``torch.autograd.grad`` through an output goes through the hook of that output too."""
    ddp = wrap(net())
    assert_right_step(ddp, batch(0))
    probe = ddp(batch(1))
    reductions = ddp.reducer.counters.reductions
    with ddp.no_sync():
        output = ddp(batch(2))

        @torch.enable_grad()
        def look(_: Tensor) -> None:
            torch.autograd.grad(probe.sum(), list(ddp.parameters()), retain_graph=True)

        output.register_hook(look)
        ddp.zero_grad()
        output.sum().backward()
    assert ddp.reducer.counters.reductions == reductions
    ddp.zero_grad()
    probe.square().sum().backward()
    assert_gradients_alike(ddp)


@pytest.mark.parametrize("where", [0, 4], ids=["after some gradients", "before any gradient"])
@ranks(2)
def test_after_all_ranks_failed_one_may_evaluate_before_a_collective_of_the_program(
    rank: int, where: int
) -> None:
    ddp = wrap(net(), bucket_cap_mb=1e-4)
    for step in range(2):
        assert_right_step(ddp, batch(step))
    handle = ddp.module[where].register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_step(ddp, batch(2))
    handle.remove()
    if rank == 0:
        with torch.no_grad():
            ddp(batch(3))
    dist.barrier()
    for step in range(4, 6):
        assert_right_step(ddp, batch(step))


@pytest.mark.parametrize("thread", [False, True], ids=["", "on a thread"])
@ranks(2)
def test_after_one_rank_failed_a_forward_that_broadcasts_buffers_recovers(
    rank: int, thread: bool
) -> None:
    """Other ranks wait for the collectives of that backward, and broadcast after them."""
    ddp = wrap(nn.Sequential(normed(4, 4), nn.Linear(4, 2)), bucket_cap_mb=1e-4)
    for step in range(2):
        train_step(ddp, batch(step))
    with breaking_off(ddp.module[0][0].weight, rank == 1):
        train_step(ddp, batch(2))

    def evaluate() -> None:
        with torch.no_grad():
            ddp(batch(3))

    if thread:
        other = threading.Thread(target=evaluate)
        other.start()
        other.join()
    else:
        evaluate()
    train_step(ddp, batch(4))
    assert_gradients_alike(ddp)


class Stop(Exception):
    pass


@ranks(2)
def test_an_error_of_a_signal_handler_in_the_wait_is_a_failed_backward(rank: int) -> None:
    """The buckets are on their way: this rank waits for them before its next collective."""
    ddp = wrap(net(), bucket_cap_mb=1e-4)
    for step in range(2):
        assert_right_step(ddp, batch(step))

    def stop() -> None:
        raise Stop

    with raises_if(rank == 1, Stop):
        if rank == 1:
            with in_a_signal_handler(ddp, stop):
                train_step(ddp, batch(2))
        else:
            train_step(ddp, batch(2))
    assert rank == 0 or ddp._ddp_state.core.backward.phase is FAILED
    for step in range(3, 5):
        assert_right_step(ddp, batch(step))


@ranks(2)
def test_a_backward_in_a_communication_hook_is_refused_by_name() -> None:
    ddp = wrap(net())
    error = "a communication hook, a signal handler or another thread runs a backward"

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        with torch.enable_grad():
            ddp(torch.ones(2, 4)).sum().backward()
        return allreduce_hook(dist.group.WORLD, bucket)

    ddp.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match=error):
        train_step(ddp, batch(0))


def test_a_backward_that_has_failed_moves_nowhere() -> None:
    backward = Backward("rank 0, step 1", [])
    assert backward.phase is RUNNING
    backward.fail()
    assert backward.phase is FAILED
    with pytest.raises(RuntimeError, match=r"cannot move from Phase\.FAILED to Phase\.WAITING"):
        backward.moves_to(WAITING)


@ranks(2)
def test_a_backward_that_failed_on_all_ranks_leaves_the_reduction_armed() -> None:
    """As in stock: the next one is reduced in its place, although its forward was local."""
    ddp = wrap(net())
    assert_right_step(ddp, batch(0))
    with ddp.no_sync():
        local = ddp(batch(1))
    output = ddp(batch(2))
    output.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    ddp.zero_grad()
    local.square().sum().backward()
    assert_gradients_alike(ddp)


@ranks(2)
def test_one_rank_may_run_a_forward_with_gradients_alone(rank: int) -> None:
    """As an evaluation without ``torch.no_grad()``: a forward makes no collective.

    Stock DDP rebuilds its buckets there, by a broadcast that the other ranks do not make.
    """
    ddp = wrap(net())
    for step in range(3):
        assert_right_step(ddp, batch(step))
        with recorded_collectives() as calls:
            if rank == 0:
                ddp(batch(step))
        assert not calls
        dist.barrier()


@ranks(2, views=True)
def test_gradients_stay_where_all_ranks_fail_before_any(view: bool) -> None:
    """The others get NaN, and a rank that fails keeps what it has: also where that is a view."""
    ddp = wrap(net(), view)
    for step in range(3):
        assert_right_step(ddp, batch(step))
    kept = [param.grad.clone() for param in ddp.parameters()]
    output = ddp(batch(3))
    output.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    ddp(batch(4))
    assert_same_bits([param.grad for param in ddp.parameters()], kept)
