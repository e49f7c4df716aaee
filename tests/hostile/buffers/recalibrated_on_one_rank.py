"""Rank 0 recalibrates the statistics of BatchNorm with its module, then all ranks evaluate.

Stock: the next forward, one of the evaluation, gives them to all.
"""

import torch
import torch.distributed as dist
from torch import nn


def program(DDP, record):
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(40):
        optimizer.zero_grad()
        ddp(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
        optimizer.step()
    if rank == 0:
        with torch.no_grad():
            for _ in range(10):
                net(torch.randn(64, 16, generator=generator) * 3)
    dist.barrier()
    ddp.eval()
    held_out = torch.randn(64, 16, generator=torch.Generator().manual_seed(77)).chunk(4)
    with torch.no_grad():
        for number, x in enumerate(held_out):
            record(f"evaluation {number}", ddp(x))
    record.model("end", net)
