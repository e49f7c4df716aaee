"""A module that is TorchScript is wrapped, and trains.

Stock: as any other module.
"""

import warnings

import torch
import torch.distributed as dist
from torch import nn


def program(DDP, record):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    ddp = DDP(scripted)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(6):
        optimizer.zero_grad()
        ddp(torch.randn(4, 8, generator=generator)).pow(2).mean().backward()
        record.model(f"step {step}", ddp.module)
        optimizer.step()
