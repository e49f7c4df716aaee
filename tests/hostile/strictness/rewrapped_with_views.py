"""A net with gradients as views is wrapped anew, while the old wrapper lies in a reference cycle.

A trainer holds it and is held by it. Stock: works.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Task(nn.Module):
    def __init__(self, net: nn.Module, outputs: int) -> None:
        super().__init__()
        self.net, self.head = net, nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))


class Trainer:
    def __init__(self, ddp: Any) -> None:
        self.ddp = ddp
        ddp.trainer = self


def program(DDP, record):
    net = nn.Linear(16, 16)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for phase in range(3):
        trainer = Trainer(DDP(Task(net, 2 + phase), gradient_as_bucket_view=True))
        optimizer = torch.optim.SGD(trainer.ddp.parameters(), lr=0.05)
        for step in range(8):
            optimizer.zero_grad()
            trainer.ddp(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
            record.model(f"phase {phase}, step {step}", trainer.ddp.module)
            optimizer.step()
