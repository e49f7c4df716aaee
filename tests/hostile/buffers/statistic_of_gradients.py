"""A statistic of gradients, a buffer by which the forward scales, is written in the backward.

By a hook, from step 20 on. Stock: rank 0's, from the next forward on.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        hidden = torch.relu(self.first(x))
        if self.forwards > 20:
            hidden.register_hook(self._note)
        return self.second(hidden) * self.scale

    def _note(self, gradient: Tensor) -> None:
        self.scale.mul_(0.9).add_(gradient.norm(), alpha=0.1)


def program(DDP, record):
    rank = dist.get_rank()
    ddp = DDP(Scaled())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for step in range(50):
        optimizer.zero_grad()
        ddp(torch.randn(8, 16, generator=generator) + rank).pow(2).mean().backward()
        record.model(f"step {step}", ddp.module)
        optimizer.step()
