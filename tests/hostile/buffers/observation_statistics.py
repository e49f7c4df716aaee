"""PPO: 20 updates for each rollout, whose statistics of observations, buffers, each rank computes.

Stock: rank 0's count, from the first update of a rollout on.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("variance", torch.ones(16))
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    def observe(self, observations: Tensor) -> None:
        self.mean.lerp_(observations.mean(0), 0.3)
        self.variance.lerp_(observations.var(0), 0.3)

    def forward(self, observations: Tensor) -> Tensor:
        return self.net((observations - self.mean) / self.variance.sqrt())


def program(DDP, record):
    rank = dist.get_rank()
    ddp = DDP(Policy())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for rollout in range(4):
        observations = torch.randn(160, 16, generator=generator) * (1 + rank) + rank
        ddp.module.observe(observations)
        for number, batch in enumerate(observations.chunk(20)):
            optimizer.zero_grad()
            ddp(batch).pow(2).mean().backward()
            record.model(f"rollout {rollout}, update {number}", ddp.module)
            optimizer.step()
