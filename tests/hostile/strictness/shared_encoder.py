"""An actor and a critic share an encoder, with ``find_unused_parameters=False`` said.

Stock: what the backward of one wrapper gives to parameters of the other is none of that one's
business.
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
    encoder = nn.Linear(16, 32)
    actor, critic = (
        DDP(Head(encoder, outputs), find_unused_parameters=False) for outputs in (4, 1)
    )
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.module.head.parameters()], lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        for title, model in {"actor": actor, "critic": critic}.items():
            optimizer.zero_grad()
            model(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
            record.model(f"step {step}, {title}", model)
            optimizer.step()
