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
from torch import Tensor, nn

from tritonddp import DistributedDataParallel
from tritonddp.buckets.sparse_bucket import SparseBucket
from tritonddp.comm import quantized
from tritonddp.comm.all_reduce import AllReduce
from tritonddp.comm.peer_memory import PeerMemory
from tritonddp.comm.run import ReductionRun
from tritonddp.coordination import collectives, point_to_point
from tritonddp.coordination.interrupts import Uninterrupted
from tritonddp.reducer.readiness import ReadyTracker
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


PROCESS_GROUP, VIEWS = {"transport": "process_group"}, {"gradient_as_bucket_view": True}
POINTS: dict[str, tuple[Any, str, int, dict[str, Any]]] = {
    "begun": (Reducer, "announce", 0, {}),
    "first bucket issued": (AllReduce, "launch", 0, PROCESS_GROUP),
    "third bucket issued": (AllReduce, "launch", 2, PROCESS_GROUP | VIEWS),
    "last bucket issued": (AllReduce, "launch", 3, PROCESS_GROUP),
    "first bucket packed": (PeerMemory, "launch", 0, VIEWS),
    "last bucket packed": (PeerMemory, "launch", 3, {}),
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
    table: int, place: str
) -> None:
    torch.manual_seed(0)
    ddp, rank = DistributedDataParallel(Tables().double()), dist.get_rank()
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
        ddp.zero_grad()
        alone.zero_grad()
        rows = [torch.tensor([step, step + number]) for number in range(2)]
        for each in rows:
            (alone(each) / 2).backward()
        if step == 2 and rank == 1:
            with (
                handled(),
                mock.patch.object(SparseBucket, "unpack", interrupted),
                pytest.raises(KeyboardInterrupt),
            ):
                ddp(rows[rank]).backward()
            continue
        ddp(rows[rank]).backward()
        for param, own in zip(ddp.parameters(), alone.parameters(), strict=True):
            wanted = own.grad.to_dense()
            torch.testing.assert_close(param.grad.to_dense(), wanted, msg=f"step {step}")


class OnDemand(nn.Module):
    """Two layers, of which a step may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(4, 3)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y = self.first(x).sum()
        return y + self.second(x).sum() if both else y


class Lines:
    """For ``sys.settrace``: the lines of a function that run, and Ctrl-C in one of them.

    Args:
        function: which one.
        strikes_at: number of the line before which Ctrl-C comes, by the order in which they run.
    """

    def __init__(self, function: Callable[..., Any], strikes_at: int | None = None) -> None:
        self.seen: list[int] = []
        self._code = function.__code__
        self._strikes_at = strikes_at

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        return self._in_function if frame.f_code is self._code else None

    def _in_function(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and frame.f_lineno not in self.seen:
            if len(self.seen) == self._strikes_at:
                raise KeyboardInterrupt
            self.seen.append(frame.f_lineno)
        return self._in_function


@contextlib.contextmanager
def traced(lines: Lines) -> Iterator[None]:
    former = sys.gettrace()
    sys.settrace(lines)
    try:
        yield
    finally:
        sys.settrace(former)


@ranks(2)
def test_what_an_interrupt_leaves_half_made_is_made_again() -> None:
    """Before each line in turn of what is prepared for other layers than those of the last step."""
    ddp, rank = DistributedDataParallel(OnDemand(), bucket_cap_mb=1e-6), dist.get_rank()
    layers, prepare = ddp.module, ReadyTracker._expect

    def step(both: bool) -> None:
        ddp.zero_grad()
        ddp(torch.full((2, 4), 1.0 + rank), both).backward()

    def right_step(both: bool, where: str) -> None:
        step(both)
        for layer in (layers.first, layers.second)[: 1 + both]:
            torch.testing.assert_close(layer.weight.grad, torch.full((3, 4), 3.0), msg=where)
            torch.testing.assert_close(layer.bias.grad, torch.full((3,), 2.0), msg=where)
        assert both or layers.second.weight.grad is None, where

    for both in (True, False, False, True, False):
        right_step(both, "before any interrupt")
    with traced(lines := Lines(prepare)):
        step(True)
    assert len(lines.seen) > 5
    for number, line in enumerate(lines.seen):
        where = f"behind an interrupt before line {line}"
        right_step(False, where)
        if rank == 1:
            with pytest.raises(KeyboardInterrupt), traced(Lines(prepare, number)):
                step(True)
        else:
            step(True)
            for param in ddp.parameters():
                assert param.grad.isnan().all(), where
        for both in (bool(number % 2), True, False):
            right_step(both, where)


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
