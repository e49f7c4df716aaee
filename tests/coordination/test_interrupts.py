"""Ctrl-C in the midst of a backward: a real signal, at points where it would do harm."""

from __future__ import annotations

import contextlib
import copy
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
from distributed import assert_same_on_all_ranks, gather, ranks
from torch import nn

from tritonddp import DistributedDataParallel
from tritonddp.comm import point_to_point, quantized
from tritonddp.comm.all_reduce import AllReduce
from tritonddp.comm.run import ReductionRun
from tritonddp.coordination import collectives
from tritonddp.coordination.interrupts import Uninterrupted
from tritonddp.reducer.reducer import Reducer


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


POINTS: dict[str, tuple[Any, str, int, dict[str, Any]]] = {
    "begun": (Reducer, "announce", 0, {}),
    "first bucket issued": (AllReduce, "launch", 0, {}),
    "third bucket issued": (AllReduce, "launch", 2, {"gradient_as_bucket_view": True}),
    "last bucket issued": (AllReduce, "launch", 3, {}),
    "quantised bucket issued": (quantized, "send", 0, {"compression": "int8"}),
    "a result is there": (ReductionRun, "finish", 0, {}),
    "hooked bucket issued": (dist, "all_reduce", 1, {"hook": True}),
    "flags behind hooks issued": (collectives, "all_reduce", 0, {"hook": True}),
}


@pytest.mark.parametrize("point", list(POINTS))
@ranks(2)
def test_after_an_interrupt_in_a_backward_the_ranks_are_in_step(point: str) -> None:
    owner, name, number, options = POINTS[point]
    assert quantized.send is point_to_point.send
    hooked = options.get("hook", False)
    options = {key: value for key, value in options.items() if key != "hook"}
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    alone = copy.deepcopy(net)
    ddp = DistributedDataParallel(net, bucket_cap_mb=64 * 64 * 4 / 2**20, **options)
    if hooked:
        ddp.register_comm_hook(None, mean)

    def step(each: nn.Module, seed: int) -> None:
        each.zero_grad()
        inputs = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed + dist.get_rank()))
        each(inputs).pow(2).sum().backward()

    for seed in range(2):
        step(ddp, seed)
    assert len(ddp.reducer.buckets) == 4
    if dist.get_rank() == 1:
        with (
            handled(),
            mock.patch.object(owner, name, after(getattr(owner, name), number)),
            pytest.raises(KeyboardInterrupt),
        ):
            step(ddp, 2)
    else:
        step(ddp, 2)
    for seed in (3, 4):
        step(ddp, seed)
        step(alone, seed)
        assert_same_on_all_ranks([param.grad for param in ddp.parameters()])
        for param, own in zip(ddp.parameters(), alone.parameters(), strict=True):
            wanted = sum(gather(own.grad)) / 2
            loose = {"rtol": 0, "atol": 0.1 * wanted.abs().max().item()}
            torch.testing.assert_close(
                param.grad, wanted, **(loose if "compression" in options else {})
            )


def mean(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


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
