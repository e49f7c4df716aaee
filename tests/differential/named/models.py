"""The models of the named programs.

``microbatch`` is the loss of a microbatch that a variant adds before a backward: each rank
uses other parameters, and none uses the last ones.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """Runs the branches it is told to, each a small network, one after the other."""

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
    """Returns the branches' outputs side by side instead."""

    def forward(self, x: Tensor, names: str) -> Any:
        return {name: [self.branches[name](x)] for name in names}

    @staticmethod
    def microbatch(net: Net, rank: int) -> Tensor:
        outputs = net(batch(), "ace" if rank else "bd")
        return sum(head[0].sum() for head in outputs.values())


@dataclass
class Outputs:
    first: Tensor
    second: tuple[Tensor, ...]


class DataclassOutput(Branches):
    def forward(self, x: Tensor, names: str) -> Any:
        return Outputs(x.cos(), tuple(self.branches[name](x) for name in names))

    @staticmethod
    def microbatch(net: Net, rank: int) -> Tensor:
        return net(batch(), "ab").second[rank % 2].sum()


class Checkpointed(Branches):
    """Checkpoints each branch."""

    reentrant = True

    def forward(self, x: Tensor, names: str) -> Any:
        for name in names:
            x = x + checkpoint(self.branches[name], x, use_reentrant=self.reentrant)
        return x * 2


class CheckpointedNotReentrant(Checkpointed):
    reentrant = False


class CheckpointedLater(Checkpointed):
    """Runs as it is until ``checkpointed`` is set."""

    checkpointed = False

    def forward(self, x: Tensor, names: str) -> Any:
        return super().forward(x, names) if self.checkpointed else Branches.forward(self, x, names)


class OfBatches(nn.Module):
    """Called with a batch alone."""

    @staticmethod
    def microbatch(net: Net, rank: int) -> Tensor:
        return net(batch()).pow(2).sum()


class Experts(OfBatches):
    """A mixture of experts: each row of the batch goes to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 8)
        self.experts = nn.ModuleList(small() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        outputs = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            if rows.any():
                outputs = outputs.index_put((rows,), expert(x[rows]))
        return x + weight.unsqueeze(-1) * outputs


class StochasticDepth(OfBatches):
    """Skips each of its layers every other time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(small() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()) < 0.5:
                x = x + layer(x)
        return x


class Towers(nn.Module):
    """An image tower and a text tower; a batch is of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict(
            {kind: nn.Sequential(small(), nn.LayerNorm(4), small()) for kind in ("image", "text")}
        )
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, kind: str) -> Tensor:
        return self.towers[kind](x) * self.scale

    @staticmethod
    def microbatch(net: Net, rank: int) -> Tensor:
        return net(batch(), "text").pow(2).sum()


class Normalized(OfBatches):
    """BatchNorm, with statistics that are not those of the start."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))
        self.layers[1].running_mean.normal_()
        self.layers[1].running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class NormalizedAsInEval(Normalized):
    def __init__(self) -> None:
        super().__init__()
        self.eval()

    def train(self, mode: bool = True) -> NormalizedAsInEval:
        return super().train(False)  # a fine-tuned backbone often keeps its statistics like this


class Multiplied(OfBatches):
    """A buffer is a factor of the loss, so that the graph keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("factor", torch.rand(4) + 0.5)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * self.factor


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
