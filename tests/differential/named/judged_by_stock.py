"""Programs that are correct under stock DDP and difficult for a wrapper: stock DDP is the judge.

Add a program here only if ``--kind hostile`` cannot draw it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from training import descend

from differential.named.models import Centered
from differential.named.table import program


def train(net: Any, *arguments: Any) -> None:
    net.zero_grad()
    dtype = next(net.parameters()).dtype
    net(torch.randn(8, 16, dtype=dtype), *arguments).pow(2).mean().backward()
    descend(net, 0.05)


class Block(nn.Module):
    """A layer, a collective, and a layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(Centered.apply(self.before(x)))


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 32, bias=False)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor, uses_head: bool) -> Tensor:
        x = self.blocks(self.stem(x))
        return Centered.apply(self.head(x) if uses_head else x[:, :2])


SMALL = 8600 / 2**20  # MiB: a layer of 32 x 32 in fp64


@program(model=Headed, steps=8, bucket_cap_mb=SMALL, find_unused_parameters=True)
def collective_before_the_first_gradient(net: Any, rank: int, step: int) -> None:
    """A rank does not use the head: its bucket, the first one, is sent after the first collective.

    Stock: an unused parameter counts as ready from the first gradient on.
    """
    train(net, rank == 0 or step % 3 == 0)


@program(model=lambda: nn.Linear(16, 16), reductions=0, makes_cycles=True)
def wrapped_again_with_views(net: Any, rank: int, step: int) -> None:
    """In another module; the old wrapper is in a reference cycle with its trainer."""
    task = nn.Sequential(net.module, nn.Linear(16, 2 + step).double())
    ddp = type(net)(task, gradient_as_bucket_view=True)
    ddp.trainer = [ddp]
    for _ in range(3):
        train(ddp)
