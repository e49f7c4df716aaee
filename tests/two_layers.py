"""A model of two layers, of which a step may use one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Two(nn.Module):
    """Two layers; the second one is used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 2)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        x = self.first(x)
        return self.second(x) if both else x


def batch() -> Tensor:
    return torch.randn(4, 3) + dist.get_rank()
