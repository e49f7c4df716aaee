"""Modules with collectives of their own, in the forward and in the backward."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from differential.hostile.program import NetworkSpec


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


class Exchanged(torch.autograd.Function):
    """Rows of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        rows = torch.empty_like(x)
        dist.all_to_all_single(rows, x.contiguous())
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return Exchanged.forward(ctx, gradient)


COLLECTIVES = {"all-reduce": Centered, "all-to-all": Exchanged}


class Layer(nn.Module):
    """Two layers, of which each rank may leave out one, a collective, and a layer behind it."""

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__()
        self.spec = spec
        self.branches = nn.ModuleList(nn.Linear(spec.width, spec.width) for _ in range(2))
        self.behind = nn.Linear(spec.width, spec.width)

    def forward(self, x: Tensor) -> Tensor:
        left_out = int(torch.randint(3, (), device="cpu")) if self.spec.branches else 2
        taken = [branch(x) for number, branch in enumerate(self.branches) if number != left_out]
        return self.behind(COLLECTIVES[self.spec.collective].apply(torch.stack(taken).sum(0)))
