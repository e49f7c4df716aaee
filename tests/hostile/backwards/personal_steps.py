"""Personalised federated learning: steps of all through the wrapper, then a few of each rank's own.

Those go through ``ddp.module``, and are taken back. Stock: they are local.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn


def program(DDP, record):
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for round_ in range(4):
        for _ in range(6):
            optimizer.zero_grad()
            ddp(torch.randn(8, 16, generator=generator)).pow(2).mean().backward()
            optimizer.step()
        of_all = copy.deepcopy(net.state_dict())
        for _ in range(4):
            optimizer.zero_grad()
            (net(torch.randn(8, 16, generator=generator)) - rank).pow(2).mean().backward()
            optimizer.step()
        record.model(f"round {round_}, personal", net)
        net.load_state_dict(of_all)
    record.model("end", net)
