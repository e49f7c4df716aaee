"""A regulariser has a backward of its own, by the parameters alone.

With ``find_unused_parameters=False`` said. Stock: that backward is local, and its gradients are
added to the means.
"""

import torch
import torch.distributed as dist
from torch import nn


def program(DDP, record):
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DDP(net, find_unused_parameters=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        optimizer.zero_grad()
        ddp(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
        penalty = sum(param.pow(2).sum() for param in (net[0].weight, net[2].weight))
        (0.01 * penalty).backward()
        record.model(f"step {step}", net)
        optimizer.step()
