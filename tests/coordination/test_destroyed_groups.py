"""Process groups that are destroyed or created again: correct means, and no abort."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from launched import played
from modules import linears
from oracle import mean_over_ranks
from torch import nn
from training import assert_close, assert_gradients_alike, drawn, gradients, train_step

from tritonddp import DistributedDataParallel
from tritonddp._torch import store_of


def wrapped(**options: object) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(linears(4, 64, 32, 4), **options)


def step(net: nn.Module, seed: int, rank: int) -> None:
    train_step(net, drawn(3, 4, step=seed, rank=rank))


def assert_mean(ddp: DistributedDataParallel, seed: int) -> None:
    """Compare the gradients with the mean that each rank computes without communication."""
    alone = [copy.deepcopy(ddp.module) for _ in range(2)]
    for rank, net in enumerate(alone):
        step(net, seed, rank)
    for grad, mean in zip(gradients(ddp), mean_over_ranks(alone), strict=True):
        is_quantized = ddp._ddp_state.config.wire.compression is not None
        within = 0.05 * mean.abs().max().item() if is_quantized else 1e-5
        assert_close(grad, mean, rtol=0, atol=within)


@contextmanager
def without_a_default_group() -> Iterator[None]:
    """Context: the default group is destroyed. At the end there is a new default group."""
    rank, store = dist.get_rank(), dist.PrefixStore("afterwards", store_of(dist.group.WORLD))
    dist.barrier()
    dist.destroy_process_group()
    yield
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)


@pytest.mark.parametrize("options", [{}, {"compression": "int8"}])
@ranks(2)
def test_a_wrapper_outlives_its_group(rank: int, options: dict[str, object]) -> None:
    """Over gloo, the connections exist until the wrapper is deleted."""
    ddp = wrapped(**options)
    for seed in range(2):
        step(ddp, seed, rank)
    ddp.require_manual_backward_finalization = True
    step(ddp, 2, rank)
    with without_a_default_group():
        ddp.finalize_backward()
        ddp.require_manual_backward_finalization = False
        assert_mean(ddp, 2)
        step(ddp, 3, rank)
        assert_mean(ddp, 3)
        ddp.reduce_gradients()
        ddp.load_comm_state_dict(ddp.comm_state_dict())
        with pytest.raises(ValueError, match="Default process group has not been initialized"):
            wrapped()
    assert_gradients_alike(ddp)
    other = wrapped(**options)
    step(other, 5, rank)
    assert_mean(other, 5)


GLOBAL_WRAPPER = """
import sys, torch, torch.distributed as dist, tritonddp

dist.init_process_group("gloo")
ddp = tritonddp.DistributedDataParallel(torch.nn.Linear(2, 2))
ddp(torch.ones(1, 2)).sum().backward()
sys.setswitchinterval(60)  # this thread keeps the interpreter
found = [torch.empty(4) for _ in range(2)]
dist.all_gather(found, torch.ones(4))
dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_script_that_keeps_its_wrapper_to_its_end_does_not_abort(tmp_path: Path) -> None:
    """The wrapper, a global variable, keeps the group and its threads."""
    for _ in range(3):
        done = played(GLOBAL_WRAPPER, tmp_path, nproc=2)
        assert done.returncode == 0, done.stderr
