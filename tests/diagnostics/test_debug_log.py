"""The texts of log records at levels DEBUG and WARNING."""

import logging

import pytest
import torch
from distributed import ranks
from logged import logged
from modules import Layers
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from training import breaking_off

from tritonddp import DistributedDataParallel


def net(layers: int = 4) -> Layers:
    """The last layer is unused."""
    names = [str(number) for number in range(layers)]
    return Layers([*names, "unused"], 6, order=names)


def step(ddp: nn.Module) -> None:
    ddp(torch.randn(3, 6)).square().mean().backward()


@ranks(2)
def test_records_of_buckets_and_reductions(rank: int) -> None:
    with logged(logging.DEBUG) as kept:
        ddp = DistributedDataParallel(
            net(),
            bucket_cap_mb=1e-4,
            skip_all_reduce_unused_params=True,
            reduce_dtype=torch.bfloat16,
        )
        placed = kept.lines("buckets.manager")
        assert len(placed) == len(ddp.reducer.buckets)
        assert placed[0] == (
            f"rank {rank}, step 0: bucket 0 of {len(placed)}: 2 parameters, 42 elements, "
            "168 bytes, sent in torch.bfloat16, on cpu: layers.unused.bias, layers.unused.weight"
        )
        for _ in range(3):
            kept.records.clear()
            step(ddp)
        (begins,) = [line for line in kept.lines("comm.reduction") if "starts" in line]
        unused = [bucket.index for bucket in ddp.reducer.buckets if "unused" in bucket.names[0]]
        assert begins.startswith(
            f"rank {rank}, step 3: reduction starts: the first backward through a forward, no wei"
        )
        assert begins.endswith(f"skipped buckets: {unused}")
        of_buckets = kept.lines("comm.reduction")
        sent = [bucket for bucket in ddp.reducer.buckets if bucket.index not in unused]
        for what in ("is sent", "is reduced"):
            assert [line for line in of_buckets if what in line] == [
                f"rank {rank}, step 3, {bucket.title}: {what}, {bucket.nbytes} bytes"
                for bucket in sent
            ]
        kept.records.clear()
        with ddp.weighted(rank + 2):
            step(ddp)
        assert f"weight {rank + 2}, parameter hash" in kept.lines("comm.reduction")[0]


@ranks(2)
def test_records_of_communication_hooks_and_rebuilt_buckets(rank: int) -> None:
    ddp = DistributedDataParallel(net(), bucket_cap_mb=3e-4)
    ddp.register_comm_hook(None, allreduce_hook)
    with logged(logging.DEBUG) as kept:
        step(ddp)
        assert kept.lines("buckets.manager")[-1].startswith(f"rank {rank}, step 1: bucket ")
        lines = kept.lines("comm.reduction")
        count = len(kept.lines("buckets.manager"))
        assert sum("is passed to the communication hook" in line for line in lines) == count
        assert sum("has returned from the communication hook" in line for line in lines) == count


@ranks(2)
def test_a_warning_after_a_failed_backward(rank: int) -> None:
    def fails(*_: object) -> torch.futures.Future[torch.Tensor]:
        raise ZeroDivisionError

    ddp = DistributedDataParallel(net(), bucket_cap_mb=3e-4)
    with logged(logging.WARNING) as kept:
        with breaking_off(ddp.module.layers["0"].weight):
            step(ddp)
        step(ddp)
        text = f"rank {rank}, step 1: the previous backward failed. On ranks whose"
        assert kept.lines("reducer.reducer")[-1].startswith(text)
        kept.records.clear()
        ddp.register_comm_hook(None, fails)
        with pytest.raises(RuntimeError, match="hook failed"):
            step(ddp)
        ddp.check_sync()
        (line,) = kept.lines("reducer.reducer")
        assert line == f"rank {rank}, step 3: the previous backward failed"
