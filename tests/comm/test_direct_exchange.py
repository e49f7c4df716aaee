"""Small buckets over gloo go to each other rank directly, and are added up there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, assert_same_on_all_ranks, ranks, recorded_collectives
from torch import Tensor, nn

from tritonddp import DistributedDataParallel
from tritonddp.coordination.agreement import BYTES as HEADER_BYTES

VIEW = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
WIRE = pytest.mark.parametrize("wire", [None, torch.bfloat16, torch.float16], ids=str)


class Vector(nn.Module):
    """Its gradient is whatever the forward is given."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.vector * gradient).sum()


def reduced(ddp: DistributedDataParallel, gradient: Tensor) -> Tensor:
    ddp.zero_grad()
    ddp(gradient).backward()
    return ddp.module.vector.grad


def wrapped(size: int, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(Vector(size), transport="process_group", **options)
    for _ in range(3):
        reduced(ddp, torch.ones(size))
    return ddp


@VIEW
@ranks(2, 3, 4)
def test_small_buckets_take_one_round(view: bool) -> None:
    world_size = dist.get_world_size()
    headers = world_size * HEADER_BYTES
    most = 2**18 // (world_size - 1) ** 2 // 4 - 1 - headers
    for size, name in ((most, "all_to_all_single"), (most + 1, "all_reduce")):
        ddp = wrapped(size, gradient_as_bucket_view=view)
        before = copy.copy(ddp.reducer.counters)
        with recorded_collectives() as calls:
            reduced(ddp, torch.ones(size))
        after, nbytes = ddp.reducer.counters, 4 * (size + 1 + headers)
        assert calls.names == [name]
        assert after.collectives - before.collectives == 1
        assert after.wire_bytes - before.wire_bytes == nbytes
        sent = after.sent_bytes - before.sent_bytes
        if name == "all_reduce":
            assert sent == -(-2 * (world_size - 1) * nbytes // world_size)
        else:
            assert sent == (world_size - 1) * nbytes == calls[0][1].nbytes - nbytes


@VIEW
@WIRE
@ranks(2, 3)
def test_the_sum_is_in_the_order_of_the_ranks(wire: torch.dtype | None, view: bool) -> None:
    """So all have the same bits, also where rounding or NaN depend on the order."""
    size, world_size = 1000, dist.get_world_size()
    ddp = wrapped(size, gradient_as_bucket_view=view, reduce_dtype=wire)
    each = [
        torch.randn(size, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (3 * rank)
        for rank in range(world_size)
    ]
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


@ranks(3)
def test_groups_of_some_ranks_and_large_ones_side_by_side() -> None:
    """Buckets of both kinds in one backward, in a group that is not the default one."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return
    module = nn.ModuleList([Vector(10), Vector(300_000)])
    module.forward = lambda gradients: sum(m(g) for m, g in zip(module, gradients, strict=True))
    ddp = DistributedDataParallel(
        module, process_group=group, bucket_cap_mb_list=[0.5, 0.5], transport="process_group"
    )
    mine = 1.0 + dist.get_rank()
    with recorded_collectives() as calls:
        for _ in range(4):
            ddp.zero_grad()
            ddp([torch.full((10,), mine), torch.full((300_000,), 10 * mine)]).backward()
    assert calls.names[-2:] in (
        ["all_reduce", "all_to_all_single"],
        ["all_to_all_single", "all_reduce"],
    )
    assert torch.equal(module[0].vector.grad, torch.full((10,), 2.0))
    assert torch.equal(module[1].vector.grad, torch.full((300_000,), 20.0))


@ranks(2)
def test_a_group_of_another_kind_reduces() -> None:
    """One that is written in Python may have nothing but an all-reduce."""

    class Forwarding(dist.ProcessGroup):
        def __init__(self) -> None:
            super().__init__(dist.get_rank(), dist.get_world_size())

        def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
            return dist.group.WORLD.allreduce(tensors, options)

        def allgather(self, outputs: Any, inputs: Any, options: Any) -> Any:
            return dist.group.WORLD.allgather(outputs, inputs, options)

        def broadcast(self, tensors: Any, options: Any) -> Any:
            return dist.group.WORLD.broadcast(tensors, options)

        def getBackendName(self) -> str:
            return "gloo"

    ddp = DistributedDataParallel(Vector(10), process_group=Forwarding())
    for _ in range(3):
        grad = reduced(ddp, torch.full((10,), 1.0 + dist.get_rank()))
    assert torch.equal(grad, torch.full((10,), 1.5))
