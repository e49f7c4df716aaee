"""Before an evaluation the averages that each rank keeps of its own state are swapped in.

Stock: the first forward of the evaluation has rank 0's average of the buffers everywhere.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn


def program(DDP, record):
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    average = copy.deepcopy(net.state_dict())
    held_out = torch.randn(64, 16, generator=torch.Generator().manual_seed(77)).chunk(4)
    for step in range(60):
        optimizer.zero_grad()
        x = torch.randn(8, 16, generator=generator) * (1 + rank)
        ddp(x).pow(2).mean().backward()
        optimizer.step()
        for name, value in net.state_dict().items():
            if value.is_floating_point():
                average[name].mul_(0.9).add_(value, alpha=0.1)
            else:
                average[name].copy_(value)
        if step % 20 == 19:
            backup = copy.deepcopy(net.state_dict())
            net.load_state_dict(average)
            ddp.eval()
            with torch.no_grad():
                for number, batch in enumerate(held_out):
                    record(f"step {step}, evaluation {number}", ddp(batch))
            net.load_state_dict(backup)
            ddp.train()
    record.model("end", net)
