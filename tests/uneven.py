"""Training with uneven inputs, inside ``join()``, and the same in one process."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from training import gradients

LR = 0.05
STOCK = {"find_unused_parameters": True}


class Net(nn.Module):
    """Has buffers, and layers that only some steps of some ranks use."""

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
    """The inputs of ``rank`` in ``step``, and the layers that they go through."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    return inputs, [number for number in range(3) if (rank + step + number) % 3]


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(*draw(rank, step)).square().sum()


def step_of(model: Any, number: int) -> None:
    """A step of this rank from gradients that were dropped."""
    model.zero_grad()
    loss_of(model, dist.get_rank(), number).backward()


class Alone:
    """The training of all ranks, played by one process."""

    def __init__(
        self,
        counts: Sequence[int],
        over_present: bool = False,
        optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
        **options: Any,
    ) -> None:
        self.nets = [net() for _ in counts]
        options = options or {"lr": LR}
        self.optimizers = [optimizer(each.parameters(), **options) for each in self.nets]
        self.counts = counts
        self.over_present = over_present
        # Gradients of each step.
        self.means: list[list[Tensor | None]] = []
        for step in range(max(counts)):
            self._step(step)

    def _step(self, step: int) -> None:
        present = [rank for rank, count in enumerate(self.counts) if step < count]
        for rank in range(len(self.counts)):
            for mine, theirs in zip(
                self.nets[rank].buffers(), self.nets[present[-1]].buffers(), strict=True
            ):
                mine.copy_(theirs)
        for rank in present:
            self.nets[rank].zero_grad()
            loss_of(self.nets[rank], rank, step).backward()
        divisor = len(present) if self.over_present else len(self.counts)
        means: list[Tensor | None] = []
        for params in zip(*(each.parameters() for each in self.nets), strict=True):
            grads = [params[r].grad for r in present if params[r].grad is not None]
            mean = sum(grads, torch.zeros_like(params[0])) / divisor if grads else None
            means.append(mean)
            for param in params:
                param.grad = mean
        for optimizer in self.optimizers:
            optimizer.step()
        self.means.append(means)

    @property
    def final(self) -> dict[str, Tensor]:
        last = max(r for r, count in enumerate(self.counts) if count == max(self.counts))
        return self.nets[last].state_dict()


def train(
    ddp: Any, count: int, context: Any, optimizer: torch.optim.Optimizer | None = None
) -> list[list[Tensor | None]]:
    """Returns the gradients of each step."""
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=LR)
    grads: list[list[Tensor | None]] = []
    with context:
        for step in range(count):
            loss_of(ddp, dist.get_rank(), step).backward()
            grads.append(gradients(ddp))
            optimizer.step()
            optimizer.zero_grad()  # so that a rank joins without gradients
    return grads


def assert_close(actual: Any, expected: Any, what: str) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=1e-11, atol=1e-11, msg=lambda text: f"{what}: {text}"
    )
