"""Ranks that are at different places of their programs: an error on each, and never wrong sums."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from distributed import gather, give_up_after, in_rings, ranks
from oracle import assert_mean, one_per_rank, seed
from torch import Tensor, nn

from tritonddp import DistributedDataParallel

VIEW = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
CAP = pytest.mark.parametrize("cap", [None, 1e-4], ids=["one-bucket", "small-buckets"])


def network(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4)).double()


def loss_of(net: nn.Module, rank: int, step: int) -> Tensor:
    seed(rank, step)
    return net(torch.randn(3, 4, dtype=torch.float64)).square().sum()


def check_step(ddp: DistributedDataParallel, step: int) -> None:
    """One more step, which is right."""
    ddp.zero_grad()
    alone = one_per_rank(ddp.module)
    for rank, net in enumerate(alone):
        loss_of(net, rank, step).backward()
    loss_of(ddp, dist.get_rank(), step).backward()
    assert_mean(ddp, alone, f"step {step}")


def error_of(program: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as raised:
        program()
    return str(raised.value)


@VIEW
@CAP
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later"])
@ranks(2, 3)
def test_one_more_backward_of_a_graph_on_one_rank_is_an_error_on_all(
    first: bool, cap: float | None, view: bool
) -> None:
    """It meets the next step of the others."""
    ddp = DistributedDataParallel(network(), gradient_as_bucket_view=view, bucket_cap_mb=cap)
    rank, step = dist.get_rank(), 0
    if not first:
        check_step(ddp, step)
        step += 1
    ddp.zero_grad()
    loss = loss_of(ddp, rank, step)
    loss.backward(retain_graph=True)
    if rank != 1:
        loss = loss_of(ddp, rank, step + 1)
    for text in gather(error_of(loss.backward)):
        assert f"step {step + 2}, bucket 0: the ranks are at different places" in text
        assert "rank 0: the first backward through a forward; rank 1: one more backward" in text
        assert "under no_sync()" in text
    check_step(ddp, step + 2)


@pytest.mark.long
@VIEW
@ranks(3)
def test_one_backward_fewer_at_the_end_is_an_error_that_names_who_is_missing(view: bool) -> None:
    group = dist.new_group()
    ddp = DistributedDataParallel(
        network(), gradient_as_bucket_view=view, bucket_cap_mb=1e-4, process_group=group
    )
    rank = dist.get_rank()
    for step in range(2):
        check_step(ddp, step)
    give_up_after(3, group)
    text = "" if rank == 1 else error_of(loss_of(ddp, rank, 2).backward)
    for other, said in enumerate(gather(text)):
        if other != 1:
            assert said.startswith(f"rank {other}, step 3, bucket 0 ('"), said
            assert "rank 1 (process " in said
            assert ") runs but has not reported" in said


@pytest.mark.long
@ranks(2)
def test_no_sync_on_one_rank_only_is_an_error_that_names_it() -> None:
    group = dist.new_group()
    ddp = DistributedDataParallel(network(), process_group=group)
    rank = dist.get_rank()
    check_step(ddp, 0)
    give_up_after(3, group)
    loss = loss_of(ddp, rank, 1)
    with ddp.no_sync() if rank else contextlib.nullcontext():
        text = error_of(loss.backward) if rank == 0 else loss.backward()
    said = gather(text)[0]
    assert said.startswith("rank 0, step 2, bucket 0 ('")
    assert "rank 1 (process " in said
    assert ") runs but has not reported" in said


@VIEW
@ranks(2, 3)
def test_a_request_that_meets_a_backward_is_an_error_on_all(view: bool) -> None:
    """Where sizes are alike; over gloo, buckets of different size end a process."""
    ddp = in_rings(network(), gradient_as_bucket_view=view)
    rank = dist.get_rank()
    check_step(ddp, 0)
    loss = loss_of(ddp, rank, 1)
    if rank == 0:
        with ddp.no_sync():
            loss.backward()
    for text in gather(error_of(loss.backward if rank else ddp.reduce_gradients)):
        assert "rank 0: reduce_gradients; rank 1: the first backward" in text
    check_step(ddp, 2)


@VIEW
@CAP
@ranks(2, 3)
def test_two_wrapped_modules_in_different_order_are_an_error_on_all(
    cap: float | None, view: bool
) -> None:
    nets = [
        DistributedDataParallel(network(), gradient_as_bucket_view=view, bucket_cap_mb=cap)
        for _ in range(2)
    ]
    rank = dist.get_rank()
    for net in nets:
        check_step(net, 0)
    net = nets[0] if rank else nets[1]
    for text in gather(error_of(loss_of(net, rank, 1).backward)):
        assert "wrapper" in text
        assert "number 0" in text
        assert "number 1" in text
    for net in nets:
        check_step(net, 1)
