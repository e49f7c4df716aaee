"""An actor and a critic share an encoder; the actor accumulates as many microbatches as a rank has.

Stock: another number of backwards under ``no_sync`` on each rank is legal, also for the wrapper
whose parameters they reach without its doing.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Head(nn.Module):
    def __init__(self, encoder: nn.Module, outputs: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(32, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.encoder(x)))


def program(DDP, record):
    rank = dist.get_rank()
    encoder = nn.Linear(16, 32)
    actor, critic = DDP(Head(encoder, 4)), DDP(Head(encoder, 1))
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.module.head.parameters()], lr=0.05)
    generator = torch.Generator().manual_seed(rank)

    def loss_of(model: nn.Module) -> Tensor:
        return model(torch.randn(8, 16, generator=generator)).pow(2).mean()

    for step in range(20):
        optimizer.zero_grad()
        with actor.no_sync():
            for _ in range(2 + rank):
                loss_of(actor).backward()
        loss_of(actor).backward()
        record.model(f"step {step}, actor", actor)
        optimizer.step()
        optimizer.zero_grad()
        loss_of(critic).backward()
        record.model(f"step {step}, critic", critic)
        optimizer.step()
