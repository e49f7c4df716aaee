"""The module is wrapped anew, while rank 0 alone (its logger, say) still holds the old wrapper.

Stock: the old one has nothing to do with forwards of the new one.
"""

import torch
import torch.distributed as dist
from torch import nn


def program(DDP, record):
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    generator = torch.Generator().manual_seed(rank)
    watched = []
    for phase in range(2):
        ddp = DDP(net)
        if rank == 0:
            watched.append(ddp)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        for step in range(10):
            optimizer.zero_grad()
            ddp(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
            record.model(f"phase {phase}, step {step}", net)
            optimizer.step()
