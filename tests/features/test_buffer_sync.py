"""Buffers travel when they change, and are at every forward what stock DDP makes of them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, gather, ranks, sequence_number
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Stock

from tritonddp import DistributedDataParallel
from tritonddp.features.buffer_sync import STEPS

LEARNT = STEPS + 1  # steps after which a forward knows what is constant
AHEAD = LEARNT + 2  # and after which nothing travels by a forward


def batch_norms() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4))


class Rotary(nn.Module):
    """Attention with rotary positions, whose tables and mask are constant."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        angles = torch.arange(6.0)[:, None] * 10.0 ** -torch.arange(4.0)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.register_buffer("mask", torch.ones(6, 6).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = (self.turned(each) for each in (q, k))
        scores = (q @ k.transpose(-1, -2)).masked_fill(~self.mask, -1e9)
        return scores.softmax(-1) @ v

    def turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)


class Odd(nn.Module):
    """Changes its buffers in forwards in all ways there are, on some ranks and in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("each", torch.zeros(3, 2).t())
        self.register_buffer("on_rank_0", torch.tensor(0))
        self.register_buffer("on_last", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("late", torch.zeros(5, dtype=torch.bfloat16))
        self.register_buffer("by_data", torch.zeros(3))
        self.register_buffer("assigned", torch.zeros(2))
        self.register_buffer("seldom", torch.zeros(2))
        self.register_buffer("constant", torch.rand(7))
        self.register_buffer("nothing", torch.empty(0, 2))
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        self.forwards += 1
        with torch.no_grad():
            self.each.add_(1 + rank)
            if rank == 0:
                self.on_rank_0 += 1
            if rank == last:
                self.on_last += 1
            if self.forwards > 20:
                self.late += 1 + rank
            self.by_data.data.add_(rank + 1)
            self.assigned = self.assigned + rank + 1
            if self.forwards % 11 == rank:
                self.seldom.fill_(self.forwards + rank)
        return self.layer(x) * self.constant[:4]


INPUTS = {batch_norms: (5, 3), Rotary: (2, 6, 8), Odd: (5, 3)}


def step(ddp: Any, x: Tensor, number: int) -> None:
    ddp(x).square().mean().backward()


def with_evaluation(ddp: Any, x: Tensor, number: int) -> None:
    step(ddp, x, number)
    if number % 5 == 0:
        ddp.eval()
        with torch.no_grad():
            for _ in range(3):
                ddp(x)
        ddp.train()
    if number % 7 == 0:
        with torch.no_grad():
            ddp(x)


def accumulated(ddp: Any, x: Tensor, number: int) -> None:
    with ddp.no_sync():
        for _ in range(number % 3):
            ddp(x).mean().backward()
    step(ddp, x, number)


def two_forwards(ddp: Any, x: Tensor, number: int) -> None:
    (ddp(x).square().mean() + ddp(x + 1).mean()).backward()


def two_at_times(ddp: Any, x: Tensor, number: int) -> None:
    (two_forwards if number % 15 > 12 else step)(ddp, x, number)


def without_backward(ddp: Any, x: Tensor, number: int) -> None:
    if number % 13 == 12:
        ddp(x)
    step(ddp, x, number)


def frozen_at_first(ddp: Any, x: Tensor, number: int) -> None:
    ddp.train(number > 16)
    step(ddp, x, number)


def evaluated_before_backward(ddp: Any, x: Tensor, number: int) -> None:
    output = ddp(x)
    with torch.no_grad():
        ddp(x + 1)
    output.square().mean().backward()


def twice(ddp: Any, x: Tensor, number: int) -> None:
    """Two reduced backwards, of which stock reduces the first: here both are."""
    output = ddp(x).square().mean()
    output.backward(retain_graph=True)
    ddp.require_backward_grad_sync = False
    output.backward()
    ddp.require_backward_grad_sync = True


def loads_early(ddp: Any, x: Tensor, number: int) -> None:
    """On all ranks, each its own, while all buffers travel by each forward."""
    if number in (1, 4):
        state = {name: each + dist.get_rank() for name, each in ddp.module.state_dict().items()}
        ddp.module.load_state_dict(state)
    step(ddp, x, number)


def loads_the_same(ddp: Any, x: Tensor, number: int) -> None:
    """All ranks load what rank 0 had."""
    if number in (15, 25):
        ddp.module.load_state_dict(gather(copy.deepcopy(ddp.module.state_dict()))[0])
    step(ddp, x, number)


PROGRAMS: list[Callable[[Any, Tensor, int], None]] = [
    *(step, with_evaluation, accumulated, two_forwards, two_at_times, without_backward),
    *(frozen_at_first, evaluated_before_backward, twice, loads_early, loads_the_same),
]


def trajectory(cls: Any, module: nn.Module, shape: Any, program: Any, steps: int) -> list[Any]:
    """The buffers at the beginning of each forward of the module."""
    ddp = cls(copy.deepcopy(module))
    seen: list[Any] = []

    def note(module: nn.Module, _: Any) -> None:
        seen.append({name: each.detach().clone() for name, each in module.named_buffers()})

    ddp.module.register_forward_pre_hook(note)
    torch.manual_seed(dist.get_rank())
    for number in range(steps):
        program(ddp, torch.randn(*shape) * (1 + dist.get_rank()) + dist.get_rank(), number)
        ddp.zero_grad()
    return seen


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("net", INPUTS, ids=lambda each: each.__name__)
@ranks(2, 3)
def test_at_every_forward_buffers_are_those_of_stock(net: Any, program: Any) -> None:
    torch.manual_seed(5)
    module = net()
    ours, stock = (
        trajectory(cls, module, INPUTS[net], program, 40)
        for cls in (DistributedDataParallel, Stock)
    )
    assert len(ours) == len(stock) >= 40
    for number, (mine, theirs) in enumerate(zip(ours, stock, strict=True)):
        for name, buffer in mine.items():
            assert_same_bits(buffer, theirs[name], f"{name} at forward {number}")
