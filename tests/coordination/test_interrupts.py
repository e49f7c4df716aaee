"""Ctrl-C in the midst of a backward: a real signal, at points where it would do harm."""

import contextlib
import copy
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from modules import linears
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from training import assert_close, assert_mean_of, breaking_off, drawn, raises_if, train_step

from tritonddp import DistributedDataParallel
from tritonddp.buckets.sparse_bucket import SparseBucket
from tritonddp.comm.all_reduce import DirectSum
from tritonddp.comm.host.memory_exchange import MemoryExchange
from tritonddp.comm.reduction import Reduction
from tritonddp.coordination import collectives
from tritonddp.coordination.interrupts import Uninterrupted
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


PROCESS_GROUP, VIEWS = {"transport": "process_group"}, {"gradient_as_bucket_view": True}
POINTS: dict[str, tuple[Any, str, int, dict[str, Any]]] = {
    "begun": (Reduction, "_announce", 0, {}),
    "first bucket issued": (DirectSum, "launch", 0, PROCESS_GROUP),
    "third bucket issued": (DirectSum, "launch", 2, PROCESS_GROUP | VIEWS),
    "last bucket issued": (DirectSum, "launch", 3, PROCESS_GROUP),
    "first bucket packed": (MemoryExchange, "launch", 0, VIEWS),
    "last bucket packed": (MemoryExchange, "launch", 3, {}),
    "quantised bucket issued": (collectives, "send", 0, {"compression": "int8"}),
    "a result is there": (Reduction, "finish", 0, {}),
    "hooked bucket issued": (dist, "all_reduce", 1, {"hook": True}),
    "flags behind hooks issued": (collectives, "all_reduce", 0, {"hook": True}),
}


@pytest.mark.parametrize("point", list(POINTS))
@ranks(2)
def test_after_an_interrupt_in_a_backward_the_ranks_are_in_step(rank: int, point: str) -> None:
    owner, name, number, options = POINTS[point]
    options = dict(options)
    hooked = options.pop("hook", False)
    torch.manual_seed(0)
    net = linears(64, 64, 64, 64, 64, bias=False)
    alone = copy.deepcopy(net)
    ddp = DistributedDataParallel(net, bucket_cap_mb=64 * 64 * 4 / 2**20, **options)
    if hooked:
        ddp.register_comm_hook(None, allreduce_hook)

    def step(each: nn.Module, seed: int) -> None:
        train_step(each, drawn(3, 64, step=seed))

    for seed in range(2):
        step(ddp, seed)
    assert len(ddp.reducer.buckets) == 4
    call = getattr(owner, name)
    struck = mock.patch.object(owner, name, after(call, number) if rank == 1 else call)
    with handled(), struck, raises_if(rank == 1, KeyboardInterrupt):
        step(ddp, 2)
    for seed in (3, 4):
        step(ddp, seed)
        step(alone, seed)
        assert_mean_of(ddp, alone, within=0.1 if "compression" in options else 0.0)


IN_STEP = logging.getLogger("tritonddp.in_step")
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


class Tables(nn.Module):
    """Two tables with sparse gradients in front of a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4, sparse=True)
        self.more = nn.Embedding(8, 4, sparse=True)
        self.last = nn.Linear(4, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.words(rows) * self.more(rows + 1)).square().sum()


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("table", [0, 1])
@ranks(2)
def test_rows_that_have_come_when_an_interrupt_does_are_not_exchanged_again(
    rank: int, table: int, place: str
) -> None:
    ddp = DistributedDataParallel(Tables().double())
    alone = copy.deepcopy(ddp.module)
    unpack = SparseBucket.unpack
    calls = iter(range(1_000))

    def interrupted(*args: Any) -> None:
        is_it = next(calls) == table
        if is_it and place == "before":
            interrupt()
        unpack(*args)
        if is_it and place == "behind":
            interrupt()

    for step in range(5):
        rows = [torch.tensor([step, step + number]) for number in range(2)]
        alone.zero_grad()
        for each in rows:
            (alone(each) / 2).backward()
        is_struck = step == 2 and rank == 1
        with (
            handled(),
            mock.patch.object(SparseBucket, "unpack", interrupted if is_struck else unpack),
            raises_if(is_struck, KeyboardInterrupt),
        ):
            train_step(ddp, rows[rank], loss=torch.sum)
        if not is_struck:
            dense = [[param.grad.to_dense() for param in net.parameters()] for net in (ddp, alone)]
            assert_close(*dense, f"step {step}")


def test_an_interrupt_waits_for_the_end_and_a_second_one_does_not() -> None:
    ended = []

    def inside(times: int) -> None:
        with Uninterrupted():
            for _ in range(times):
                interrupt()
            ended.append(times)

    def twice_inside(times: int) -> None:
        with Uninterrupted():
            inside(times)

    with handled():
        for call in (inside, twice_inside):
            for times in (1, 2):
                with pytest.raises(KeyboardInterrupt):
                    call(times)
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert ended == [1, 1]


def test_a_second_interrupt_at_the_very_end_leaves_the_handler_of_the_user() -> None:
    former = sys.gettrace()

    def at_the_end(frame: FrameType, *_: object) -> None:
        if frame.f_code is Uninterrupted.__exit__.__code__:
            sys.settrace(former)
            interrupt()

    def inside() -> None:
        with Uninterrupted():
            interrupt()
            sys.settrace(at_the_end)

    with handled():
        with pytest.raises(KeyboardInterrupt):
            inside()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_handler_of_the_user_is_called_and_stays() -> None:
    calls: list[int] = []
    with handled(lambda number, _: calls.append(number)):
        with Uninterrupted(), Uninterrupted():
            interrupt()
            assert calls == []
        assert calls == [signal.SIGINT]
        interrupt()
        assert calls == [signal.SIGINT] * 2
    with handled(signal.SIG_IGN):
        with Uninterrupted():
            interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_handler_that_is_set_inside_stays() -> None:
    with handled():
        with Uninterrupted():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_on_another_thread_nothing_is_changed() -> None:
    seen = []

    def look() -> None:
        with Uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    with handled():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == [signal.default_int_handler]
