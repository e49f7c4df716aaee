"""The log records of buckets and reductions at level DEBUG."""

import logging

import torch
from distributed import ranks
from logged import logged
from modules import Layers
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

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
        )
        placed = kept.lines("buckets.manager")
        assert len(placed) == len(ddp.reducer.buckets)
        assert placed[0] == (
            f"rank {rank}, step 0: bucket 0 of {len(placed)}: 2 parameters, 42 elements, "
            "168 bytes, sent in torch.float32, on cpu: layers.unused.bias, layers.unused.weight"
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
        ddp.register_comm_hook(None, allreduce_hook)
        step(ddp)
        for what in ("is passed to", "has returned from"):
            lines = [line for line in kept.lines("comm.reduction") if f"{what} the comm" in line]
            assert len(lines) == len(sent)
