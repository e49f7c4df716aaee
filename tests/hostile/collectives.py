"""Modules that make collectives of their own in the backward, in the group of the buckets."""

import os
from unittest.mock import patch

import torch
import torch.distributed as dist
from differential.networks import Centered
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hostile.table import program


class LikeABucket(torch.autograd.Function):
    """Sums as many elements in the backward as a bucket has, most of them zero."""

    @staticmethod
    def forward(ctx, x, size):
        ctx.size = size
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        mean = torch.zeros(ctx.size)
        mean[: gradient.shape[1]] = gradient.mean(0)
        dist.all_reduce(mean)
        return gradient - mean[: gradient.shape[1]] / dist.get_world_size(), None


class Block(nn.Module):
    """A layer, a collective, and a layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.behind(Centered.apply(self.before(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 32, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor, uses_head: bool) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return Centered.apply(self.head(x) if uses_head else x[:, :2])


def _train(DDP, record, net, arguments_of, **options):
    """Train with small buckets through the process group; ``arguments_of`` a step of its call."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    with patch.dict(os.environ, TRITONDDP_PEER_MEMORY="0"):
        ddp = DDP(net, bucket_cap_mb=4300 / 2**20, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(12):
        optimizer.zero_grad()
        x = torch.randn(8, 16, generator=generator)
        ddp(x, **arguments_of(step)).pow(2).mean().backward()
        record.model(f"step {step}", net)
        optimizer.step()


@program()
def a_collective_before_the_first_gradient(DDP, record):
    """A rank leaves the head out: its bucket, the first one, leaves behind the first collective.

    Stock: a parameter that is unused counts as there from the first gradient on.
    """
    rank = dist.get_rank()
    _train(
        DDP,
        record,
        Net(),
        lambda step: {"uses_head": not rank or step % 3 == 0},
        find_unused_parameters=True,
    )


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor, is_scaled: bool) -> Tensor:
        x = self.second(LikeABucket.apply(self.first(x), 1120))
        return x * self.scale if is_scaled else x


@program()
def unused_from_a_later_step_on(DDP, record):
    """Beside a collective of as many elements as a bucket, which would go unnoticed in its place.

    Stock: right with its flag.
    """
    rank = dist.get_rank()
    _train(
        DDP,
        record,
        Scaled(),
        lambda step: {"is_scaled": step < 4 or rank == 0},
        find_unused_parameters=True,
    )


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor, recomputes: bool) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            y = checkpoint(layer, x, use_reentrant=True) if recomputes else layer(x)
            x = Centered.apply(x + y.tanh())
        return x


@program()
def reentrant_checkpoints_from_a_later_step_on(DDP, record):
    """Every parameter is used. Stock: right without its flag."""
    _train(DDP, record, Checkpointed(), lambda step: {"recomputes": step >= 5})
