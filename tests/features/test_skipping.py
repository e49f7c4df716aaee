"""``skip_all_reduce_unused_params``: buckets that no rank has gradients for are not sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, ranks, recorded_collectives
from torch import Tensor, nn

from tritonddp import DistributedDataParallel

VIEW = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


class Branches(nn.Module):
    """Three layers, each a bucket of its own; the last one comes first in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, inputs: Tensor, *layers: int) -> Tensor:
        for number in layers:
            inputs = self.layers[number](inputs)
        return inputs.square().sum()


def wrapped(skip: bool, view: bool = False, counts: bool = False) -> DistributedDataParallel:
    torch.manual_seed(0)
    net = DistributedDataParallel(
        Branches(),
        bucket_cap_mb=1e-4,
        gradient_as_bucket_view=view,
        skip_all_reduce_unused_params=skip,
        transport="process_group" if counts else "auto",
    )
    net(batch(), 0, 1, 2).backward()  # which tells the order
    # What is unused for the first time may yet come from an inner backward, and is sent.
    for number in range(3):
        net(batch(), number).backward()
    net.zero_grad()
    assert [bucket.names for bucket in net.reducer.buckets] == [
        [f"layers.{number}.weight"] for number in (2, 1, 0)
    ]
    return net


def batch() -> Tensor:
    return torch.full((2, 8), 1.0 + dist.get_rank())


def steps(net: DistributedDataParallel) -> tuple[list[int], list[Tensor | None]]:
    """Messages of each step, and the gradients after it."""
    sent, grads = [], []
    for number, layers in enumerate([(0, 1, 2), (1, 2), (2,), (0, 2), (0, 1), (2,), (0, 1, 2)]):
        if number == 5:  # layer 0 has a gradient of this rank alone, and 1 a stale one
            with net.no_sync():
                net(batch(), 0).backward()
        with recorded_collectives() as calls:
            net(batch(), *layers).backward()
        sent.append(calls.names.count("all_to_all_single"))
        assert len(calls) == sent[-1]
        grads += [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        if number != 4:
            net.zero_grad()
    return sent, grads


@VIEW
@ranks(2, 3)
def test_the_same_gradients_by_fewer_messages(view: bool) -> None:
    sent, grads = steps(wrapped(skip=True, view=view, counts=True))
    sent_by_all, expected = steps(wrapped(skip=False, view=view, counts=True))
    assert sent_by_all == [3] * 7
    # Layer 2 is in the first bucket, which is always sent.
    assert sent == [3, 2, 1, 2, 3, 2, 3]
    for number, (grad, want) in enumerate(zip(grads, expected, strict=True)):
        assert_same_bits(grad, want, f"gradient {number}")


@ranks(2)
def test_ranks_that_leave_out_different_buckets_get_an_error() -> None:
    net = wrapped(skip=True)
    layers = [(1, 2), (0, 2)][dist.get_rank()]
    left_out = ["layers.0.weight", "layers.1.weight"][dist.get_rank()]
    with pytest.raises(RuntimeError, match=rf"rank \d, step 5.*unused on all ranks.*{left_out}"):
        net(batch(), *layers).backward()


@ranks(2)
def test_one_rank_that_leaves_out_more_gets_an_error_as_the_others_do() -> None:
    net = wrapped(skip=True)
    layers = [(0, 1, 2), (1, 2)][dist.get_rank()]
    with pytest.raises(RuntimeError, match=r"different buckets.*leaves out: (bucket|none)"):
        net(batch(), *layers).backward()


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")


@ranks(2)
def test_a_backward_that_breaks_off_leaves_the_ranks_in_step() -> None:
    net = wrapped(skip=True)
    if dist.get_rank() == 0:
        with pytest.raises(ArithmeticError):
            net(Breaks.apply(batch().requires_grad_()), 1, 2).backward()
    else:
        net(batch(), 1, 2).backward()
    net.zero_grad()
    net(batch(), 0, 1, 2).backward()
    dist.barrier()
    assert all(param.grad.isfinite().all() for param in net.parameters())


@ranks(2)
def test_all_is_sent_on_request() -> None:
    net = wrapped(skip=True)
    net(batch(), 2).backward()
    assert net.module.layers[0].weight.grad is None
    for param in net.parameters():
        param.grad = torch.full_like(param, 1.0 + dist.get_rank())
    net.reduce_gradients()
    assert all((param.grad == 1.5).all() for param in net.parameters())
