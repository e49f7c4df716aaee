"""Ranks that are at different places of their programs: an error on each, and never wrong sums."""

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from distributed import gather, give_up_after, in_rings, ranks
from modules import mlp
from oracle import in_step, one_per_rank, seed
from torch import Tensor, nn
from training import wrap

from tritonddp import DistributedDataParallel

CAP = pytest.mark.parametrize("cap", [None, 1e-4], ids=["one-bucket", "small-buckets"])


def network() -> nn.Module:
    return mlp(4, 8, 4).double()


def loss_of(net: nn.Module, rank: int, step: int) -> Tensor:
    seed(rank, step)
    return net(torch.randn(3, 4, dtype=torch.float64)).square().sum()


def check_step(ddp: DistributedDataParallel, step: int) -> None:
    """One more step, which is right."""
    ddp.zero_grad()
    alone = one_per_rank(ddp.module)
    in_step(lambda net, rank: loss_of(net, rank, step).backward(), ddp, alone, step)


def error_of(program: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as raised:
        program()
    return str(raised.value)


@CAP
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later"])
@ranks(2, 3, views=True)
def test_one_more_backward_of_a_graph_on_one_rank_is_an_error_on_all(
    rank: int, first: bool, cap: float | None, view: bool
) -> None:
    """It meets the next step of the others."""
    ddp = wrap(network(), view, bucket_cap_mb=cap)
    step = 0
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
@ranks(3, views=True)
def test_one_backward_fewer_at_the_end_is_an_error_that_names_who_is_missing(
    rank: int, view: bool
) -> None:
    group = dist.new_group()
    ddp = wrap(network(), view, bucket_cap_mb=1e-4, process_group=group)
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
def test_no_sync_on_one_rank_only_is_an_error_that_names_it(rank: int) -> None:
    group = dist.new_group()
    ddp = DistributedDataParallel(network(), process_group=group)
    check_step(ddp, 0)
    give_up_after(3, group)
    loss = loss_of(ddp, rank, 1)
    with ddp.no_sync() if rank else contextlib.nullcontext():
        text = error_of(loss.backward) if rank == 0 else loss.backward()
    said = gather(text)[0]
    assert said.startswith("rank 0, step 2, bucket 0 ('")
    assert "rank 1 (process " in said
    assert ") runs but has not reported" in said


@ranks(2, 3, views=True)
def test_a_request_that_meets_a_backward_is_an_error_on_all(rank: int, view: bool) -> None:
    """Where sizes are alike; over gloo, buckets of different size end a process."""
    ddp = in_rings(network(), gradient_as_bucket_view=view)
    check_step(ddp, 0)
    loss = loss_of(ddp, rank, 1)
    if rank == 0:
        with ddp.no_sync():
            loss.backward()
    for text in gather(error_of(loss.backward if rank else ddp.reduce_gradients)):
        assert "rank 0: reduce_gradients; rank 1: the first backward" in text
    check_step(ddp, 2)


@CAP
@ranks(2, 3, views=True)
def test_two_wrapped_modules_in_different_order_are_an_error_on_all(
    rank: int, cap: float | None, view: bool
) -> None:
    nets = [wrap(network(), view, bucket_cap_mb=cap) for _ in range(2)]
    for net in nets:
        check_step(net, 0)
    net = nets[0] if rank else nets[1]
    for text in gather(error_of(loss_of(net, rank, 1).backward)):
        assert "wrapper" in text
        assert "number 0" in text
        assert "number 1" in text
    for net in nets:
        check_step(net, 1)
