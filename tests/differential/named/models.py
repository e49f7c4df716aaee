"""The models of the named programs.

``microbatch`` is the loss of a microbatch that a variant adds before a backward: each rank
uses other parameters, and none uses the last ones.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from oracle import Net
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def batch(requires_grad: bool = True) -> Tensor:
    return torch.randn(3, 4, dtype=torch.float64, requires_grad=requires_grad)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


class Branches(nn.Module):
    """Runs the given branches, each a small network, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({name: small() for name in "abcdef"})

    def forward(self, x: Tensor, names: str) -> Any:
        for name in names:
            x = x + self.branches[name](x)
        return x * 2

    @staticmethod
    def microbatch(net: Net, rank: int) -> Tensor:
        return net(batch(), "ace" if rank else "bd").sum()


class Heads(Branches):
    """Returns a dict of the outputs of the branches."""

    def forward(self, x: Tensor, names: str) -> Any:
        return {name: [self.branches[name](x)] for name in names}

    @staticmethod
    def microbatch(net: Net, rank: int) -> Tensor:
        outputs = net(batch(), "ace" if rank else "bd")
        return sum(head[0].sum() for head in outputs.values())


class Checkpointed(Branches):
    """Checkpoints each branch."""

    reentrant = True

    def forward(self, x: Tensor, names: str) -> Any:
        for name in names:
            x = x + checkpoint(self.branches[name], x, use_reentrant=self.reentrant)
        return x * 2


class OfBatches(nn.Module):
    """Called with a batch alone."""

    @staticmethod
    def microbatch(net: Net, rank: int) -> Tensor:
        return net(batch()).pow(2).sum()


class Normalized(OfBatches):
    """BatchNorm, with other statistics than at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))
        self.layers[1].running_mean.normal_()
        self.layers[1].running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Centered(torch.autograd.Function):
    """Minus the mean over the batches of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        mean = x.mean(0)
        dist.all_reduce(mean)
        return x - mean / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return Centered.forward(ctx, gradient)


def branch(net: Net, name: str) -> nn.Module:
    return net.module.branches[name]


def samples(count: int) -> Tensor:
    return torch.randn(count, 4, dtype=torch.float64)
