"""Which backwards are reduced: as torch documents ``no_sync``, and microbatch by microbatch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Stock

from tritonddp import DistributedDataParallel

Microbatch = Callable[[Any, Tensor], None]


def reduced(ddp: Any, x: Tensor) -> None:
    ddp(x).square().sum().backward()


def forward_and_backward_inside(ddp: Any, x: Tensor) -> None:
    with ddp.no_sync():
        ddp(x).square().sum().backward()


def forward_inside(ddp: Any, x: Tensor) -> None:
    """As mmengine's ``optim_context``."""
    with ddp.no_sync():
        loss = ddp(x).square().sum()
    loss.backward()


def prepared(ddp: Any, x: Tensor) -> None:
    with ddp.no_sync():
        loss = ddp(x).square().sum()
    ddp.reducer.prepare_for_backward([])
    loss.backward()


def prepared_inside(ddp: Any, x: Tensor) -> None:
    with ddp.no_sync():
        loss = ddp(x).square().sum()
        ddp.reducer.prepare_for_backward([])
        loss.backward()


def triggered(ddp: Any, x: Tensor) -> None:
    """As Accelerate's ``trigger_sync_in_backward``."""
    with ddp.no_sync():
        loss = ddp(x).square().sum()
    before = ddp.require_backward_grad_sync
    ddp.require_backward_grad_sync = True
    ddp.reducer.prepare_for_backward([])
    loss.backward()
    ddp.require_backward_grad_sync = before


def two_forwards_inside(ddp: Any, x: Tensor) -> None:
    with ddp.no_sync():
        loss = ddp(x).square().sum() + ddp(x + 1).sum()
    loss.backward()


def flag_set_by_hand(ddp: Any, x: Tensor) -> None:
    """The flag is off in the forward, and on again when the backward starts."""
    ddp.require_backward_grad_sync = False
    loss = ddp(x).square().sum()
    ddp.require_backward_grad_sync = True
    loss.backward()


WINDOWS: dict[str, tuple[list[Microbatch], int]] = {
    "forward and backward inside": ([forward_and_backward_inside] * 2 + [reduced], 1),
    "forward inside": ([forward_inside] * 2 + [reduced], 1),
    "forced": ([forward_inside, prepared], 1),
    "forced inside": ([forward_inside, prepared_inside, forward_inside, reduced], 2),
    "forced as Accelerate does": ([forward_and_backward_inside, triggered], 1),
    "not forced any more": ([prepared, forward_inside, reduced], 2),
    "two forwards": ([two_forwards_inside, reduced], 1),
    "flag": ([flag_set_by_hand, reduced], 1),
    "mixed": ([forward_inside, reduced, flag_set_by_hand, triggered, forward_inside, reduced], 3),
}


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("name", WINDOWS)
@ranks(2)
def test_after_each_microbatch_gradients_are_those_of_stock(name: str, view: bool) -> None:
    window, reductions = WINDOWS[name]
    seen: list[list[Tensor]] = []
    for kind in (Stock, DistributedDataParallel):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        ddp = kind(net, gradient_as_bucket_view=view)
        generator = torch.Generator().manual_seed(dist.get_rank())
        seen.append([])
        for step in range(3):
            for microbatch in window:
                microbatch(ddp, torch.randn(5, 4, generator=generator))
                seen[-1] += [param.grad.clone() for param in net.parameters()]
            if kind is DistributedDataParallel:
                assert ddp.reducer.counters.reductions == reductions * (step + 1)
            ddp.zero_grad()
    for theirs, mine in zip(*seen, strict=True):
        assert_same_bits(mine, theirs, name)


@ranks(2)
def test_no_sync_around_the_backward_alone_is_local() -> None:
    """Stock reduces it."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    loss = ddp(torch.full((1, 2), 1.0 + dist.get_rank())).sum()
    with ddp.no_sync():
        loss.backward(retain_graph=True)
    assert ddp.reducer.counters.reductions == 0
    assert ddp.module.weight.grad.tolist() == [[1.0 + dist.get_rank()] * 2]
    loss.backward()
    assert ddp.reducer.counters.reductions == 1
    assert ddp.module.weight.grad.tolist() == [[3.0] * 2]


@ranks(2)
def test_the_latest_of_several_forwards_decides() -> None:
    for first, second, reductions in ((True, False, 0), (False, True, 1)):
        ddp = DistributedDataParallel(nn.Linear(2, 1))
        losses = []
        for syncs in (first, second):
            with contextlib.nullcontext() if syncs else ddp.no_sync():
                losses.append(ddp(torch.ones(1, 2)).sum())
        sum(losses).backward()
        assert ddp.reducer.counters.reductions == reductions
        reduced(ddp, torch.ones(1, 2))


@ranks(2)
def test_a_backward_through_no_output_goes_by_the_moment_it_starts() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    with ddp.no_sync():
        ddp(torch.ones(1, 2))
        loss = ddp.module.weight.square().sum()
    loss.backward()
    assert ddp.reducer.counters.reductions == 1
    with ddp.no_sync():
        ddp.module.weight.square().sum().backward()
    assert ddp.reducer.counters.reductions == 1


@ranks(2)
def test_a_window_of_eight_is_reduced_once_where_only_the_forwards_are_inside() -> None:
    """mmengine's loop with ``accumulative_counts=8``: 160 microbatches in 20 windows."""
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    for number in range(160):
        is_last = number % 8 == 7
        with contextlib.nullcontext() if is_last else ddp.no_sync():
            loss = ddp(torch.ones(1, 2)).sum()
        loss.backward()
        if is_last:
            ddp.zero_grad()
    assert ddp.reducer.counters.reductions == 20
