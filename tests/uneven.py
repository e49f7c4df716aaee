"""Training with uneven inputs, inside ``join()``, and the same in one process."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

LR = 0.05
CLOSE = {"rtol": 1e-11, "atol": 1e-11}
STOCK = {"find_unused_parameters": True}


class Net(nn.Module):
    """A model with buffers, and with layers that only some ranks use in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.BatchNorm1d(4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, 2)
        self.never = nn.Linear(4, 2)

    def forward(self, inputs: Tensor, uses: Sequence[int] = (0, 1, 2)) -> Tensor:
        hidden = self.norm(inputs)
        for number in uses:
            hidden = hidden + self.layers[number](hidden).tanh()
        return self.last(hidden)


def net() -> nn.Module:
    return Net().double()


def draw(rank: int, step: int) -> tuple[Tensor, list[int]]:
    """The inputs of ``rank`` in ``step``, and the layers that the rank uses."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    return inputs, [number for number in range(3) if (rank + step + number) % 3]


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(*draw(rank, step)).square().sum()


def step_of(model: Any, number: int) -> None:
    """A step of this rank, after ``zero_grad()``."""
    model.zero_grad()
    loss_of(model, dist.get_rank(), number).backward()


def trained_alone(
    counts: Sequence[int],
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    **options: Any,
) -> nn.Module:
    """Train the models of all ranks in one process, and return the model with the most steps.

    Args:
        counts: the number of steps of each rank.
    """
    nets = [net() for _ in counts]
    optimizers = [optimizer(each.parameters(), **(options or {"lr": LR})) for each in nets]
    for step in range(max(counts)):
        present = [rank for rank, count in enumerate(counts) if step < count]
        for each in nets:
            for mine, theirs in zip(each.buffers(), nets[present[-1]].buffers(), strict=True):
                mine.copy_(theirs)
        for rank in present:
            nets[rank].zero_grad()
            loss_of(nets[rank], rank, step).backward()
        for params in zip(*(each.parameters() for each in nets), strict=True):
            grads = [params[rank].grad for rank in present if params[rank].grad is not None]
            mean = sum(grads, torch.zeros_like(params[0])) / len(params) if grads else None
            for param in params:
                param.grad = mean
        for each in optimizers:
            each.step()
    return nets[max(rank for rank, count in enumerate(counts) if count == max(counts))]


def train(
    ddp: Any, count: int, context: Any, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Train ``count`` steps in the context."""
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=LR)
    with context:
        for step in range(count):
            loss_of(ddp, dist.get_rank(), step).backward()
            optimizer.step()
            optimizer.zero_grad()  # so that a rank has no gradients at the end of its inputs
