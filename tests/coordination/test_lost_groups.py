"""Process groups that were destroyed, and others in their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, gather, ranks
from torch import Tensor, nn

from tritonddp import DistributedDataParallel

OPTIONS = pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"compression": "int8"}]
)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 32), nn.Linear(32, 4))


def step(net: nn.Module, seed: int, rank: int) -> None:
    net.zero_grad()
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * seed + rank))
    net(inputs).pow(2).sum().backward()


def mean_of(seed: int, net: nn.Module) -> list[Tensor]:
    """What an unwrapped copy would have on each rank, averaged."""
    alone = layers()
    alone.load_state_dict({k.removeprefix("module."): v for k, v in net.state_dict().items()})
    totals = [torch.zeros_like(param) for param in alone.parameters()]
    for rank in range(2):
        step(alone, seed, rank)
        for total, param in zip(totals, alone.parameters(), strict=True):
            assert param.grad is not None
            total += param.grad / 2
    return totals


def assert_right(ddp: nn.Module, seed: int, rank: int, loose: bool = False) -> None:
    step(ddp, seed, rank)
    for param, wanted in zip(ddp.parameters(), mean_of(seed, ddp), strict=True):
        error = 0.05 * wanted.abs().max().item() if loose else 1e-5
        torch.testing.assert_close(param.grad, wanted, rtol=0, atol=error)


@contextmanager
def without_a_default_group() -> Iterator[tuple[int, dist.Store]]:
    """Destroys the default group; there is another one afterwards, as before the test."""
    rank, store = dist.get_rank(), dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    dist.barrier()
    dist.destroy_process_group()
    yield rank, store
    if not dist.is_initialized():
        initialize(rank, dist.PrefixStore("afterwards", store))


def initialize(rank: int, store: dist.Store) -> None:
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )


@OPTIONS
@ranks(2)
def test_a_wrapper_outlives_its_group(options: dict[str, object]) -> None:
    """Over gloo: the connections stay as long as a wrapper holds them, and means are right."""
    ddp = DistributedDataParallel(layers(), **options)
    loose = "compression" in options
    rank = dist.get_rank()
    for seed in range(2):
        step(ddp, seed, rank)
    ddp.require_manual_backward_finalization = True
    step(ddp, 2, rank)
    with without_a_default_group():
        ddp.finalize_backward()
        ddp.require_manual_backward_finalization = False
        for param, wanted in zip(ddp.parameters(), mean_of(2, ddp), strict=True):
            error = 0.05 * wanted.abs().max().item() if loose else 1e-5
            torch.testing.assert_close(param.grad, wanted, rtol=0, atol=error)
        for seed in (3, 4):
            assert_right(ddp, seed, rank, loose)
        ddp.reduce_gradients()
        state = ddp.comm_state_dict()
        ddp.load_comm_state_dict(state)
        with pytest.raises(ValueError, match="Default process group has not been initialized"):
            DistributedDataParallel(layers())
    assert_same_on_all_ranks([param.grad for param in ddp.parameters()])


@OPTIONS
@ranks(2)
def test_a_wrapper_goes_on_in_a_group_that_was_created_anew(options: dict[str, object]) -> None:
    ddp = DistributedDataParallel(layers(), **options)
    loose = "compression" in options
    rank = dist.get_rank()
    for seed in range(2):
        step(ddp, seed, rank)
    with without_a_default_group() as (rank, store):
        initialize(rank, dist.PrefixStore("anew", store))
        other = DistributedDataParallel(layers(), **options)
        ddp._update_process_group(dist.group.WORLD)
        for seed in (2, 3):
            assert_right(other, seed, rank, loose)
            assert_right(ddp, seed, rank, loose)
    # And in one of which the ranks have other numbers.
    ddp._update_process_group(dist.new_group([1, 0]))
    for seed in (4, 5):
        assert_right(ddp, seed, rank, loose)
    assert len({*gather(ddp.reducer.counters.reductions)}) == 1
