"""Small buckets over gloo: each rank sends them directly to each other rank, which sums them."""

from typing import Any

import torch
import torch.distributed as dist
from distributed import ranks, recorded_collectives
from modules import Given
from torch import Tensor
from training import HEADER_BYTES, counted, train_step

from tritonddp import DistributedDataParallel


def reduced(ddp: DistributedDataParallel, gradient: Tensor) -> Tensor:
    train_step(ddp, gradient, loss=torch.sum)
    return ddp.module.params[0].grad


def wrapped(size: int, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(Given(size), transport="process_group", **options)
    for _ in range(3):
        reduced(ddp, torch.ones(size))
    return ddp


@ranks(2, 3, 4, views=True)
def test_small_buckets_take_one_round(view: bool) -> None:
    world_size = dist.get_world_size()
    headers = world_size * HEADER_BYTES
    most = 2**18 // (world_size - 1) ** 2 // 4 - 1 - headers
    for size, name in ((most, "all_to_all_single"), (most + 1, "all_reduce")):
        ddp = wrapped(size, gradient_as_bucket_view=view)
        with recorded_collectives() as calls, counted(ddp) as found:
            reduced(ddp, torch.ones(size))
        nbytes = 4 * (size + 1 + headers)
        assert calls.names == [name]
        assert found.collectives == 1
        assert found.wire_bytes == nbytes
        if name == "all_reduce":
            assert found.sent_bytes == -(-2 * (world_size - 1) * nbytes // world_size)
        else:
            assert found.sent_bytes == (world_size - 1) * nbytes == calls[0][1].nbytes - nbytes
