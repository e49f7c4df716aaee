"""Ctrl-C during a reduction: a real signal, at places where collectives would be lost."""

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from modules import linears
from torch import nn
from training import delayed, drawn, train_step

from tritonddp import DistributedDataParallel
from tritonddp.buckets.manager import BucketManager
from tritonddp.comm.all_reduce import AllReduce
from tritonddp.comm.reduction import Reduction


@contextlib.contextmanager
def struck(owner: Any, name: str, number: int) -> Iterator[None]:
    """Context: a signal immediately after this call of a method, whose result is lost."""
    call, calls = getattr(owner, name), itertools.count()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGINT)
        return result

    # Shells may start processes that ignore Ctrl-C.
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with mock.patch.object(owner, name, interrupted), pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGINT, former)


# The method whose call the signal follows, and the number of earlier calls.
POINTS: dict[str, tuple[Any, str, int]] = {
    "last bucket": (AllReduce, "launch", 3),
    "wait": (AllReduce, "wait", 1),
    "result": (Reduction, "finish", 0),
    "order of gradients": (BucketManager, "agree_on_order", 0),
}
REFUSED = r"rank 0: KeyboardInterrupt .* cannot be used any more\. Restart the processes of all"


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
    if point != "order of gradients":  # of the first reduction
        train_step(nets[0], inputs)
    with struck(*POINTS[point]):
        train_step(nets[0], inputs)
    for use in (
        lambda: train_step(nets[0], inputs),
        lambda: train_step(nets[1], inputs),
        nets[0].reduce_gradients,
        nets[0].should_stop,
        lambda: DistributedDataParallel(linears(4, 4), process_group=group),
        lambda: train_step(others, inputs),  # its ranks may have waited for this rank
    ):
        with pytest.raises(RuntimeError, match=REFUSED):
            use()
    other = DistributedDataParallel(linears(64, 4), process_group=dist.new_group())
    train_step(other, inputs)


@ranks(1)
def test_after_an_interrupt_in_other_launches_the_group_refuses_further_use() -> None:
    """In ``reduce_gradients()``, and of delayed buckets."""
    net = DistributedDataParallel(linears(4, 4), process_group=dist.new_group())
    with net.no_sync():
        train_step(net, drawn(3, 4))
    with struck(AllReduce, "launch", 0):
        net.reduce_gradients()
    with pytest.raises(RuntimeError, match=REFUSED):
        net.reduce_gradients()

    module, outside = linears(4, 4, 4), nn.Parameter(torch.ones(3, 4))
    options = delayed(module, "1.weight", until=outside)
    net = DistributedDataParallel(module, process_group=dist.new_group(), **options)
    net._ddp_state.core.exchanges_alone = True
    train_step(net, outside * 1)
    with struck(AllReduce, "launch", 1):  # of the delayed bucket
        train_step(net, outside * 1)
    with pytest.raises(RuntimeError, match=REFUSED):
        net.reduce_gradients()
