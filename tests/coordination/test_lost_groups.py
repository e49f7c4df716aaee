"""Process groups that were destroyed, and others in their place."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from distributed import gather, ranks
from modules import linears
from torch import nn
from training import assert_gradients_alike, drawn, gradients, train_step

from tritonddp import DistributedDataParallel
from tritonddp._torch import store_of

OPTIONS = pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"compression": "int8"}]
)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return linears(4, 64, 32, 4)


def step(net: nn.Module, seed: int, rank: int) -> None:
    train_step(net, drawn(3, 4, step=seed, rank=rank))


def assert_mean(ddp: nn.Module, seed: int, loose: bool = False) -> None:
    """Gradients are the mean of what an unwrapped copy has in this step on each rank."""
    found, alone = gradients(ddp), copy.deepcopy(ddp.module)
    rows = []
    for rank in range(2):
        step(alone, seed, rank)
        rows.append(gradients(alone))
    for grad, one, other in zip(found, *rows, strict=True):
        wanted = (one + other) / 2
        error = 0.05 * wanted.abs().max().item() if loose else 1e-5
        torch.testing.assert_close(grad, wanted, rtol=0, atol=error)


def assert_right(ddp: nn.Module, seed: int, rank: int, loose: bool = False) -> None:
    step(ddp, seed, rank)
    assert_mean(ddp, seed, loose)


@contextmanager
def without_a_default_group() -> Iterator[tuple[int, dist.Store]]:
    """Destroys the default group; there is another one afterwards, as before the test."""
    rank, store = dist.get_rank(), store_of(dist.group.WORLD)
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
def test_a_wrapper_outlives_its_group(rank: int, options: dict[str, object]) -> None:
    """Over gloo: the connections stay as long as a wrapper holds them, and means are right."""
    ddp = DistributedDataParallel(layers(), **options)
    loose = "compression" in options
    for seed in range(2):
        step(ddp, seed, rank)
    ddp.require_manual_backward_finalization = True
    step(ddp, 2, rank)
    with without_a_default_group():
        ddp.finalize_backward()
        ddp.require_manual_backward_finalization = False
        assert_mean(ddp, 2, loose)
        for seed in (3, 4):
            assert_right(ddp, seed, rank, loose)
        ddp.reduce_gradients()
        state = ddp.comm_state_dict()
        ddp.load_comm_state_dict(state)
        with pytest.raises(ValueError, match="Default process group has not been initialized"):
            DistributedDataParallel(layers())
    assert_gradients_alike(ddp)


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
