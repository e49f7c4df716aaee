"""A residual denoiser: ``backward(inputs=[x])`` first, then the backward that trains.

Adversarial training, with ``find_unused_parameters=False`` said. Stock: the first one reaches no
parameter, and misses none.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.noise(x)


def program(DDP, record):
    ddp = DDP(Denoiser(), find_unused_parameters=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(24):
        clean = torch.randn(8, 16, generator=generator)
        x = (clean + 0.1).requires_grad_()
        (ddp(x) - clean).pow(2).mean().backward(inputs=[x])
        record(f"step {step}, gradient of the input", x.grad)
        worse = (x + 0.1 * x.grad.sign()).detach()
        optimizer.zero_grad()
        (ddp(worse) - clean).pow(2).mean().backward()
        record.model(f"step {step}", ddp.module)
        optimizer.step()
