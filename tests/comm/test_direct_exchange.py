"""Small buckets over gloo: each rank sends them directly to each other rank, which sums them."""

from typing import Any

import torch
import torch.distributed as dist
from distributed import ranks, recorded_collectives
from modules import Squares
from training import HEADER_BYTES, counted, train_step

from tritonddp import DistributedDataParallel


@ranks(2, 3, 4, views=True)
def test_small_buckets_take_one_round(view: bool) -> None:
    world_size = dist.get_world_size()
    headers = world_size * HEADER_BYTES
    most = 2**18 // (world_size - 1) ** 2 // 4 - 1 - headers
    options: dict[str, Any] = {"transport": "process_group", "gradient_as_bucket_view": view}
    for size, name in ((most, "all_to_all_single"), (most + 1, "all_reduce")):
        ddp = DistributedDataParallel(Squares(size), **options)
        for _ in range(4):
            with recorded_collectives() as calls, counted(ddp) as found:
                train_step(ddp, loss=torch.sum)
        nbytes = 4 * (size + 1 + headers)
        assert calls.names == [name]
        assert found.collectives == 1
        assert found.wire_bytes == nbytes
        if name == "all_reduce":
            assert found.sent_bytes == -(-2 * (world_size - 1) * nbytes // world_size)
        else:
            assert found.sent_bytes == (world_size - 1) * nbytes == calls[0][1].nbytes - nbytes
