"""Ctrl-C in the midst of a backward: a real signal, at points where it would do harm."""

import contextlib
import copy
import logging
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from modules import linears
from torch import nn
from training import assert_mean_of, breaking_off, delayed, drawn, train_step

from tritonddp import DistributedDataParallel
from tritonddp.buckets.manager import BucketManager
from tritonddp.comm.all_reduce import AllReduce
from tritonddp.comm.reduction import Reduction
from tritonddp.reducer import capture


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@contextlib.contextmanager
def handled(handler: Any = signal.default_int_handler) -> Iterator[None]:
    """Shells may start processes that ignore Ctrl-C."""
    former = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def after(call: Callable[..., Any], number: int) -> Callable[..., Any]:
    """``call``, with a signal right behind the call of this number, whose result it takes away."""
    calls = iter(range(1_000))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        if next(calls) == number:
            interrupt()
        return result

    return interrupted


# By point where Ctrl-C comes: what is called there, and how often it is before.
POINTS: dict[str, tuple[Any, str, int]] = {
    "first bucket": (AllReduce, "launch", 0),
    "last bucket": (AllReduce, "launch", 3),
    "wait": (AllReduce, "wait", 1),
    "result": (Reduction, "finish", 0),
    "order of gradients": (BucketManager, "agree_on_order", 0),
}


@pytest.mark.parametrize("point", POINTS)
@ranks(1)
def test_after_an_interrupt_in_a_reduction_the_group_refuses_further_use(point: str) -> None:
    group = dist.new_group()
    nets = [
        DistributedDataParallel(
            linears(64, 64, 64, 64, 64), process_group=group, bucket_cap_mb=0.01
        )
        for _ in range(2)
    ]
    others = DistributedDataParallel(linears(64, 4), process_group=dist.new_group())
    for each in nets:
        each._ddp_state.core.exchanges_alone = True  # as with many ranks
    inputs = drawn(3, 64)
    owner, name, number = POINTS[point]
    if point != "order of gradients":  # of the first reduction
        train_step(nets[0], inputs)
    struck = mock.patch.object(owner, name, after(getattr(owner, name), number))
    with handled(), struck, pytest.raises(KeyboardInterrupt):
        train_step(nets[0], inputs)
    refused = r"rank 0: Ctrl-C .* cannot be used any more\. Start the processes of all ranks again"
    for use in (
        lambda: train_step(nets[0], inputs),
        lambda: train_step(nets[1], inputs),
        nets[0].reduce_gradients,
        nets[0].should_stop,
        lambda: DistributedDataParallel(linears(4, 4), process_group=group),
        lambda: train_step(others, inputs),  # its ranks may have waited for this one
    ):
        with pytest.raises(RuntimeError, match=refused):
            use()
    other = DistributedDataParallel(linears(64, 4), process_group=dist.new_group())
    train_step(other, inputs)


@ranks(1)
def test_after_an_interrupt_in_a_reduction_on_request_the_group_refuses_further_use() -> None:
    net = DistributedDataParallel(linears(4, 4), process_group=dist.new_group())
    with net.no_sync():
        train_step(net, drawn(3, 4))
    struck = mock.patch.object(AllReduce, "launch", after(AllReduce.launch, 0))
    with handled(), struck, pytest.raises(KeyboardInterrupt):
        net.reduce_gradients()
    with pytest.raises(RuntimeError, match="Start the processes of all ranks again"):
        net.reduce_gradients()


@ranks(1)
def test_an_interrupt_where_delayed_buckets_are_launched_ends_the_use_of_the_group_too() -> None:
    module, outside = linears(4, 4, 4), nn.Parameter(torch.ones(3, 4))
    options = delayed(module, "1.weight", until=outside)
    net = DistributedDataParallel(module, process_group=dist.new_group(), **options)
    net._ddp_state.core.exchanges_alone = True
    train_step(net, outside * 1)
    struck = mock.patch.object(AllReduce, "launch", after(AllReduce.launch, 1))  # the delayed one
    with handled(), struck, pytest.raises(KeyboardInterrupt):
        train_step(net, outside * 1)
    with pytest.raises(RuntimeError, match="Start the processes of all ranks again"):
        net.reduce_gradients()


IN_STEP = logging.getLogger("tritonddp.reducer.reducer")
CUTS: dict[str, tuple[Any, str, type[BaseException]]] = {
    "Ctrl-C in the warning": (IN_STEP, "warning", KeyboardInterrupt),
    "a capture": (capture, "refuse", RuntimeError),
}


@pytest.mark.parametrize("cut", list(CUTS))
@ranks(2)
def test_collectives_that_were_not_made_up_for_are_still_owed(rank: int, cut: str) -> None:
    owner, name, error = CUTS[cut]
    net = linears(64, 64, 64, bias=False)
    alone, ddp = copy.deepcopy(net), DistributedDataParallel(net, bucket_cap_mb=0.01)
    for seed in range(2):
        train_step(ddp, drawn(3, 64, step=seed))
    with breaking_off(net[0].weight, rank == 1):
        train_step(ddp, drawn(3, 64, step=2))
    if rank == 1:
        with mock.patch.object(owner, name, side_effect=error("cut short")), pytest.raises(error):
            ddp(drawn(3, 64, step=3))
    for seed in (3, 4):
        for each in (ddp, alone):
            train_step(each, drawn(3, 64, step=seed))
        assert_mean_of(ddp, alone)
