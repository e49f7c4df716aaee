"""Two wrappers of one module with different groups: steps of a rank alone, and steps of all.

Stock: each wrapper reduces what goes through its own forwards.
"""

import torch
import torch.distributed as dist
from torch import nn


def program(DDP, record):
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    everyone = DDP(net)
    alone = DDP(net, process_group=groups[dist.get_rank()])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(24):
        is_global = step % 4 == 3
        optimizer.zero_grad()
        ddp = everyone if is_global else alone
        ddp(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
        record.model(f"step {step}", net)
        optimizer.step()
        if is_global:
            for param in net.parameters():
                dist.all_reduce(param.data)
                param.data /= dist.get_world_size()
