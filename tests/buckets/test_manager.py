"""Buckets are rebuilt once, in the order of gradients of the first backward on rank 0."""

import copy
from typing import Any

import torch
from distributed import gather, in_rings, ranks, recorded_collectives
from modules import Layers
from training import assert_mean_of, train_step, wrap

from tritonddp import DistributedDataParallel


def layers(order: str) -> Layers:
    """Layers in this order. Gradients are ready in the reverse order."""
    return Layers("abcdef", order=order, bias=False)


def grouped(ddp: DistributedDataParallel) -> list[str]:
    """The layers of each bucket."""
    buckets = ddp.reducer.buckets
    return ["".join(name.split(".")[1] for name in bucket.names) for bucket in buckets]


def placed(ddp: DistributedDataParallel) -> str:
    """The layers in the order of the buckets."""
    return "".join(grouped(ddp))


@ranks(2, views=True)
def test_buckets_follow_the_order_of_the_first_backward_once(view: bool) -> None:
    ddp = in_rings(layers("dafbec"), bucket_cap_mb=1e-6, gradient_as_bucket_view=view)
    assert placed(ddp) == "fedcba", "the first guess is the reverse of registration"
    x = torch.randn(2, 4)
    with recorded_collectives() as calls:
        ddp(x).sum().backward()
    assert calls.names == ["all_reduce"] * 6 + ["broadcast"]
    assert calls[-1][1].numel() == 6
    assert placed(ddp) == "cebfad"
    buckets = list(ddp.reducer.buckets)
    with recorded_collectives() as calls:
        for _ in range(3):
            ddp(x, "abcdef").sum().backward()
    assert calls.names == ["all_reduce"] * 18, "no later agreement"
    # In the order of the buckets.
    assert [tensor.data_ptr() for _, tensor in calls] == [
        bucket.flat.data.data_ptr() for bucket in buckets
    ] * 3
    assert ddp.reducer.buckets == buckets
    assert ddp.reducer.counters.collectives == 6 + 1 + 18


@ranks(3, views=True)
def test_rank_0_decides_if_ranks_see_different_orders(rank: int, view: bool) -> None:
    ddp = wrap(layers(["dafbec", "abcdef", "fbcdea"][rank]), view, bucket_cap_mb=1e-6)
    alone = copy.deepcopy(ddp.module)
    for step in range(3):
        x = torch.randn(2, 4)
        for net in (alone, ddp):
            train_step(net, x, loss=torch.sum)
        assert gather(placed(ddp)) == ["cebfad"] * 3
        assert_mean_of(ddp, alone, f"step {step}")


@ranks(2)
def test_buckets_keep_the_order_of_registration_if_a_rank_has_unused_parameters(rank: int) -> None:
    ddp = DistributedDataParallel(layers(["dafbec", "eb"][rank]), bucket_cap_mb_list=[1e-6, 1e-4])
    with recorded_collectives() as calls:
        ddp(torch.randn(2, 4)).sum().backward()
    assert "broadcast" not in calls.names, "nothing is left to agree on"
    assert gather(grouped(ddp)) == [["f", "ed", "cb", "a"]] * 2, "limits count from the front"
    again = DistributedDataParallel(layers("abcdef"), bucket_cap_mb_list=[1e-6, 1e-4])
    again.load_comm_state_dict(ddp.comm_state_dict())
    assert grouped(again) == grouped(ddp)


@ranks(2)
def test_with_find_unused_parameters_buckets_are_those_of_stock() -> None:
    """Cut in the order of registration, and never rebuilt."""
    options: dict[str, Any] = {"find_unused_parameters": True, "bucket_cap_mb_list": [1e-6, 1e-4]}
    ddp = DistributedDataParallel(layers("dafbec"), **options)
    expected = ["f", "ed", "cb", "a"]
    assert grouped(ddp) == expected
    for _ in range(2):
        train_step(ddp, torch.randn(2, 4), loss=torch.sum)
        assert grouped(ddp) == expected
    static = DistributedDataParallel(layers("dafbec"), static_graph=True, **options)
    train_step(static, torch.randn(2, 4), loss=torch.sum)
    assert placed(static) == "cebfad", "stock rebuilds them then"
