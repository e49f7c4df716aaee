"""Small buckets over gloo: each rank sends them directly to each other rank, which sums them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, assert_same_on_all_ranks, ranks, recorded_collectives
from modules import Given
from torch import Tensor
from training import HEADER_BYTES, counted, drawn, train_step

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


@pytest.mark.parametrize("wire", [None, torch.bfloat16, torch.float16], ids=str)
@ranks(2, 3, views=True)
def test_the_sum_is_in_the_order_of_the_ranks(wire: torch.dtype | None, view: bool) -> None:
    """All ranks have the same bits, although rounding and NaN depend on the order."""
    size, world_size = 1000, dist.get_world_size()
    ddp = wrapped(size, gradient_as_bucket_view=view, reduce_dtype=wire)
    each = [drawn(size, rank=rank) * 10.0 ** (3 * rank) for rank in range(world_size)]
    for rank, gradient in enumerate(each):
        gradient[:2] = torch.tensor([-0.0, float("nan") if rank else 1.0])
    with recorded_collectives() as calls:
        grad = reduced(ddp, each[dist.get_rank()])
    assert calls.names == ["all_to_all_single"]
    scale = 1 / world_size
    first, *others = [(gradient * scale).to(wire or torch.float32) for gradient in each]
    for other in others:
        first = first + other
    assert_same_bits(grad, first.float(), "mean")
    assert_same_on_all_ranks(grad)
