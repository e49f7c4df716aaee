"""What several programs do alike: they train a small net, and two tasks share an encoder."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn


def steps(
    ddp: nn.Module, count: int, *size: int, generator: torch.Generator | None = None
) -> Iterator[int]:
    """Steps of SGD on inputs of this rank: yields the number of each behind its backward."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    if generator is None:
        generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(count):
        optimizer.zero_grad()
        ddp(torch.randn(*size, generator=generator)).pow(2).mean().backward()
        yield step
        optimizer.step()


class Head(nn.Module):
    """A task on an encoder that it shares with another one."""

    def __init__(self, encoder: nn.Module, outputs: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(32, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.encoder(x)))
