"""Rank 0 alone makes a saliency map through ``ddp.module``.

Stock: its own affair, for no backward through the bare module is synchronised.
"""

import torch
import torch.distributed as dist
from torch import nn


def program(DDP, record):
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for step in range(20):
        x = torch.randn(8, 16, generator=generator)
        y = torch.randint(0, 4, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        record.model(f"step {step}", net)
        optimizer.step()
        if rank == 0 and step == 10:
            picture = torch.ones(2, 16, requires_grad=True)
            net(picture).max(1).values.sum().backward()
            record("saliency map", picture.grad)
            optimizer.zero_grad()
